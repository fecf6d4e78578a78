"""The command line: `commhooks list | describe NAME | env | doctor`, each with `--json`, `run`, and what packages add.

Exit status 0 when all is well, 1 when something is wrong, 2 for a bad command line. `list` and `describe`
load no torch, and every command works while a plugin is broken.
"""

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from commhooks.cli.terminal import hanging
from commhooks.errors import CommHooksError, UnknownHookError
from commhooks.registry.commands import OWN, Command, choose
from commhooks.registry.registry import REGISTRY


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["run"]:  # what the script raises passes through
        from commhooks.launch.command import main as run

        return run(words[1:])
    try:
        if words and not words[0].startswith("-") and words[0] not in OWN:
            return _run_command(words[0], words[1:])
        with _others_silent():
            arguments = _parser().parse_args(words)
            status: int = arguments.run(arguments)
        return status
    except CommHooksError as error:
        if "--json" in words:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        else:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `commhooks list | head`
        sys.stderr.close()
        return 0


@contextmanager
def _others_silent() -> Iterator[None]:
    """What other libraries warn of when they are imported is no part of a report on hooks; errors are."""
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


def _run_command(name: str, words: list[str]) -> int:
    """A subcommand of a package, with the words after its name."""
    try:
        command = choose(REGISTRY.commands(), name)
    except UnknownHookError as error:
        print(error, file=sys.stderr)
        return 2
    run, before = REGISTRY.command(command), sys.argv
    sys.argv = [f"python -m commhooks {name}", *words]  # argparse takes the name that its usage shows from here
    try:
        return run(words) or 0
    finally:
        sys.argv = before


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="commhooks",
        description="Gradient communication hooks, by name.",
        epilog=_added(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"commhooks {version('ch-core')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
        sub.set_defaults(run=run)
        return sub

    from commhooks.cli import doctor, env, listing

    sub = command("list", listing.run_list, "Every installed hook and every plugin that failed.")
    sub.add_argument("word", nargs="?", default="*", help="a part of a name or summary, or a shell pattern of names")
    sub.add_argument("--kind", help="reduction, ddp, fsdp or wrapper")
    sub = command("describe", listing.run_describe, "A hook: what it does, its options, what it needs.")
    sub.add_argument("name", help="a name, an alias, provider/name, or an expression")
    sub.add_argument("--kind", help="reduction, ddp, fsdp or wrapper")
    command("env", env.run, "Versions and plugins, as a block to paste into an issue.")
    sub = command("doctor", doctor.run, "Load everything, try each hook on one gloo rank, say what is wrong.")
    sub.add_argument("name", nargs="?", help="try this hook or expression alone")
    sub.add_argument("-v", "--verbose", action="store_true", help="print tracebacks")
    sub.add_argument("--timeout", type=float, default=60.0, help="seconds that one hook may take (default 60)")
    sub.add_argument("--no-smoke", action="store_true", help="load only; start no process group")
    commands.add_parser("run", help="Run a training script, unchanged, with a hook on its models.", add_help=False)
    return parser


def _added() -> str:
    """What `--help` says of the subcommands that packages add: those of one package have one summary, the package's."""
    named: dict[tuple[str, str], list[str]] = {}
    for command, twice in _listed():
        named.setdefault((command.provider, command.summary), []).append(command.id if twice else command.name)
    lines = [hanging(f"  {', '.join(names):<18} {summary}", 21) for (_, summary), names in named.items()]
    return "\n".join(["from packages:", *lines]) if lines else ""


def _listed() -> list[tuple[Command, bool]]:
    """The subcommands of packages, and whether another has the same name."""
    commands = REGISTRY.commands()
    names = [command.name for command in commands]
    return [(command, names.count(command.name) > 1) for command in commands]
