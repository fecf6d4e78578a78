"""Runs a reduction as an all-gather of sharded parameters, for adapters of sharded models."""

from collections.abc import Collection

import torch

from ch_core.bucket import Bucket, ParamLayout
from ch_core.errors import HookNotSupportedError
from ch_core.reduce_scatter import Scattered
from ch_core.reduction import Reduction, Stages, StepContext
from ch_core.shards import ShardLayout, Weights


class Gathered(Scattered):
    """Runs :meth:`.Reduction.gather_weights` of a reduction on buckets that :meth:`gather_bucket` makes.

    Args:
        inner: a reduction that ``gathers_weights``.
        exact: names of parameters that travel exactly whatever ``inner`` does, with the reason for each.

    Raises:
        HookNotSupportedError: ``inner`` has no :meth:`.Reduction.gather_weights`, keeps state or rounds at random.

    Example:
        >>> from ch_core import BucketLayout, Plain
        >>> made, cut = Gathered(Plain()), ShardLayout.of(BucketLayout.of_shapes({"w": (3, 2)}), 2)
        >>> bucket = made.gather_bucket(cut, torch.ones(8))
        >>> [(r.kind, r.numel) for stage in made.plan(bucket.layout, StepContext(world_size=2)) for r in stage]
        [('all_gather', 8)]
    """

    def __init__(self, inner: Reduction, exact: dict[str, str] | None = None) -> None:
        super().__init__(inner)
        self.exact = dict(exact or {})
        self.collectives = frozenset({"all_gather"})

    @staticmethod
    def refuse(inner: Reduction) -> None:
        """Refuse a reduction that cannot gather weights."""
        if not inner.gathers_weights:
            raise HookNotSupportedError(
                f"{inner!r} cannot gather weights. Such a hook has gather_weights(), keeps no state (a later gather cannot "
                "correct an error of an earlier one), and does not round at random (forward and backward need the same "
                "weights). Use bf16_compress, fp16_compress, quant8, quant4, or a policy or two_level of these"
            )

    def gather_bucket(self, layout: ShardLayout, storage: torch.Tensor, *, index: int = 0) -> Bucket:
        """Return the bucket to run next.

        Args:
            layout: division of the parameters into parts. Pass the same object every time.
            storage: ``(W * n,)``, see :class:`~ch_core.Weights`.
            index: position in the step, equal on all ranks.
        """
        made = self.bucket(layout, storage, storage.narrow(0, 0, layout.part.numel), index=index)
        self.release()
        return made

    def route(self, param: ParamLayout, step: int) -> str | None:
        return self.exact.get(param.name) or self.inner.route(param, step)

    def label(self, param: ParamLayout, step: int) -> str:
        return self.inner.label(param, step)

    def cautions(self, layout: object, world_size: int) -> list[str]:
        return []  # every gather of weights grows with the number of ranks, the exact one too

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        cut = self._layouts.get(bucket.layout)
        storage = bucket.storage
        if storage.is_meta:
            cut = self._known(bucket.layout) or ShardLayout.of(bucket.layout, ctx.world_size)
            storage = storage.new_empty(ctx.world_size * cut.part.numel)
        assert cut is not None  # noqa: S101 - gather_bucket() has made it
        exact: Collection[str] = self.exact
        yield from self.inner.start_gather_weights(Weights(cut, storage, ctx.rank, bucket.index), ctx, exact)
