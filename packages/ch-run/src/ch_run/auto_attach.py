"""Gives the models of one process the hook or outer optimizer of `commhooks run`, and reports when the process ends."""

import atexit
import functools
import json
import logging
import multiprocessing.util
import os
import weakref
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ch_core import log, wrapped_on_terminal, write_stderr
from ch_run.found_model import FoundModel, HookedModel, KeptModel, LoneModel
from ch_run.live_optimizers import optimizers_of
from ch_run.outer_model import attach_outer, outer_text
from ch_run.settings import Settings
from commhooks import (
    HookNotSupportedError,
    SlotTakenError,
    adapter_for,
    as_text,
    attach,
    create,
    inside,
    runs_alone,
    unwrapped,
    write_whole,
)

REPORTS = "COMMHOOKS_REPORTS"
"""Variable with the folder in which each process of a run that has reported leaves a file."""


class AutoAttach:
    """The hook or outer optimizer of one process of a run.

    Args:
        settings: of the run.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.raised = ""  # type of the exception, or exit status, that ended the script
        self.report_always = False  # True in the process of the command: it reports even if it found no model
        folder = os.environ.get(REPORTS)
        self.reports = Path(folder) if folder else None
        self.models: list[FoundModel] = []
        self.alone: list[LoneModel] = []  # trained by one process without the hook
        self.notes: list[str] = []
        self._gathering: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        # True on rank 0 after the end if no model got the hook, here or in a process that this one started
        self.unused = False
        self.not_used = ""  # note about the first model that keeps a hook of the script's own
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._ended = False
        self._process = os.getpid()
        atexit.register(self.end)
        # A rank that the script forked ends without atexit, but runs the finalizers of multiprocessing.
        if multiprocessing.parent_process() is not None:
            multiprocessing.util.Finalize(None, self.end, exitpriority=100)

    def found(self, model: torch.nn.Module) -> bool:
        """Attach to a model before its first forward with gradients, or note the reason for not attaching.

        Returns:
            False if the model has to be found again in its next forward, because its optimizer is still missing, or because it
            is frozen. A frozen model, such as a teacher, has no gradients, and its wrapper may not fit the hook.
        """
        if dist.is_initialized():  # members of a torchft manager may have no default group
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        name, settings = name_of(model), self.settings
        if self._left_out(model, name):
            return True
        trains = any(param.requires_grad for param in model.parameters())
        ready = trains or not (settings.hook or settings.outer)
        if not ready:
            self._note(
                f"{name} has no trainable parameters, so it has no {settings.hook or settings.outer} until it has some"
            )
        try:
            if settings.outer:
                outer = attach_outer(model, name, settings.outer, settings.link) if trains else None
                if outer is None:
                    return False
                made: list[FoundModel] = [outer]
            else:
                made = self._attach(model, name, trains)
        except SlotTakenError as error:
            note = _not_used(settings.expression, name, error)
            self.not_used = self.not_used or note
            self._note(note)
            return True
        if self.models and made:
            self._note(
                f"{name} is model {len(self.models) + 1} that gets {settings.expression}. Give --module-pattern to choose one"
            )
        for found in made:
            self._add(found, model)
        return ready

    def _left_out(self, model: torch.nn.Module, name: str) -> bool:
        """Return True if the model gets nothing by the options of the run, and note the reason."""
        settings = self.settings
        if not any(fnmatchcase(one, settings.module_pattern) for one in names_of(model)):
            self._note(
                f"{name} does not match --module-pattern {settings.module_pattern!r}: it trains without {settings.expression}"
            )
            return True
        if not settings.single_process and runs_alone(model):
            self._note(
                f"one process: {name} has no peer to send to, so it trains without {settings.expression}. --single-process "
                "attaches it anyway"
            )
            self._keep_alone(model, name)
            return True
        return False

    def _add(self, found: FoundModel, model: torch.nn.Module) -> None:
        """Add a model to the report, and resume its state and begin its trace if the run has them."""
        settings = self.settings
        self.models.append(found)
        if settings.state:
            self._keep_state(found, model, len(self.models))
        if self.rank == 0:
            write_stderr(wrapped_on_terminal(f"commhooks run: {found.start_line(unwrapped(model))}") + "\n")
        try:
            if settings.trace:
                found.begin_trace(str(Path(settings.trace) / f"{_label(len(self.models), model)}.json"))
            if settings.live:
                found.begin_live(settings.live)
        except HookNotSupportedError as error:
            self._note(f"{name_of(model)} is not traced, and has no live lines: {error}")
        _drop_with(model, found)

    def _keep_alone(self, model: torch.nn.Module, name: str) -> None:
        """Name the parameters of each step in the folder of states. More ranks can then go on from these checkpoints."""
        settings = self.settings
        params: list[torch.Tensor] = [param for param in unwrapped(model).parameters() if param.requires_grad]
        if settings.state and settings.hook and params:
            found = LoneModel(name, settings.hook, params)
            self.alone.append(found)
            self._keep_state(found, model, len(self.alone))
            _drop_with(model, found)

    def _keep_state(self, found: KeptModel, model: torch.nn.Module, number: int) -> None:
        """Resume a model's state, and write it from now on, in a folder that no other model of this process has."""
        taken = {one.state.folder for one in [*self.models, *self.alone] if one.state is not None}
        while (folder := Path(self.settings.state) / _label(number, model)) in taken:
            number += 1
        found.keep_state(folder, self.settings.state_every, taken)

    def wrapped_again(self, module: torch.nn.Module) -> None:
        """End the training of models whose parameters are about to be wrapped once more, on all ranks."""
        for found in self.models:
            found.end_for(module)

    def _attach(self, model: torch.nn.Module, name: str, trains: bool) -> list[FoundModel]:
        """Attach the hooks of gradients and of weight gathers. Each is a model of the report.

        Args:
            model: the model.
            name: its name for people.
            trains: True if it has trainable parameters. A frozen model gathers weights, too, but reduces nothing.
        """
        settings, made = self.settings, list[FoundModel]()
        gathers = bool(settings.gather) and getattr(adapter_for(unwrapped(model)), "gathers_weights", False)
        if settings.gather and not gathers:
            self._note(
                f"{name} gathers no weights, so --gather {settings.gather}, which is for FSDP2, does nothing for it"
            )
        if settings.hook and trains:
            hook = create(settings.hook)
            fields = hook.reduction.fields.values() if hook.reduction is not None else ()
            handle = attach(
                model,
                hook,
                # Gradients that the script throws away would stay in residuals. Other hooks work with any optimizer.
                optimizer=optimizers_of if any(kind != "shared" for kind in fields) else None,
                link=settings.link or None,
                single_process=settings.single_process,
                check_ranks_every=settings.check_ranks_every or None,
                on_drift="raise" if settings.on_drift == "raise" else "warn",
            )
            made.append(HookedModel(name, handle))
        if gathers and model not in self._gathering:
            self._gathering.add(model)
            if settings.check_ranks_every and not settings.hook:
                self._note(
                    f"--check-ranks-every compares nothing of {name}: --gather alone attaches no hook to gradients. Give --hook, "
                    "too, such as --hook allreduce. It then compares replicas of one shard, if the model has any"
                )
            link = settings.link or None
            handle = attach(model, settings.gather, axis="gather", link=link, single_process=settings.single_process)
            made.append(HookedModel(f"{name}, weight gathers", handle))
        return made

    def end(self) -> None:
        """Write the last state and, on rank 0, the report; once. Raises nothing."""
        if self._ended or os.getpid() != self._process:  # a process that the script forked has nothing to report
            return
        self._ended = True
        for lone in self.alone:
            lone.write_last_state()
        for found in self.models:
            found.write_last_state()
            found.end_trace()
        if self.rank == 0 and (self.models or self.notes or self.report_always):
            try:
                self.unused = not self.models and not self._reported_by_another()
                if self.models or self.unused:
                    self._write_report()
            except Exception:
                log.exception("commhooks run: the report could not be written")

    def _reported_by_another(self) -> bool:
        """Return True if a process that the script started has reported. This process then only started it."""
        return self.reports is not None and any(self.reports.glob("*"))

    def _write_report(self) -> None:
        """Write the report as text and as JSON. If one of them fails, the other is still written."""
        report = self.report()
        if self.models and self.reports is not None:
            with suppress(OSError):
                (self.reports / str(os.getpid())).touch()
        write_stderr(wrapped_on_terminal(report_text(report)) + "\n")
        if self.settings.report and not self.settings.live:
            data = json.dumps(report, indent=1, default=str) + "\n"
            try:
                write_whole(Path(self.settings.report), data)
            except OSError as error:
                write_stderr(f"commhooks run: --report {self.settings.report} cannot be written ({error}):\n{data}")

    def report(self) -> dict[str, Any]:
        """Return the report of this process as plain values."""
        if self.raised and not self.models:
            self.notes.append(
                f"the script ended by {self.raised} before it trained a model with {self.settings.expression}"
            )
            if "RANK" not in os.environ:
                self.notes.append(
                    "RANK is not set: if the script needs several processes, start it with torchrun --nproc-per-node N -m "
                    "commhooks run ..."
                )
        elif not self.models and not self.notes:
            self.notes.append(
                "no model was wrapped for data parallelism and trained, in this process or in one that the script started on "
                "this machine. So the hook was never used. Make a DistributedDataParallel, replicate or FSDP model in the "
                "script"
            )
        models = [found.report() for found in self.models]
        return {
            "hook": self.settings.expression,
            "world_size": self.world_size,
            "models": models,
            "notes": self.notes,
            "not_used": self.not_used,
        }

    def _note(self, text: str) -> None:
        """Log a sentence once, on rank 0, and repeat it in the report."""
        if text not in self.notes:
            self.notes.append(text)
            log.log(logging.WARNING if self.rank == 0 else logging.DEBUG, "%s", text)


def report_text(report: dict[str, Any]) -> str:
    """Return the report of a run in lines.

    Example:
        >>> report = {"hook": "noop", "world_size": 2, "models": [], "notes": ["nothing was wrapped"], "not_used": ""}
        >>> print(report_text(report))
        commhooks run: noop on 2 ranks
        note: nothing was wrapped
    """
    world, notes = report["world_size"], list(report["notes"])
    lines = [f"commhooks run: {report['hook']} on {world} rank{'s' * (world != 1)}"]
    if report["not_used"] and not report["models"]:
        lines = [f"commhooks run: {report['not_used']}"]
        notes.remove(report["not_used"])
    for model in report["models"]:
        lines += [model["model"], _model_text(model)]
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def _not_used(expression: str, model: str, error: SlotTakenError) -> str:
    """Return a sentence for a user of `commhooks run` whose script has a hook itself."""
    if not error.by:
        return f"{expression} not used: {model} has a hook of the script's own, which stays: {error}"
    return (
        f"{expression} not used: {model} has a hook of the script's own, which stays: {error.by}. Remove it from the script to "
        f"use {expression}"
    )


def _model_text(model: dict[str, Any]) -> str:
    if "error" in model:
        return str(model["error"])
    text = outer_text(model) if "outer" in model else as_text(model)
    trace = model.get("trace")
    if trace is None:
        return text
    page = f"; commhooks trace {trace['file']} --html trace.html draws it"
    written = f"trace written to {trace['file']}{page}" if trace["file"] else "the trace could not be written"
    return f"{text}\n\n{trace['text']}\n{written}"


def _drop_with(model: torch.nn.Module, kept: KeptModel) -> None:
    """Drop a model of the run with the user's module. It holds the parameters, whose memory is then free."""
    weakref.finalize(list(inside(model))[-1], _model_gone, weakref.ref(kept)).atexit = False


def _model_gone(reference: "weakref.ref[KeptModel]") -> None:
    found = reference()
    if found is not None:
        found.drop()


def _label(number: int, model: torch.nn.Module) -> str:
    """Return the name of a model's files."""
    cls = type(unwrapped(model)).__name__
    return f"{number}-" + "".join(c if c.isalnum() or c in "._-" else "_" for c in cls)


def names_of(model: torch.nn.Module) -> set[str]:
    """Return the names for `--module-pattern`: classes of the model and of the models inside, and their bases."""
    names = set()
    for part in inside(model):
        for cls in type(part).__mro__:
            if cls.__module__ != "torch.nn.modules.module" and cls is not object:
                names |= {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}
    return names


def name_of(model: torch.nn.Module) -> str:
    """Return the name for people, e.g. `DistributedDataParallel(GPT)`."""
    names = [type(part).__name__ for part in inside(model)]
    return "(".join(names) + ")" * (len(names) - 1)


@functools.cache
def auto_attach() -> AutoAttach:
    """Return the one object of this process, with the settings of the environment.

    Raises:
        HookConfigError: a file of the run cannot be written.
    """
    settings = Settings.of(os.environ)
    settings.check_paths()
    return AutoAttach(settings)


os.register_at_fork(after_in_child=auto_attach.cache_clear)  # a rank that the script forks reports itself
