"""Warm-up: one hook for the first steps, and another one after them.

Gradients change fastest at the start of training, where a low-rank or quantized hook loses most. ``ctx.step``, the number of
committed steps, decides which hook runs. All ranks therefore switch at the same step, also after a resume. The engine converts
the state from the first hook's encoding to the second one's.
"""

from collections.abc import Hashable
from typing import Any

from commhooks import (
    Bucket,
    Composite,
    HookConfigError,
    ParamLayout,
    Plain,
    Reduction,
    Shards,
    Stages,
    StepContext,
    composed,
)


class Warmup(Composite):
    """Runs ``first`` until ``steps`` steps are committed, then ``then``.

    Both count steps from the start of training, so warm-ups nest: ``warmup(warmup(a, b, steps=5), c, steps=10)`` runs a,
    then b from step 5, then c from step 10.
    """

    name = "warmup"

    def __init__(self, first: Reduction, then: Reduction, steps: int) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise HookConfigError(f"warmup(steps={steps!r}): expected a number of steps, 0 or more")
        super().__init__(first, then)
        self.piece_bytes = self.pieces_of_parts()
        self.first, self.then, self.steps = first, then, steps
        if isinstance(first, Plain):
            self.name = f"warmup({then.name})"

    def active(self, step: int) -> Reduction:
        """Return the reduction of a step."""
        return self.first if step < self.steps else self.then

    def part_for(self, param: ParamLayout, step: int) -> Reduction:
        return self.active(step)

    def phase(self, step: int) -> Hashable:
        return step < self.steps, self.active(step).phase(step)

    def route(self, param: ParamLayout, step: int) -> str | None:
        if step < self.steps and isinstance(self.first, Plain):
            return f"warm-up until step {self.steps}"
        return super().route(param, step)

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        return self.active(ctx.step).start(bucket, ctx)

    def run_scatter(self, shards: Shards, ctx: StepContext) -> Stages:
        return self.active(ctx.step).start_scatter(shards, ctx)

    def config(self) -> dict[str, Any]:
        return {"steps": self.steps}


def warmup(*hooks: Any, steps: int = 1000) -> Any:
    """Average exactly for ``steps`` steps, then run a hook; or run one hook, then another.

    Args:
        hooks: one hook, or a first and a second hook. Each is a reduction, or a hook function that carries a reduction.
        steps: number of committed steps before the last hook takes over.

    Returns:
        A reduction, or a hook if one was given.

    Raises:
        HookConfigError: not one or two hooks, a foreign hook, or a bad ``steps``.

    Example:
        >>> from commhooks import Plain
        >>> from ch_wrappers import WireCast
        >>> scheduled = warmup(WireCast(Plain(), "bf16"), steps=2)
        >>> [scheduled.active(step).name for step in range(4)]
        ['allreduce', 'allreduce', 'bf16_wrapper(allreduce)', 'bf16_wrapper(allreduce)']
    """
    if len(hooks) not in (1, 2):
        raise HookConfigError(f"warmup takes one hook, or a first and a second one; got {len(hooks)}")
    pair = hooks if len(hooks) == 2 else (Plain(), hooks[0])
    return composed("warmup", pair, lambda parts: Warmup(parts[0], parts[1], steps))
