"""The command line: `commhooks list | describe NAME | env`, and the commands that packages add.

A command is a :data:`~commhooks.registry.spec.SetUp` function in the entry-point group `commhooks.commands`. Exit status 0 means
success, 1 a problem, 2 a bad command line. `list` and `describe` load no torch unless a hook has no summary, and every command
works while a plugin is broken.
"""

import argparse
import inspect
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ch_core import CommHooksError, UnknownHookError, plain, wrapped_on_terminal
from commhooks.cli import env, listing
from commhooks.cli.text import HelpFormatter, shortened
from commhooks.registry.distributions import version
from commhooks.registry.registry import REGISTRY
from commhooks.registry.spec import OWN_COMMANDS, SetUp

DOCS = "https://github.com/commhooks/commhooks/tree/main/docs"
EXAMPLE = "torchrun --nproc-per-node 2 -m commhooks run --hook quant4 train.py"
OWN: dict[str, SetUp] = dict(zip(OWN_COMMANDS, (listing.list_, listing.describe, env.env), strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if os.environ.get("RANK", "0") == "0":
        for sentence in env.unknown_variables(os.environ):
            print(wrapped_on_terminal(f"commhooks: {sentence}"), file=sys.stderr)
    try:
        with _other_libraries_silent():
            if not words or words[0].startswith("-"):
                return _overview(words)
            run, arguments = _parse(words[0], words[1:])
            if not getattr(arguments, "runs_script", False):
                return run(arguments) or 0
    except CommHooksError as error:
        if "--json" in words:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        else:
            print(wrapped_on_terminal(shortened(f"{type(error).__name__}: {error}")), file=sys.stderr)
        return 1
    except BrokenPipeError:  # `commhooks list | head`; the interpreter flushes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return run(arguments) or 0  # out here, exceptions and warnings of a script pass through


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


def _parse(name: str, words: list[str]) -> tuple[Callable[[argparse.Namespace], int | None], argparse.Namespace]:
    """Return the function of a command and its parsed options."""
    try:
        set_up = OWN.get(name) or REGISTRY.command(name)
    except UnknownHookError as error:
        print(f"commhooks: {error}\n  commhooks --help describes each command", file=sys.stderr)
        raise SystemExit(2) from None
    parser = argparse.ArgumentParser(
        prog=f"commhooks {name}", description=inspect.getdoc(set_up), formatter_class=HelpFormatter
    )
    run = set_up(parser)
    return run, parser.parse_args(words)


def _overview(words: list[str]) -> int:
    """Answer `--help`, `--version`, and a command line without a command."""
    parser = argparse.ArgumentParser(
        prog="commhooks",
        description="Gradient communication hooks for PyTorch data parallelism, by name.",
        epilog=f"commhooks COMMAND --help shows the options of a command.\n\nexample:\n  {EXAMPLE}\n\ndocumentation: {DOCS}",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"commhooks {version('commhooks')}")
    shown = parser.add_subparsers(required=True, title="commands", metavar="COMMAND")
    for name, text in {**{name: _help(own) for name, own in OWN.items()}, **_added()}.items():
        shown.add_parser(name, help=plain(text).replace("%", "%%"), add_help=False)
    if words:
        parser.parse_args(words)
    parser.print_help()
    return 0


def _added() -> dict[str, str]:
    """Return the commands that packages add, each with its help, or with the error of its import."""
    commands = REGISTRY.commands()
    names = [command.name for command in commands]
    found = {}
    for command in commands:
        shown = command.id if names.count(command.name) > 1 else command.name
        try:
            found[shown] = _help(REGISTRY.command(command.id))
        except CommHooksError as error:
            found[shown] = f"failed: {error}"
    return found


def _help(set_up: SetUp) -> str:
    return (inspect.getdoc(set_up) or "").partition("\n")[0]
