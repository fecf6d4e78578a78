"""Subcommands that packages add to `python -m commhooks`: the entry-point group `commhooks.commands`.

An entry is a name and a `"module:attr"`: a function that is given the words after the name, and returns an exit status.
Nothing is imported before the command is run, so `--help` lists commands without loading torch.
"""

import re
from dataclasses import dataclass

from commhooks.errors import AmbiguousHookError, HookConfigError, UnknownHookError

GROUP = "commhooks.commands"
OWN = ("list", "describe", "env", "doctor", "run")
"""The commands of ch-core, whose names no package can take."""

_NAME = re.compile(r"[a-z][a-z0-9_-]*\Z")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*\Z")


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand of a package.

    Raises:
        HookConfigError: the name or the target is malformed, or the name is one of `OWN`.

    Example:
        >>> Command("list", "acme.show:main", "acme-hooks", "1.0", "")
        Traceback (most recent call last):
        ...
        commhooks.errors.HookConfigError: the command 'list' of acme-hooks has the name of one of ch-core's own ...
    """

    name: str
    target: str
    provider: str
    version: str
    summary: str

    def __post_init__(self) -> None:
        if self.name in OWN:
            raise HookConfigError(
                f"the command {self.name!r} of {self.provider} has the name of one of ch-core's own "
                f"({', '.join(OWN)}); rename the entry point"
            )
        if not _NAME.match(self.name):
            raise HookConfigError(
                f"bad command name {self.name!r}: use lower-case letters, digits, '-' and '_', a letter first"
            )
        if not _TARGET.match(self.target):
            raise HookConfigError(
                f"command {self.name!r}: bad target {self.target!r}; write 'package.module:function', a function that "
                "takes the list of words after the command and returns an exit status"
            )

    @property
    def id(self) -> str:
        """`provider/name`, which no other distribution can claim."""
        return f"{self.provider}/{self.name}"


def choose(commands: list[Command], asked: str) -> Command:
    """The one command that a word stands for: a name, or `provider/name`.

    Raises:
        UnknownHookError: none has it.
        AmbiguousHookError: several packages offer it; both are named.
    """
    found = [command for command in commands if asked in (command.name, command.id)]
    if not found:
        names = ", ".join([*OWN, *sorted({command.name for command in commands})])
        raise UnknownHookError(f"unknown command {asked!r}; installed: {names}")
    if len(found) > 1:
        both = ", ".join(f"{command.id} {command.version}" for command in found)
        raise AmbiguousHookError(
            f"the command {asked!r} is ambiguous: {both}\n  name the provider: python -m commhooks {found[0].id}, or "
            "remove one of the packages"
        )
    return found[0]
