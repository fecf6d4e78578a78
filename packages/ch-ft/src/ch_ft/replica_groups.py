"""Between replica groups: ranks that hold one model together (FSDP2), in groups that a manager lets join, die and heal.

Every rank has a manager of its own, which reduces with the ranks of the other groups that hold the same part of the model.
What one rank loses, the vote of its group drops on all of them. A :class:`commhooks.Reducer` over a manager is driven from here
too: tensors in the place of a model's gradients, a round in that of a backward.
"""

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import torch

from ch_ft import agreement, healing
from ch_ft.exchange import group_behind
from ch_ft.failfast import FailFast
from ch_ft.managed_engine import ManagedEngine, attempts_of
from ch_ft.optimizer import OptimizerWrapper
from ch_ft.protocols import Manager
from ch_ft.transport import ManagerTransport, exchange_for
from ch_ft.versions import installed
from commhooks import (
    AttachError,
    Bucket,
    BucketLayout,
    CommHook,
    CommHooksError,
    HookNotSupportedError,
    HookState,
    Plain,
    Reduction,
    StepContext,
)
from commhooks.adapters import AttachOptions, BucketRun, Engine, Layouts, OptimizerWatch, raise_after_backward

R = TypeVar("R")


class GroupEngine(ManagedEngine):
    """Runs buckets inside of a backward that other ranks of the group carry out with this one.

    So nothing may be raised in the middle of it, or those would wait for ever: after a loss the rest of the attempt is
    computed, not reduced, and dropped by the vote.

    Args:
        transport, manager, reduction, state: as for :class:`~ch_ft.managed_engine.ManagedEngine`.
        agreement: run at the beginning of every backward; raises if the members differ.
        rounds: steps of the manager -> how many of them were this engine's; all of them if not given.
    """

    def __init__(
        self,
        transport: ManagerTransport,
        manager: Manager,
        reduction: Reduction,
        state: HookState | None,
        agreement: Callable[["GroupEngine"], None],
        rounds: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__(reduction, transport, manager, state)
        self._rounds = rounds
        self._agreement = agreement
        self._attempts = attempts_of(manager)
        self._lost: int | None = None  # number of the attempt
        self._guarded = False  # inside of `run`, which submits
        self._attempts.voters.add(self)

    def begin(self) -> None:
        super().begin()
        if self._rounds is not None:
            self.state.step = self._rounds(self.state.step)

    def run(self, bucket: Bucket) -> None:
        self._unless_lost(partial(super().run, bucket))

    def submit(self, bucket: Bucket) -> BucketRun | None:
        return self._unless_lost(partial(super().submit, bucket))

    def advance(self) -> None:
        if self.in_step:
            self._unless_lost(super().advance)

    def _unless_lost(self, work: Callable[[], R]) -> R | None:
        if self._guarded:
            return work()
        if self._lost == self._attempts.number:
            return None
        self._guarded = True
        try:
            if not self.in_step and not self.enter(lambda: self._agreement(self)):
                assert self.failure is not None  # noqa: S101 - that is why not
                raise self.failure
            return work()
        except CommHooksError as error:
            raised = self._drop(error)
            if raised is not None:
                raise_after_backward(raised)
            return None
        finally:
            self._guarded = False

    def finish(self, *, outside: BaseException | None = None) -> BaseException | None:
        if self._lost == self._attempts.number or not self.in_step:
            if outside is not None:
                self.report(outside)
            return outside
        try:
            error = super().finish(outside=outside)
        except CommHooksError as lost:
            error = lost
        return None if error is None else self._drop(error)

    def _drop(self, error: BaseException) -> BaseException | None:
        self._lost, self.failure = self._attempts.number, None  # the next attempt is another
        return self.lost(error)

    # -- the attempt's transaction

    def before_vote(self) -> None:
        self.known_before_vote()

    def after_vote(self, committed: bool) -> None:
        self.resolve(committed)

    def leave(self) -> None:
        """Take no part in votes any more."""
        self._attempts.voters.discard(self)


class Between:
    """A handle's reduction between the groups: a :class:`commhooks.adapters.ManagedAxis`."""

    def __init__(
        self, manager: Manager, owner: object, handle: CommHook, options: AttachOptions, layouts: Layouts
    ) -> None:
        if handle.reduction is None or not isinstance(handle.state, HookState):
            raise HookNotSupportedError(
                f"{handle.expr} is a foreign hook, and cannot run over a manager. Use a hook by name"
            )
        # A reducer's works are its own. Those of a backward lie in frames of torch as well: closing connections there is untried.
        group = None if isinstance(owner, torch.nn.Module) else group_behind(manager)
        fail_fast = FailFast(manager, group if hasattr(group, "abort") else None)
        transport = ManagerTransport(manager, fail_fast, exchange_for(handle.reduction, manager))
        self._manager, self._layouts, self._verifies = manager, layouts, options.verify_ranks
        watch = watched(manager, options, owner.parameters() if isinstance(owner, torch.nn.Module) else ())
        self._facts = {
            "hook": handle.expr,
            "options and providers": _sha(repr(handle.identity)),
            "commhooks": installed("ch-core") or "",
            "torch": torch.__version__.split("+")[0],
            **{name: f"{'; '.join(lines)[:200]}, {_sha(repr(list(lines)))}" for name, lines in options.facts.items()},
        }
        self.engine: Engine
        self.engine = self._engine = GroupEngine(
            transport, manager, handle.reduction, handle.state, self._agree, options.rounds
        )
        for layout in layouts():
            self._engine.plan(layout)  # raises here, if it must, and not in the first backward
        self._engine.votes.optimizer = watch
        if watch is not None and options.scaler is not None:
            self._engine.set_loss_scale(watch.scale)
        self._transferred = healing.transferred(owner, manager)
        self._transferred.serve(self._engine, self._facts)

    def plain(self) -> Engine:
        self.close()
        self._facts = {**self._facts, "hook": "detached", "options and providers": ""}
        self._engine = GroupEngine(ManagerTransport(self._manager), self._manager, Plain(), None, self._agree)
        return self._engine

    def close(self) -> None:
        self._transferred.serve(None, {})
        self._engine.leave()
        if self._engine.votes.optimizer is not None:
            self._engine.votes.optimizer.close()

    def _agree(self, engine: GroupEngine) -> None:
        """Anew in every backward: parameters may have been thawed since the last one, here and not there."""
        if not self._verifies:
            return
        layouts = self._layouts()
        facts = {
            **self._facts,
            "parameters": f"{sum(len(one.params) for one in layouts)} tensors, {_sha(repr(list(map(_described, layouts))))}",
            "collectives": _sha(repr([_plans(engine, layout) for layout in layouts])),
        }
        agreement.agree(engine.transport, facts)


def watched(manager: Manager, options: AttachOptions, params: Iterable[torch.Tensor]) -> OptimizerWatch | None:
    """What watches the optimizer and scaler given to ``attach``, if any: they decide after the manager has."""
    if isinstance(options.optimizer, OptimizerWrapper) and options.optimizer.manager is not manager:
        raise AttachError(
            "the OptimizerWrapper given as optimizer= votes with another manager than the model's: give both the same one"
        )
    if options.optimizer is None and options.scaler is None:
        return None
    return OptimizerWatch(options.optimizer, options.scaler, params)


def between(owner: object, handle: CommHook, options: AttachOptions, layouts: Layouts) -> Between:
    """The ``commhooks_manager`` of torchft's Manager and of the simulated one."""
    manager: Manager = options.manager  # type: ignore[assignment]  # the registry matched the class
    return Between(manager, owner, handle, options, layouts)


def _described(layout: BucketLayout) -> tuple[object, ...]:
    return ([(p.name, p.shape) for p in layout.params], layout.numel, str(layout.dtype))


def _plans(engine: GroupEngine, layout: BucketLayout) -> list[object]:
    """Now, and when every warm-up is over: a plan at this step alone would say less, and one of another step differ."""
    steps = (engine.state.step, engine.state.step + 10**6)
    return [engine.reduction.plan(layout, StepContext(0, 1, step)) for step in steps]


def _sha(text: str) -> str:
    return f"sha {hashlib.sha256(text.encode()).hexdigest()[:8]}"
