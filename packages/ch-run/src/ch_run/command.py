"""`commhooks run --hook EXPR script.py ARGS`, or with `--outer EXPR`."""

import argparse
import atexit
import gc
import importlib.util
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from importlib.machinery import PathFinder
from typing import Any

from ch_core import wrapped, write_stderr
from ch_run.import_watch import watch
from ch_run.settings import Settings
from commhooks import CommHooksError

NOT_ATTACHED = 3  # exit status of --must-attach. An exception has 1, and a bad command line 2
INTERPRETER = re.compile(r"python[\d.]*(\.exe)?")
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "srun")
EPILOG = """\
environment: COMMHOOKS_HOOK or COMMHOOKS_OUTER, and COMMHOOKS_GATHER, _REPORT,
  _STATE, _STATE_EVERY, _MODULE_PATTERN, _LINK, _SINGLE_PROCESS,
  _CHECK_RANKS_EVERY, _ON_DRIFT and _TRACE, do the same if a launcher owns
  the command line. The command sets them for processes that the script starts.

examples:
  torchrun --nproc-per-node 2 -m commhooks run --hook "powersgd(rank=4)" \\
      --report report.json train.py --epochs 3
  torchrun --nproc-per-node 2 -m commhooks run \\
      --outer "diloco(every=30, exchange=quant4)" train.py --epochs 3"""


class _Expression(argparse.Action):
    """Store an expression. Without one, the option would take the script as its value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values.endswith(".py"):
            option = self.option_strings[0]
            example = "diloco(every=30, exchange=quant4)" if option == "--outer" else "quant4"
            _complain(
                f"commhooks run: {option} needs an expression before the script, as in {option} '{example}' {values}"
            )
            parser.exit(2)
        setattr(namespace, self.dest, values)


def set_up(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the options of the command. Words after the script's name belong to the script."""
    parser.usage = "commhooks run [options] script.py [arguments of the script]"
    parser.description = (
        "Run a training script, unchanged, with a hook on each model that it wraps\n"
        "for data parallelism, or with an outer optimizer that averages less often."
    )
    parser.epilog = EPILOG
    parser.formatter_class = _formatter
    parser.set_defaults(runs_script=True)
    try:
        default = Settings.of()
    except ValueError as error:  # of a variable
        _complain(f"ValueError: {error}")
        parser.exit(2)
    for field in fields(Settings):
        value, metavar = getattr(default, field.name), field.metadata["metavar"]
        kind: dict[str, Any] = {"metavar": metavar, "type": type(value)}
        if metavar == "EXPR":
            kind["action"] = _Expression
        elif not metavar:
            kind = {"action": "store_true"} if isinstance(value, bool) else {"choices": ("warn", "raise")}
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=value, help=field.metadata["help"], **kind)
    parser.add_argument(
        "--must-attach",
        action="store_true",
        help=f"end with exit status {NOT_ATTACHED} if no model of the script got the hook",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="script is a module name, as for python -m")
    parser.add_argument("script", help="path of the script")
    rest = parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    rest.required = False  # otherwise the error for a missing script asks for these, too
    return run


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(
        prog, max_help_position=26, width=min(80, shutil.get_terminal_size().columns)
    )


def run(given: argparse.Namespace) -> int:
    """Check the expression, then run the script. Its exceptions and its exit status pass through."""
    try:
        settings = Settings(**{field.name: getattr(given, field.name) for field in fields(Settings)})
        for name in Settings.variables():
            os.environ.pop(name, None)  # options of the command line win, and so do their defaults
        if missing := _missing(given) or _behind(given):
            _complain(f"commhooks run: {missing}")
            return 2
        settings.check()  # needs no torch, and blames the command line
        settings.check_paths()
        watch(settings)  # before anything imports torch, because scripts import wrappers by name
        _create(settings)
    except (CommHooksError, ValueError) as error:
        _complain(f"{type(error).__name__}: {error}")
        return 2
    return _run(given)


def _complain(text: str) -> None:
    write_stderr(wrapped(text) + "\n")


def _missing(given: argparse.Namespace) -> str:
    """Return a sentence if the script or module does not exist, and an empty string otherwise. Imports nothing."""
    script, module = given.script, given.module
    if script in LAUNCHERS and not module and not os.path.exists(script):
        return (
            f"{script} is a launcher, not a script: put it first, as in torchrun --nproc-per-node 2 -m commhooks run --hook "
            f"quant4 train.py, or start {script} as always with the variable COMMHOOKS_HOOK (or COMMHOOKS_OUTER) set"
        )
    if not module and INTERPRETER.fullmatch(os.path.basename(script)):
        option, expr = next(
            ((name, value) for name in ("hook", "outer", "gather") if (value := getattr(given, name))),
            ("hook", "quant4"),
        )
        dropped, rest = _interpreter_options(given.words)
        if rest[:1] == ["-c"]:
            return f"run starts a script or a module, and no code of {script} -c: write the code into a file, and name this file"
        return (
            f"leave out {shlex.join([script, *dropped])}, because run starts the script itself: commhooks run --{option} "
            f"{shlex.quote(expr)} {shlex.join(rest) or 'train.py'}"
        )
    if not module:
        return "" if os.path.exists(script) else f"no such script: {script} (give a path, or -m and a module name)"
    top = script.partition(".")[0]
    found = PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
    return "" if found is not None else f"no such module: {script}"


def _behind(given: argparse.Namespace) -> str:
    """Return a sentence if no hook is given, and an option for it stands behind the script's name."""
    options = [f"--{field.name.replace('_', '-')}" for field in fields(Settings)]
    found = [word for word in given.words if word.partition("=")[0] in options]
    if given.hook or given.outer or given.gather or not found:
        return ""
    return (
        f"{found[0].partition('=')[0]} stands behind {given.script}, so the script gets it. Write the options of run before the "
        f"script, as in commhooks run --hook quant4 {given.script}"
    )


def _interpreter_options(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the words after an interpreter into its options, and the script or module with its arguments.

    >>> _interpreter_options(["-u", "-W", "ignore", "train.py", "-W", "1"])
    (['-u', '-W', 'ignore'], ['train.py', '-W', '1'])
    >>> _interpreter_options(["-um", "train"])
    (['-u'], ['-m', 'train'])
    """
    dropped, rest = list[str](), list(words)
    while rest and re.match(r"-.", rest[0]):  # a lone dash is standard input
        word = rest.pop(0)
        flags = re.match(r"-([^-WXcm]*)([WXcm]?)(.*)", word)  # no letters for a long option
        if flags and flags[2] in ("c", "m"):
            dropped += [f"-{flags[1]}"] if flags[1] else []
            return dropped, [f"-{flags[2]}", *([flags[3]] if flags[3] else []), *rest]
        dropped.append(word)
        if (flags and flags[2] and not flags[3]) or word == "--check-hash-based-pycs":
            dropped += rest[:1]
            del rest[:1]
    return dropped, rest


def _create(settings: Settings) -> None:
    """Build the hook, or every hook inside the expression of the outer optimizer, whose own code may refuse a value."""
    from commhooks import REGISTRY, create

    if settings.gather:
        create(settings.gather)
    if settings.hook:
        create(settings.hook)
    if not settings.outer:
        return
    spec, options = REGISTRY.outer(settings.outer)
    REGISTRY.target(spec)
    for name, option in (spec.options or {}).items():
        if option.hook:
            create(options[name])


def _run(given: argparse.Namespace) -> int:
    """Run the script and return the exit status of its success. Its exceptions pass through."""
    from ch_run import script
    from ch_run.auto_attach import REPORTS, auto_attach

    reports, process = "", os.getpid()
    with suppress(OSError):  # full disk; processes that the script starts then report independently
        reports = os.environ[REPORTS] = tempfile.mkdtemp(prefix="commhooks-")
    attach = auto_attach()
    attach.report_always = True
    interrupted: list[bool] = []
    atexit.register(_end_by_interrupt, interrupted)  # first, so that it runs after the script's own
    script_globals: dict[str, Any] | None = None
    try:
        script_globals = script.run(given.script, given.words, module=given.module)
    except KeyboardInterrupt:
        interrupted.append(True)
        raise
    except SystemExit as leaving:
        attach.raised = f"exit status {leaving.code!r:.80}" if leaving.code else ""
        if leaving.code not in (None, 0):
            raise
    except Exception as error:
        attach.raised = type(error).__name__
        raise
    finally:
        attach.end()
        # Models must go before the interpreter's modules, as those of a script that python runs. Threads of a process
        # group that outlive the modules abort the process.
        del script_globals
        gc.collect()
        if reports and os.getpid() == process:  # a process that the script forked comes here, too
            shutil.rmtree(reports, ignore_errors=True)
    return NOT_ATTACHED if given.must_attach and attach.unused else 0


def _end_by_interrupt(interrupted: list[bool]) -> None:
    """End as `python script.py` does after Ctrl-C. `python -m` exits with status 1, and a shell's loop continues."""
    if interrupted:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
