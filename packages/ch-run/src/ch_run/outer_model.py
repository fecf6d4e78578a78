"""Trains a model of the script with an outer optimizer (`commhooks run --outer`)."""

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ch_core import log
from ch_run.found_model import FoundModel
from ch_run.live_optimizers import optimizers_of
from ch_run.outer_protocol import Outer
from ch_run.outer_state import OuterKept
from ch_run.saved_states import Kept
from ch_run.shared_checkpoint import share_checkpoints
from ch_trace import Trace
from commhooks import (
    REGISTRY,
    HookConfigError,
    HookNotSupportedError,
    SlotTakenError,
    class_names,
    load_target,
    size,
    unwrapped,
)

APART_GROWN = 2.0
"""Growth of the distance between ranks from which the report advises against it."""


class OuterModel(FoundModel):
    """A model whose ranks train alone between two rounds of an outer optimizer."""

    def __init__(
        self,
        name: str,
        expression: str,
        model: torch.nn.Module,
        outer: Outer,
        optims: Sequence[torch.optim.Optimizer],
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(name)
        self.expression, self.outer, self._group = expression, outer, group
        self.params = {id(param) for param in model.parameters()}
        self._model: weakref.ref[torch.nn.Module] = weakref.ref(model)
        self._optims = list(optims)
        _, options = REGISTRY.outer(expression)
        self._closers = [
            share_checkpoints(model, outer.shared),
            outer.follow(*optims[:-1], finish_after=options.get("steps")),
        ]

    def figures(self) -> dict[str, Any]:
        found = {"outer": self.expression, "steps": self.outer.count, "stats": self.outer.stats()}
        return {**found, **self.outer.report()}

    def begin_trace(self, path: str) -> Trace:
        return Trace(self.outer, path)

    def kept(self) -> Kept:
        model = self._model()
        assert model is not None  # noqa: S101 - asked only when the model was found
        return OuterKept(self.expression, self.outer, model, self._optims, self._group)

    def end_for(self, module: torch.nn.Module) -> None:
        if self.row is None and any(id(param) in self.params for param in module.parameters()):
            self.outer.finish()
            self.drop()

    def drop(self) -> None:
        if self.row is None:
            super().drop()
            for close in self._closers:
                close()
            self._closers, self._optims = [], []
            del self.outer


def attach_outer(model: torch.nn.Module, name: str, expression: str) -> FoundModel | None:
    """Stop the averaging of a model's gradients, and follow its optimizers. Return None if it has no optimizer yet.

    Args:
        model: wrapped for data parallelism, before its first forward with gradients.
        name: for people.
        expression: of the outer optimizer.

    Raises:
        SlotTakenError: the script already uses an outer optimizer or a communication hook.
        HookNotSupportedError: the wrapper or an optimizer averages in a way that an outer optimizer cannot replace.
        HookConfigError: as the outer optimizer itself.
    """
    wrapped = unwrapped(model)
    local_gradients = REGISTRY.local_gradients()
    target = next((local_gradients[cls] for cls in class_names(wrapped) if cls in local_gradients), None)
    if target is None:
        legal = ", ".join(sorted({cls.rpartition(".")[2] for cls in local_gradients}))
        raise HookNotSupportedError(
            f"--outer cannot train {name}: ranks that exchange moves need whole gradients of their own. Legal wrappers: {legal}"
        )
    optims = _optimizers(wrapped, name)
    group = load_target(target)(wrapped)  # also without an optimizer, because DDP prepares an average in each forward
    if not optims:
        if wrapped in _waiting:
            log.warning(
                "--outer: %s has no torch.optim optimizer so far, so its ranks train alone, without any round", name
            )
        _waiting.add(wrapped)
        _watch_late_steps()
        return None
    _waiting.discard(wrapped)
    spec, options = REGISTRY.outer(expression)
    outer: Outer = REGISTRY.target(spec)(optims[-1], wrapped, process_group=group, **options)
    log.info("%s trains with %s around %s", name, expression, ", ".join(type(one).__name__ for one in optims))
    return OuterModel(name, expression, wrapped, outer, optims, group)


def _optimizers(model: torch.nn.Module, name: str) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a model in the order of their creation.

    Raises:
        SlotTakenError: the script uses an outer optimizer itself.
        HookNotSupportedError: an optimizer averages itself, or two step one parameter.
        HookConfigError: an optimizer also steps tensors that are not the model's.
    """
    optims = optimizers_of(model.parameters())
    if len(optims) > 1:
        gc.collect()  # an optimizer that the script has replaced may still live in a reference cycle
        optims = optimizers_of(model.parameters())
    mine = {id(param) for param in model.parameters()}
    owner: dict[int, torch.optim.Optimizer] = {}
    for optim in optims:
        kind = type(optim).__name__
        if hasattr(optim, "follow"):
            raise SlotTakenError(f"the script makes its own {kind}", by=kind)
        if type(optim).__module__.startswith("torch.distributed"):
            raise HookNotSupportedError(
                f"--outer cannot train {name} with {kind}, whose step sends its own messages. Use a plain torch.optim "
                "optimizer"
            )
        for param in (p for group in optim.param_groups for p in group["params"]):
            other = owner.setdefault(id(param), optim)
            if other is not optim:
                raise HookNotSupportedError(
                    f"--outer cannot choose between {type(other).__name__} and {kind}, which both step parameters of {name}. "
                    "Drop one of them (del), or use ch_outer in the script"
                )
            if id(param) not in mine:
                raise HookConfigError(
                    f"{kind} steps a tensor of shape {tuple(param.shape)} that is no parameter of {name}. Ranks would not "
                    "average it. Make one optimizer for each model"
                )
    return optims


_waiting: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()
"""Models that have run a forward before the script made their optimizer."""


def _watch_late_steps() -> None:
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(torch.compiler.disable(_refuse_late))


_watching = False


def _refuse_late(optim: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    stepped = {id(param) for group in optim.param_groups for param in group["params"]}
    for model in list(_waiting):
        if any(id(param) in stepped for param in model.parameters()):
            raise HookNotSupportedError(
                f"--outer: {type(optim).__name__} was made after the forward of the step that it ends, so this step would be "
                f"missing from the round. Make the optimizer before the first forward of {type(model).__name__}"
            )


def outer_text(row: Mapping[str, Any]) -> str:
    """Return the report of a model that trained with an outer optimizer, as lines."""
    stats, apart = row["stats"], [one for one in row.get("apart", ()) if one is not None]
    lines = [
        f"{row['outer']}: {row['steps']} inner steps, {stats.get('rounds_done', 0):.0f} rounds",
        f"{size(stats.get('wire_bytes', 0.0))} sent; {row.get('exchange_share', 0.0):.1%} of the time in exchanges",
    ]
    if apart:
        grown = row.get("apart_growth", 1.0)
        warning = (
            f". The latest rounds are {grown:.1f} times as far apart as the first ones (medians): a lower learning rate or "
            "shorter rounds keep them closer"
        )
        lines.append(
            f"ranks apart at the end of a round: {apart[0]:.2g} of the parameters' norm at first, {apart[-1]:.2g} at last"
            f"{warning if grown > APART_GROWN else ''}"
        )
    if alone := row.get("steps_alone"):
        steps = row["steps"]
        if stats.get("rounds_done", 0):
            last = "last step is" if alone == 1 else f"last {alone} steps are"
            lines.append(
                f"warning: the {last} on no other rank; give steps={steps} to average once more after the last step"
            )
        else:
            lines.append(
                f"warning: no round was completed, so the ranks hold different models; give every= below {steps}, or "
                f"steps={steps}. Checkpoints of the script hold the initial model"
            )
    return "\n".join(lines)
