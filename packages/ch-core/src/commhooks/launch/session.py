"""What ``commhooks run`` does in one process: attaches to the models that come, keeps their state, reports at the end."""

import atexit
import functools
import json
import logging
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commhooks.api.attaching import attach, inside, serves_alone, unwrapped
from commhooks.errors import SlotTakenError
from commhooks.handle import CommHook
from commhooks.launch.report import described, text
from commhooks.launch.settings import Settings
from commhooks.launch.snapshots import Snapshots
from commhooks.log import log, write_stderr

REPORTS = "COMMHOOKS_REPORTS"
"""Variable by which `commhooks run` gives the processes that its script starts a folder: a file for each that reported."""


@dataclass
class Served:
    """A model that has the hook. ``row`` is what the report says of it, once the model is gone."""

    name: str
    handle: CommHook | None
    snapshots: Snapshots | None = None
    row: dict[str, Any] = field(default_factory=dict)


class Session:
    """One process of a run.

    Args:
        settings: what was asked for.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.always = False  # report even if no model was wrapped
        folder = os.environ.get(REPORTS)
        self.reports = Path(folder) if folder else None  # where the processes of a run tell of theirs
        self.served: list[Served] = []
        self.notes: list[str] = []
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._ended = False
        self._process = os.getpid()
        atexit.register(self.end)

    def found(self, model: torch.nn.Module) -> None:
        """A model is about to make its first forward with gradients: attach, unless there is a reason not to."""
        if dist.is_initialized():  # a manager's members may have no default group
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        name, settings = name_of(model), self.settings
        if not any(fnmatchcase(one, settings.module_pattern) for one in names_of(model)):
            self._note(
                f"{name} does not match --module-pattern {settings.module_pattern!r}: it trains without {settings.hook}"
            )
            return
        if not settings.single_process and serves_alone(model):
            self._note(
                f"one process: {name} has nobody to send to, and trains without {settings.hook} (--single-process)"
            )
            return
        try:
            handle = attach(model, settings.hook, single_process=settings.single_process)
        except SlotTakenError as error:
            self._note(f"{name} has a hook of the script's own, which stays: {error}")
            return
        if self.served:
            self._note(
                f"{name} is model {len(self.served) + 1} that gets {settings.hook}: --module-pattern chooses one"
            )
        served = Served(name, handle)
        self.served.append(served)
        if settings.state:
            folder = Path(settings.state) / f"{len(self.served)}-{_plain(type(unwrapped(model)).__name__)}"
            served.snapshots = Snapshots(folder, handle, settings.state_every)
            served.snapshots.resume()
        # The handle holds the parameters: a script that drops its model gets their memory back.
        weakref.finalize(model, _gone, weakref.ref(served)).atexit = False

    def end(self) -> None:
        """Write the last state and the report; once, and from rank 0. Raises nothing that the script did not raise."""
        if self._ended or os.getpid() != self._process:  # a process that the script forked has nothing to report
            return
        self._ended = True
        for served in self.served:
            _last_snapshot(served)
        if self.rank == 0 and (self.served or self.notes or self.always):
            try:
                if self.served or not self._reported_elsewhere():
                    self._write_report()
            except Exception:
                log.exception("commhooks run: the report could not be written")

    def _reported_elsewhere(self) -> bool:
        """Whether a process that the script started has reported: this one only started it, and has nothing to say."""
        return self.reports is not None and any(self.reports.glob("*"))

    def _write_report(self) -> None:
        """Write the report as text and as JSON. Where one of them fails, the other is still written."""
        report = self.report()
        if self.served and self.reports is not None:
            with suppress(OSError):
                (self.reports / str(os.getpid())).touch()
        write_stderr(text(report) + "\n")
        if self.settings.report:
            data = json.dumps(report, indent=1, default=str) + "\n"
            try:
                _write_whole(Path(self.settings.report), data)
            except OSError as error:
                write_stderr(f"commhooks run: --report {self.settings.report} cannot be written ({error}):\n{data}")

    def report(self) -> dict[str, Any]:
        """What became of the hook, as data."""
        if not self.served and not self.notes:
            self.notes.append(
                "no model was wrapped for data parallelism and trained, neither here nor in a process that the script started "
                "on this machine, so the hook was never used: the script has to make a DistributedDataParallel, replicate or "
                "FSDP model"
            )
        models = [_described(one.name, one.handle) if one.handle is not None else one.row for one in self.served]
        return {"hook": self.settings.hook, "world_size": self.world_size, "models": models, "notes": self.notes}

    def _note(self, text: str) -> None:
        """Say something once, on rank 0, and repeat it in the report."""
        if text not in self.notes:
            self.notes.append(text)
            log.log(logging.WARNING if self.rank == 0 else logging.DEBUG, "%s", text)


def _last_snapshot(served: Served) -> None:
    if served.snapshots is not None:
        try:
            served.snapshots.end()
        except Exception:  # the script's own end, or error, must not be hidden by this one
            log.exception("--state: the last state of %s could not be written", served.name)


def _described(name: str, handle: CommHook) -> dict[str, Any]:
    """One model's part of the report, or why there is none: the other models have theirs."""
    try:
        return described(name, handle)
    except Exception as error:
        log.exception("commhooks run: no report of %s", name)
        return {"model": name, "error": f"{type(error).__name__}: {error}"}


def _write_whole(path: Path, data: str) -> None:
    """Write a file all or nothing, so that a full disk leaves an older report as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe: these are never replaced
        path.write_text(data)
        return
    aside = path.resolve().with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(data)
        os.replace(aside, path.resolve())
    finally:
        aside.unlink(missing_ok=True)


def _gone(served: "weakref.ref[Served]") -> None:
    found = served()
    if found is not None and found.handle is not None:
        _last_snapshot(found)
        found.row, found.handle, found.snapshots = _described(found.name, found.handle), None, None


def names_of(model: torch.nn.Module) -> set[str]:
    """What ``--module-pattern`` is compared with: the classes of the model, of what it wraps, and their bases."""
    names = set()
    for part in inside(model):
        for cls in type(part).__mro__:
            if cls.__module__ != "torch.nn.modules.module" and cls is not object:
                names |= {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}
    return names


def name_of(model: torch.nn.Module) -> str:
    """``DistributedDataParallel(GPT)``."""
    names = [type(part).__name__ for part in inside(model)]
    return "(".join(names) + ")" * (len(names) - 1)


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name)


@functools.cache
def session() -> Session:
    """The session of this process, with the settings that the environment gives."""
    return Session(Settings.of(os.environ))
