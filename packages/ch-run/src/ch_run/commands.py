"""The commands `run` and `doctor` of `python -m commhooks`. `--help` imports this module, so it imports no torch and no rich."""

import argparse
from collections.abc import Callable


def run(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Run a training script, unchanged, with a hook on its models."""
    from ch_run import command

    return command.set_up(parser)


def doctor(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Load everything, try each hook on one gloo rank, report problems."""
    from ch_run import doctor

    return doctor.set_up(parser)
