"""Trains a model of the script with an outer optimizer (`commhooks run --outer`)."""

import gc
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ch_core import checksum, log
from ch_run.found_model import FoundModel
from ch_run.live_optimizers import optimizers_of
from ch_run.outer_protocol import Outer
from ch_run.outer_state import OuterKept
from ch_run.own_messages import OwnMessages, own_messages
from ch_run.saved_states import Kept, watch_saves
from ch_trace import Traced
from commhooks import (
    REGISTRY,
    HookConfigError,
    HookNotSupportedError,
    RankMismatchError,
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
        self._optims, self._rank = list(optims), dist.get_rank()  # a script may save after it has destroyed the group
        _, options = REGISTRY.outer(expression)
        self._every, self._steps, self._told = options.get("every"), options.get("steps"), False
        if self._steps is None:
            self._say(
                f"--outer: {expression} has no steps=, so the steps after the last whole round will reach no other rank. Give "
                "steps=N, the number of optimizer steps of the whole run"
            )
        for one in optims:  # before follow(), so that these hooks run before the exchange of a step
            OwnMessages(one, name, group)
        self._close = outer.follow(*optims[:-1], finish_after=self._steps)
        watch_saves(self.script_saved)

    def _say(self, text: str) -> None:
        log.log(logging.WARNING if self._rank == 0 else logging.DEBUG, "%s", text)

    def script_saved(self) -> None:
        """Tell that ranks hold different models, at the first save of the script inside a round."""
        if self.row is not None or self._told or self.outer.common:
            return
        self._told, step = True, self.outer.next_common()
        ends = (
            f"after step {step}, and every {self._every} steps"
            if step
            else "only after the last step, which steps= gives"
        )
        self._say(
            f"--outer: the script saves after step {self.outer.count}, inside a round. The file has the model of the rank that "
            f"saves. Inside a round ranks hold different models. They hold one {ends}"
        )

    def start_line(self, model: torch.nn.Module) -> str:
        state = f"; {self.state.resumed}" if self.state is not None else ""
        return f"{self.expression} on {self.name}: a rank sends once in a round{state}"

    def figures(self) -> dict[str, Any]:
        found = {"outer": self.expression, "steps": self.outer.count, "stats": self.outer.stats()}
        return {**found, **self.outer.report()}

    def source(self) -> Traced:
        return self.outer

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
            self._close()
            self._optims = []
            del self.outer, self._close  # the closer holds the outer optimizer, which the next one would find


def attach_outer(model: torch.nn.Module, name: str, expression: str, link: str = "") -> FoundModel | None:
    """Stop the averaging of a model's gradients, and follow its optimizers. Return None if it has no optimizer yet.

    Args:
        model: wrapped for data parallelism, before its first forward with gradients.
        name: for people.
        expression: of the outer optimizer.
        link: slowest link between two ranks, if the user has named it.

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
    changed = False
    if not optims or wrapped in _waiting:
        now = checksum(*wrapped.parameters())
        changed = _waiting.setdefault(wrapped, now) != now
    if not optims and not changed:
        return None
    if not optims:
        raise HookNotSupportedError(
            f"--outer: the parameters of {name} have changed, and no torch.optim optimizer holds them. So no step would be "
            "counted, and the ranks would train alone. Step the parameters themselves, or use ch_outer in the script if an "
            "optimizer steps fp32 copies or is of another kind"
        )
    spec, options = REGISTRY.outer(expression)
    if link:
        options = {**options, "link": link}
    try:
        outer: Outer = REGISTRY.target(spec)(optims[-1], wrapped, process_group=group, **options)
    except RankMismatchError as error:
        if not changed:
            raise
        raise HookNotSupportedError(
            f"--outer: {type(optims[-1]).__name__} was made after the forward of its first step, which would be missing from the "
            f"round ({error}). Make the optimizer before the first forward of {name}"
        ) from error
    log.info("%s trains with %s around %s", name, expression, ", ".join(type(one).__name__ for one in optims))
    return OuterModel(name, expression, wrapped, outer, optims, group)


def _optimizers(model: torch.nn.Module, name: str) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a model in the order of their creation.

    Raises:
        SlotTakenError: the script uses an outer optimizer itself.
        HookNotSupportedError: an optimizer averages itself, or two step one parameter.
        HookConfigError: an optimizer also steps tensors that are not the model's.
    """
    # No name keeps the optimizers, because one that the script has replaced may be in a cycle.
    if len(optimizers_of(model.parameters())) > 1:
        gc.collect()
    optims = optimizers_of(model.parameters())
    mine = {id(param) for param in model.parameters()}
    owner: dict[int, torch.optim.Optimizer] = {}
    for optim in optims:
        kind = type(optim).__name__
        if hasattr(optim, "follow"):
            raise SlotTakenError(f"the script makes its own {kind}", by=kind)
        if type(optim).__module__.startswith("torch.distributed"):
            raise own_messages(name, kind)
        if callable(getattr(optim, "eval", None)):
            raise HookNotSupportedError(
                f"--outer cannot train {name} with {kind}, which has eval(). A schedule-free optimizer swaps averages of its own "
                "into the model there, and ranks do not exchange these. Use an optimizer that steps the parameters alone"
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


_waiting: "weakref.WeakKeyDictionary[torch.nn.Module, str]" = weakref.WeakKeyDictionary()
"""Models that have run a forward before the script made their optimizer, with the checksum of their parameters then."""


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
                f"steps={steps}."
            )
    return "\n".join(lines)
