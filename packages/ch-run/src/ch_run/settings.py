"""Settings of `commhooks run`, from arguments or environment variables.

Standard library only, because the interpreter reads them while it starts.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from commhooks import HookConfigError

PREFIX = "COMMHOOKS_"


def _option(default: Any, metavar: str, help: str) -> Any:
    return field(default=default, metadata={"metavar": metavar, "help": help})


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of `commhooks run`. Each is also a variable: `COMMHOOKS_` and the name in capitals.

    Example:
        >>> Settings.of({"COMMHOOKS_HOOK": "powersgd", "COMMHOOKS_STATE_EVERY": "10"}).state_every
        10
        >>> Settings("noop", single_process=True).environ()
        {'COMMHOOKS_HOOK': 'noop', 'COMMHOOKS_SINGLE_PROCESS': '1'}
    """

    hook: str = _option("", "EXPR", "hook expression, e.g. 'powersgd(rank=4)'")
    outer: str = _option("", "EXPR", "outer optimizer instead, e.g. 'diloco(every=30)'")
    gather: str = _option("", "EXPR", "hook on FSDP2's weight gathers, e.g. 'quant8'")
    report: str = _option("", "FILE", "write the report there, as JSON; or live, live=100, live=30s")
    state: str = _option("", "DIR", "write the hook's state there; resume it")
    state_every: int = _option(1, "N", "optimizer steps between two snapshots of the state (1)")
    module_pattern: str = _option("*", "GLOB", "class names of the models that get the hook (*)")
    link: str = _option("", "RATE,TIME", "slowest link between far ranks, e.g. '200mbit,80ms'")
    single_process: bool = _option(False, "", "compress in one process, too")
    check_ranks_every: int = _option(0, "N", "compare the parameters of all ranks every N steps")
    on_drift: str = _option("warn", "", "what to do if they differ (warn)")
    trace: str = _option("", "DIR", "write a trace of each model there")

    def __post_init__(self) -> None:
        if self.state_every < 1:
            raise ValueError(
                f"--state-every (COMMHOOKS_STATE_EVERY) is {self.state_every}: give at least 1 optimizer step"
            )
        if self.check_ranks_every < 0:
            raise ValueError(
                f"--check-ranks-every (COMMHOOKS_CHECK_RANKS_EVERY) is {self.check_ranks_every}: give a number of steps, or 0 "
                "for no comparison"
            )
        if self.on_drift not in ("warn", "raise"):
            raise ValueError(f"--on-drift (COMMHOOKS_ON_DRIFT) is {self.on_drift!r}: give warn or raise")

    @staticmethod
    def variables() -> list[str]:
        """Return the names of the environment variables."""
        return [PREFIX + field.name.upper() for field in fields(Settings)]

    @staticmethod
    def of(environ: Mapping[str, str] = os.environ) -> "Settings":
        """Return the settings of environment variables. The hook is empty if no variable names one.

        Raises:
            ValueError: a variable has an illegal value.
        """
        given = {
            f.name: environ[PREFIX + f.name.upper()] for f in fields(Settings) if PREFIX + f.name.upper() in environ
        }
        made: dict[str, str | int | bool] = {**given}
        for name, unit in (("state_every", "optimizer steps"), ("check_ranks_every", "steps")):
            if name in given:
                if not given[name].isdecimal():
                    raise ValueError(f"{PREFIX}{name.upper()}={given[name]}: give a number of {unit}")
                made[name] = int(given[name])
        if "single_process" in given:
            made["single_process"] = given["single_process"] not in ("", "0")
        return Settings(**made)  # type: ignore[arg-type]

    def environ(self) -> dict[str, str]:
        """Return the variables that pass these settings to processes of the script."""
        default = Settings()
        changed = {
            f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)
        }
        return {PREFIX + name.upper(): "1" if value is True else str(value) for name, value in changed.items()}

    def check(self) -> None:
        """Check names and declared options of every level of the expression. Imports no torch and no hook.

        It also runs while torch is half imported, so a hook's module must not be imported here.

        Raises:
            UnknownHookError, AmbiguousHookError, HookConfigError: as `commhooks.create`, except for options that the hook
                declares in its code alone.
        """
        from ch_core import Link  # imports no torch
        from commhooks import REGISTRY, interval  # loads pluggy and every plugin module

        if self.hook and self.outer:
            raise HookConfigError(
                f"--hook {self.hook!r} and --outer {self.outer!r} exclude each other: with an outer optimizer no gradient is "
                "averaged. Give the hook as its exchange, e.g. --outer 'diloco(exchange=quant4)'"
            )
        if self.outer and self.gather:
            raise HookConfigError(
                f"--outer {self.outer!r} and --gather {self.gather!r} exclude each other: an outer optimizer gathers "
                "weights exactly. Leave out one of them"
            )
        if self.gather:
            REGISTRY.refuse_outer(REGISTRY.levels(self.gather, declared_only=True))
        if self.outer and self.check_ranks_every:
            raise HookConfigError(
                "--check-ranks-every does not fit --outer: between two rounds the ranks' parameters differ by design, and the "
                "outer optimizer itself compares them at its start. Leave it out"
            )
        if self.link:
            Link.parse(self.link)
        if self.live:
            interval(self.live)
        if self.outer:
            REGISTRY.outer(self.outer, declared_only=True)
        elif self.hook:
            REGISTRY.refuse_outer(REGISTRY.levels(self.hook, declared_only=True))
        elif not self.gather:
            raise HookConfigError(
                "no hook: use --hook EXPR or COMMHOOKS_HOOK=EXPR, e.g. 'powersgd(rank=4)', or --outer EXPR or "
                "COMMHOOKS_OUTER=EXPR, e.g. 'diloco(every=30, exchange=quant4)'"
            )

    def check_paths(self) -> None:
        """Try the paths of the report, the states and the traces, so that a script does not train for nothing.

        Raises:
            HookConfigError: naming option, path and reason.
        """
        from commhooks import why_unwritable

        rank = os.environ.get("RANK", "0")
        report = self.report if rank == "0" and not self.live else ""  # rank 0 writes it, and its disk may be another
        for option, path, folder in (
            ("--report", report, False),
            ("--state", self.state, True),
            ("--trace", self.trace, True),
        ):
            problem = why_unwritable(Path(path), folder=folder) if path else ""
            if problem:
                raise HookConfigError(
                    f"{option} {path} cannot be written ({problem}): give a path where this user may write, on a disk with room"
                )

    @property
    def live(self) -> str:
        """Interval of live lines, if the report is ``live`` instead of a file; otherwise empty."""
        word, _, every = self.report.partition("=")
        return (every or "10s") if word == "live" else ""

    @property
    def expression(self) -> str:
        """The expression of the hook, of the outer optimizer, or of the hook on weight gathers alone."""
        return self.hook or self.outer or self.gather
