"""``python -m commhooks run --hook EXPR script.py ARGS``."""

import argparse
import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from typing import Any

from commhooks.errors import CommHooksError
from commhooks.launch.door import open_door
from commhooks.launch.settings import Settings
from commhooks.log import write_stderr

EPILOG = """environment: COMMHOOKS_HOOK and COMMHOOKS_REPORT, _STATE, _STATE_EVERY, _MODULE_PATTERN, _SINGLE_PROCESS do the
same where a launcher owns the command line. The command sets them for processes that the script starts."""


def parser() -> argparse.ArgumentParser:
    """The options; the script's own words follow its name."""
    made = argparse.ArgumentParser(
        prog="python -m commhooks run",
        description="Run a training script, unchanged, with a hook on the models that it wraps for data parallelism.",
        epilog=EPILOG,
    )
    default = Settings.of()
    made.add_argument("--hook", default=default.hook, help="the hook's expression, e.g. 'powersgd(rank=4)'")
    made.add_argument("--report", default=default.report, metavar="FILE", help="write the report there, as JSON")
    made.add_argument(
        "--state", default=default.state, metavar="DIR", help="keep the hook's state there, and resume it"
    )
    made.add_argument(
        "--state-every",
        type=int,
        default=default.state_every,
        metavar="N",
        help="optimizer steps from one state to the next (1)",
    )
    made.add_argument(
        "--module-pattern", default=default.module_pattern, metavar="GLOB", help="which models: class names"
    )
    made.add_argument(
        "--single-process", action="store_true", default=default.single_process, help="compress in one process, too"
    )
    made.add_argument("-m", dest="module", action="store_true", help="the script is a module's name, as for python -m")
    made.add_argument("script", help="path of the script")
    made.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="the script's arguments")
    return made


def main(words: list[str]) -> int:
    """Check the expression, then run the script; its exceptions and its exit status are its own."""
    try:
        given = parser().parse_args(words)
        options = {name: value for name, value in vars(given).items() if name not in ("script", "words", "module")}
        settings = Settings(**options)
        for name in [name for name in os.environ if name in Settings("x", "x", "x", 2, "x", True).environ()]:
            del os.environ[name]  # an option given here wins, its default included
        open_door(settings)  # before anything imports torch: who imports a wrapper by name gets the one that announces
        _check(settings)
    except (CommHooksError, ValueError) as error:
        write_stderr(f"{type(error).__name__}: {error}\n")
        return 2
    _run(given)
    return 0


def _run(given: argparse.Namespace) -> None:
    from commhooks.launch import script
    from commhooks.launch.session import REPORTS, session

    reports, process = "", os.getpid()
    with suppress(OSError):  # a full disk: then processes that the script starts report for themselves only
        reports = os.environ[REPORTS] = tempfile.mkdtemp(prefix="commhooks-")
    running = session()
    running.always = True
    interrupted: list[bool] = []
    atexit.register(_end_by_interrupt, interrupted)  # first, so that it runs after the script's own
    its_globals: dict[str, Any] | None = None
    try:
        its_globals = script.run(given.script, given.words, module=given.module)
    except KeyboardInterrupt:
        interrupted.append(True)
        raise
    finally:
        running.end()
        # Models go now, after the report and before the interpreter's modules, as those of a script that python runs
        # itself: process groups whose threads outlive the modules end the process with an abort.
        del its_globals
        gc.collect()
        if reports and os.getpid() == process:  # a process that the script forked comes here, too
            shutil.rmtree(reports, ignore_errors=True)


def _end_by_interrupt(interrupted: list[bool]) -> None:
    """End as `python script.py` does after Ctrl-C. `python -m` would exit with status 1, which a shell's loop ignores."""
    if interrupted:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _check(settings: Settings) -> None:
    """Everything that can be known of the hook before there is a model."""
    from commhooks.launch.checking import check

    check(settings)  # before the next line imports torch
    from commhooks.api.creating import create

    create(settings.hook)
