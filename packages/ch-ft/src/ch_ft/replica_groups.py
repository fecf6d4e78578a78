"""Reduce between replica groups that a manager lets join, die and heal.

The ranks of one group hold one model together (FSDP2). Each rank has its own manager, and reduces with the ranks of
other groups that hold the same part of the model. If one rank loses a step, the vote of its group drops it on all its
ranks. A :class:`commhooks.Reducer` over a manager works the same way, with tensors instead of gradients and a round
instead of a backward.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from ch_core import BucketRun, Engine
from ch_ft import fingerprints, healing
from ch_ft.attempts import ManagedSteps
from ch_ft.fail_fast import FailFast
from ch_ft.manager import Manager
from ch_ft.transport import ManagerTransport, collectives_for, group_of_manager
from commhooks import (
    AttachOptions,
    Bucket,
    BucketLayout,
    CommHook,
    CommHooksError,
    HookNotSupportedError,
    HookState,
    Layouts,
    OptimizerWatch,
    Plain,
    Reduction,
    StepContext,
    raise_after_backward,
)

R = TypeVar("R")


class GroupEngine(Engine):
    """Engine that skips the rest of an attempt after a loss.

    Other ranks of the group take part in the same backward. If this rank raised in it, they would wait for ever. So
    after a loss the rest of the attempt is computed but not reduced, and the vote drops it.

    Args:
        transport, reduction, state: see :class:`~ch_core.Engine`.
        manager: manager that commits the steps.
        agreement: called with the engine at the beginning of every backward. It raises if members differ.
    """

    def __init__(
        self,
        transport: ManagerTransport,
        manager: Manager,
        reduction: Reduction,
        state: HookState | None,
        agreement: Callable[["GroupEngine"], None],
    ) -> None:
        super().__init__(reduction, transport, state, timeout=None)
        self._manager_transport, self._manager = transport, manager
        self._agreement = agreement
        self._lost: int | None = None  # number of the lost attempt
        self._guarded = False  # True inside run(), which calls submit()
        self._steps: ManagedSteps | None = None

    def commit_by_manager(self, options: AttachOptions | None = None, owner: object = None) -> None:
        """Let the manager commit this engine's steps from now on."""
        params = owner.parameters if isinstance(owner, torch.nn.Module) else tuple
        self._steps = ManagedSteps(self, self._manager_transport, self._manager, options, params)

    @property
    def steps(self) -> ManagedSteps:
        assert self._steps is not None  # noqa: S101 - commit_by_manager() comes right after construction
        return self._steps

    def run(self, bucket: Bucket) -> None:
        self._unless_lost(partial(super().run, bucket))

    def submit(self, bucket: Bucket) -> BucketRun | None:
        return self._unless_lost(partial(super().submit, bucket))

    def advance(self) -> None:
        if self.in_step:
            self._unless_lost(super().advance)

    def finish(self, *, outside: BaseException | None = None) -> BaseException | None:
        if self._lost == self.steps.attempts.number or not self.in_step:
            if outside is not None:
                self.steps.report(outside)
            return outside
        try:
            error = super().finish(outside=outside)
        except CommHooksError as lost:
            error = lost
        return None if error is None else self._drop(error)

    def _unless_lost(self, work: Callable[[], R]) -> R | None:
        if self._guarded:
            return work()
        if self._lost == self.steps.attempts.number:
            return None
        self._guarded = True
        try:
            if not self.in_step and not self.steps.enter(lambda: self._agreement(self)):
                assert self.failure is not None  # noqa: S101 - enter() has set it
                raise self.failure
            return work()
        except CommHooksError as error:
            raised = self._drop(error)
            if raised is not None:
                raise_after_backward(raised)
            return None
        finally:
            self._guarded = False

    def _drop(self, error: BaseException) -> BaseException | None:
        self._lost = self.steps.attempts.number
        self.set_failure(None)  # the next attempt may succeed
        return self.steps.lost(error)


class Between:
    """Reduction of a handle between the groups of one manager. Implements :class:`commhooks.ManagedAxis`."""

    def __init__(
        self, manager: Manager, owner: object, handle: CommHook, options: AttachOptions, layouts: Layouts
    ) -> None:
        if handle.reduction is None or handle.hook_state is None:
            raise HookNotSupportedError(
                f"{handle.expr} is a foreign hook and cannot run over a manager. Use a hook by name"
            )
        # Works of a reducer are its own. Frames of torch hold works of a backward too, and closing connections there is untried.
        group = None if isinstance(owner, torch.nn.Module) else group_of_manager(manager)
        fail_fast = FailFast(manager, group if hasattr(group, "abort") else None)
        transport = ManagerTransport(manager, fail_fast, collectives_for(handle.reduction, manager))
        self._manager, self._layouts, self._verifies = manager, layouts, options.verify_ranks
        self._facts = {
            **fingerprints.of_handle(handle),
            **{
                name: f"{'; '.join(lines)[:200]}, {fingerprints.short_hash(repr(list(lines)))}"
                for name, lines in options.facts.items()
            },
        }
        self.engine: Engine
        self.engine = self._engine = GroupEngine(transport, manager, handle.reduction, handle.hook_state, self._agree)
        for layout in layouts():
            self._engine.plan(layout)  # its errors are raised here and not in the first backward
        self._engine.commit_by_manager(options, owner)
        self._transferred = healing.transferred(owner, manager)
        self._transferred.serve(self._engine, self._facts)

    @property
    def watch(self) -> OptimizerWatch | None:
        return self._engine.steps.watch

    def plain(self) -> Engine:
        self.close()
        self._facts = {**self._facts, "hook": "detached", "options and providers": ""}
        self._engine = GroupEngine(ManagerTransport(self._manager), self._manager, Plain(), None, self._agree)
        self._engine.commit_by_manager()
        return self._engine

    def close(self) -> None:
        self._transferred.serve(None, {})
        self._engine.steps.close()

    def _agree(self, engine: GroupEngine) -> None:
        """Compare members in every backward, because one of them may have thawed parameters since the last."""
        if not self._verifies:
            return
        layouts = self._layouts()
        count = sum(len(layout.params) for layout in layouts)
        facts = {
            **self._facts,
            "parameters": f"{count} tensors, {fingerprints.short_hash(repr([_described(one) for one in layouts]))}",
            "collectives": fingerprints.short_hash(repr([_plans(engine, layout) for layout in layouts])),
        }
        fingerprints.agree(engine.steps.transport, facts)


def between(owner: object, handle: CommHook, options: AttachOptions, layouts: Layouts) -> Between:
    """Return the reduction between groups. The plugin hook ``commhooks_adapter`` names it."""
    manager: Manager = options.manager  # type: ignore[assignment]  # the registry matched the class
    return Between(manager, owner, handle, options, layouts)


def _described(layout: BucketLayout) -> tuple[object, ...]:
    return ([(p.name, p.shape) for p in layout.params], layout.numel, str(layout.dtype))


def _plans(engine: GroupEngine, layout: BucketLayout) -> list[object]:
    """Return the plans of now and of after every warm-up. One plan alone could be equal by chance."""
    steps = (engine.state.step, engine.state.step + 10**6)
    return [engine.reduction.plan(layout, StepContext(0, 1, step)) for step in steps]
