"""What ``commhooks run`` was told, as arguments or as environment variables. Standard library only: the door reads it
while the interpreter starts.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

PREFIX = "COMMHOOKS_"


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of ``commhooks run``; each is the variable ``COMMHOOKS_`` and its name in capitals.

    Attributes:
        hook: the expression.
        report: file for the JSON report; empty: none.
        state: folder for the hook's state; empty: it is not kept.
        state_every: optimizer steps from one snapshot of the state to the next.
        module_pattern: shell pattern of the models that get the hook, by class name or qualified class name.
        single_process: compress in a single process, too.

    Example:
        >>> Settings.of({"COMMHOOKS_HOOK": "powersgd", "COMMHOOKS_STATE_EVERY": "10"}).state_every
        10
        >>> Settings("noop", single_process=True).environ()
        {'COMMHOOKS_HOOK': 'noop', 'COMMHOOKS_SINGLE_PROCESS': '1'}
    """

    hook: str
    report: str = ""
    state: str = ""
    state_every: int = 1
    module_pattern: str = "*"
    single_process: bool = False

    def __post_init__(self) -> None:
        if self.state_every < 1:
            raise ValueError(
                f"--state-every (COMMHOOKS_STATE_EVERY) is {self.state_every}: give a number of optimizer steps from 1 on"
            )

    @staticmethod
    def of(environ: Mapping[str, str] = os.environ) -> "Settings":
        """The settings that environment variables give; the hook is empty where none is asked for.

        Raises:
            ValueError: a value is none that the option can have.
        """
        given = {
            f.name: environ[PREFIX + f.name.upper()] for f in fields(Settings) if PREFIX + f.name.upper() in environ
        }
        made: dict[str, str | int | bool] = {**given, "hook": given.get("hook", "")}
        if "state_every" in given:
            if not given["state_every"].isdecimal():
                raise ValueError(f"COMMHOOKS_STATE_EVERY={given['state_every']}: give a number of optimizer steps")
            made["state_every"] = int(given["state_every"])
        if "single_process" in given:
            made["single_process"] = given["single_process"] not in ("", "0")
        return Settings(**made)  # type: ignore[arg-type]

    def environ(self) -> dict[str, str]:
        """The variables that give these settings to processes that the script starts."""
        default = Settings("")
        changed = {
            f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)
        }
        return {PREFIX + name.upper(): "1" if value is True else str(value) for name, value in changed.items()}
