"""The command line: `commhooks list | describe NAME | env | doctor | run`, and the commands that packages add.

Exit status 0 means success, 1 a problem, 2 a bad command line. `list`, `describe`, `env` and `doctor` take `--json`.
`list` and `describe` load no torch, and every command works while a plugin is broken.
"""

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from commhooks.cli.terminal import HelpFormatter
from commhooks.errors import CommHooksError, UnknownHookError
from commhooks.log import wrapped_on_terminal
from commhooks.registry.distributions import version
from commhooks.registry.docstrings import first_line
from commhooks.registry.registry import REGISTRY
from commhooks.registry.spec import OWN_COMMANDS, Command

DOCS = "https://github.com/commhooks/commhooks/tree/main/docs"
EXAMPLE = "torchrun --nproc-per-node 2 -m commhooks run --hook quant4 train.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["run"]:  # exceptions and exit status of the script pass through
        from commhooks.launch.command import main as run

        return run(words[1:])
    try:
        if words and not words[0].startswith("-") and words[0] not in OWN_COMMANDS:
            return _run_added_command(words[0], words[1:])
        with _other_libraries_silent():
            parser = _parser()
            if not words:
                parser.print_help()
                return 0
            arguments = parser.parse_args(words)
            status: int = arguments.run(arguments)
        return status
    except CommHooksError as error:
        if "--json" in words:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        else:
            print(wrapped_on_terminal(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return 1
    except BrokenPipeError:  # `commhooks list | head`; the interpreter flushes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


@contextmanager
def _other_libraries_silent() -> Iterator[None]:
    """Hide warnings that other libraries raise at import, because a report on hooks does not need them. Errors still show."""
    last = logging.lastResort
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        level = last.level if last is not None else 0
        if last is not None:
            last.setLevel(logging.ERROR)
        try:
            yield
        finally:
            if last is not None:
                last.setLevel(level)


def _run_added_command(name: str, words: list[str]) -> int:
    """Run a command of a package with the words after its name."""
    try:
        run = REGISTRY.command(name)
    except UnknownHookError as error:
        print(f"commhooks: {error}\n  commhooks --help describes each command", file=sys.stderr)
        return 2
    before = sys.argv
    sys.argv = [f"commhooks {name}", *words]  # argparse shows this name in the usage line
    try:
        return run(words) or 0
    finally:
        sys.argv = before


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="commhooks",
        description="Gradient communication hooks for PyTorch data parallelism, by name.",
        epilog=f"commhooks COMMAND --help shows the options of a command.\n\nexample:\n  {EXAMPLE}\n\ndocumentation: {DOCS}",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"commhooks {version('ch-core')}")
    commands = parser.add_subparsers(required=True, title="commands", metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, formatter_class=HelpFormatter)
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        sub.set_defaults(run=run)
        return sub

    from commhooks.cli import doctor, env, listing

    sub = command("list", listing.run_list, "List the installed hooks by use, and plugins that failed.")
    sub.add_argument(
        "word", nargs="?", default="*", help="part of a name or summary, a package, or a shell pattern of names"
    )
    sub.add_argument("--kind", help="reduction, ddp, fsdp, wrapper or outer")
    sub = command("describe", listing.run_describe, "Describe a hook: use, cost, options, requirements.")
    sub.add_argument("name", help="name, alias, provider/name, or an expression")
    sub.add_argument("--kind", help="reduction, ddp, fsdp, wrapper or outer")
    command("env", env.run, "Print versions and plugins, as a block for an issue.")
    sub = command("doctor", doctor.run, "Load everything, try each hook on one gloo rank, report problems.")
    sub.add_argument("name", nargs="?", help="try this hook or expression only")
    sub.add_argument("-v", "--verbose", action="store_true", help="print tracebacks")
    sub.add_argument("--timeout", type=float, default=60.0, help="seconds allowed for one hook (default 60)")
    sub.add_argument("--no-smoke", action="store_true", help="load only; start no process group")
    commands.add_parser("run", help="Run a training script, unchanged, with a hook on its models.", add_help=False)
    added = REGISTRY.commands()
    names = [each.name for each in added]
    for each in added:  # only for the help text: main() runs them
        shown = each.id if names.count(each.name) > 1 else each.name
        commands.add_parser(shown, help=_summary(each).replace("%", "%%"), add_help=False)
    return parser


def _summary(command: Command) -> str:
    """Return the first line of the docstring of a command's module, or the summary of its package without one."""
    return first_line(command.target.partition(":")[0]) or command.summary
