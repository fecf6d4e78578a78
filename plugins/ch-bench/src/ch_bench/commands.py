"""The commands `advise` and `bench` of `python -m commhooks`. `--help` imports this module, so it imports no torch."""

import argparse
from collections.abc import Callable


def advise(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Predict step times with each hook on your network, and recommend one."""
    from ch_bench.advise import command

    return command.set_up(parser)


def bench(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Time hooks and PyTorch's own on one model, in turns in one run."""
    from ch_bench.cost import bench

    return bench.set_up(parser)
