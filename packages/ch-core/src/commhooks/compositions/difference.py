"""Gathers of weights that send the change since the last gather instead of the weights.

Every rank keeps a copy of the weights that all ranks computed with last. Rank r sends ``C(w_r - c_r)`` of its exact shard
``w_r``, and every rank adds the decoded change to its copy, ``c' = c + C(w - c)``. The part that the code lost is in the next
difference, because rank r subtracts the copy and not its last weights. Rounding errors therefore do not add up (SDP4Bit,
arXiv:2410.15526).

A weight changes little in a step, so that a difference has a smaller range than the weight, and 4 bits suffice. The price is
the copy, one full model per rank.
"""

from collections.abc import Collection, Hashable
from types import MappingProxyType
from typing import Any

from commhooks.bucket import Bucket, ParamLayout
from commhooks.compositions.base import Composite, composed
from commhooks.errors import HookConfigError, HookNotSupportedError
from commhooks.reduction import Reduction, Stages, StepContext
from commhooks.shards import Weights

COPY = "copy"


class Difference(Composite):
    """Gathers weights as differences to a copy.

    In the first step and in every ``full_every``-th step all weights travel exactly. Parameters that ``inner`` does not
    compress always travel exactly.

    State: ``copy``, shared, of the parameter's shape and the dtype of the gather, one per parameter. A parameter without a
    copy is coded against zeros, and its error shrinks by the factor of the code in every gather.

    Raises:
        HookConfigError: ``full_every`` is not positive.
        HookNotSupportedError: ``inner`` cannot gather weights.
    """

    name = "difference"
    lossy = True
    copies_weights = True
    fields = MappingProxyType({COPY: "shared"})

    def __init__(self, inner: Reduction, full_every: int) -> None:
        if isinstance(full_every, bool) or not isinstance(full_every, int) or full_every < 1:
            raise HookConfigError(f"difference(full_every={full_every!r}): expected a number of steps, 1 or more")
        if not inner.gathers_weights:
            raise HookNotSupportedError(
                f"difference cannot wrap {inner!r}, which cannot gather weights. Use one that does, such as quant4 or quant8"
            )
        if not inner.lossy:
            raise HookConfigError(f"{inner.name} loses nothing, so differences save no bytes. Use {inner.name} alone")
        super().__init__(inner)
        self.full_every = full_every

    def config(self) -> dict[str, Any]:
        return {"full_every": self.full_every}

    def phase(self, step: int) -> Hashable:
        return self._is_full(step), self.inner.phase(step)

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        yield from ()
        raise HookNotSupportedError(
            f"{self!r} gathers weights, and cannot average gradients. Give it to attach(axis='gather') of an FSDP2 model, "
            "and the hook inside to the axis of the gradients"
        )

    def gather_weights(self, weights: Weights, ctx: StepContext) -> Stages:
        return self.start_gather_weights(weights, ctx)

    def start_gather_weights(self, weights: Weights, ctx: StepContext, exact: Collection[str] = ()) -> Stages:
        """Gather differences, and the parameters of ``exact`` as they are. The copies are those of all parameters."""
        params = weights.params
        routed = self.inner.routes(weights.layout.part, ctx.step) if self.inner.lossy else {}
        plainly = {
            p.name
            for p in params
            if self._is_full(ctx.step) or p.name in exact or p.name in routed or not self._codes(p, ctx.step)
        }
        dry = weights.storage.is_meta  # a plan has no numbers
        copies = [] if dry else [self._copy(weights, p, ctx) for p in params]
        pieces = [weights.cut(p, copy) for p, copy in zip(params, copies, strict=not dry)]
        for p, own, parts in zip(params, weights.own(), pieces, strict=not dry):
            if p.name not in plainly:
                mine = parts[weights.rank]
                own[: mine.numel()].sub_(mine)  # w - c, without the padding
        yield from self.inner.start_gather_weights(weights, ctx.child("difference"), plainly)
        if dry:
            return
        for rank, vectors in enumerate(weights.vectors()):
            for p, vector, parts in zip(params, vectors, pieces, strict=True):
                there = vector[: parts[rank].numel()]
                if p.name not in plainly:
                    there.add_(parts[rank])
                parts[rank].copy_(there)
        for p, copy, parts in zip(params, copies, pieces, strict=True):
            weights.join(p, parts, copy)

    def _copy(self, weights: Weights, param: ParamLayout, ctx: StepContext) -> Any:
        """Return the place of a parameter's copy, ``(numel,)`` of the whole parameter, filled with the last copy."""
        whole = weights.whole(param)
        before = ctx.read(param.name, COPY, whole.shape)
        place = ctx.stage(param.name, COPY, whole.shape, weights.storage.dtype, weights.device)
        if before is None:
            place.zero_()
        elif before is not place:
            place.copy_(before)
        return place.view(-1)

    def _codes(self, param: ParamLayout, step: int) -> bool:
        """Return True if ``inner`` compresses the parameter. A policy chooses a part for each."""
        part = self.inner
        while isinstance(part, Composite) and len(part.parts) > 1:
            part = part.part_for(param, step)
        return part.lossy

    def _is_full(self, step: int) -> bool:
        return step == 0 or (step + 1) % self.full_every == 0


def difference(hook: Any, full_every: int = 500) -> Any:
    """Gather the change of the weights since the last gather, with error feedback.

    Args:
        hook: a lossy hook that gathers weights, such as ``quant4``.
        full_every: steps from one gather of exact weights to the next. The first step has one, too.

    Raises:
        HookConfigError, HookNotSupportedError: see :class:`Difference`.

    Example:
        >>> from commhooks.bucket import BucketLayout
        >>> from commhooks.reduction import Plain
        >>> from commhooks.compositions.all_gather import Gathered
        >>> from commhooks.compositions.wire_cast import WireCast
        >>> made = Gathered(difference(WireCast(Plain(), "bf16"), full_every=10))
        >>> layout = BucketLayout.of_shapes({"w": (4, 4)})
        >>> [made.plan(layout, StepContext(world_size=2, step=step))[0][0].payload_bytes for step in (0, 1, 9)]
        [64, 32, 64]
    """
    return composed("difference", [hook], lambda parts: Difference(parts[0], full_every))
