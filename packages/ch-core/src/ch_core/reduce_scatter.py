"""Runs a reduction as a reduce-scatter of sharded gradients, for adapters of sharded models."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from ch_core.bucket import Bucket, BucketLayout, ParamLayout
from ch_core.encoding import Packed
from ch_core.errors import HookNotSupportedError
from ch_core.reduction import Reduction, Stages, StepContext
from ch_core.shards import ShardLayout, Shards


class Scattered(Reduction):
    """Runs :meth:`.Reduction.run_scatter` of a reduction on buckets that :meth:`bucket` makes.

    Args:
        inner: a reduction that ``scatters``.

    Attributes:
        factor: factor of the average at the end; W makes a sum.

    Raises:
        HookNotSupportedError: ``inner`` has no :meth:`.Reduction.run_scatter`.

    Example:
        >>> from ch_core import Plain
        >>> made, cut = Scattered(Plain()), ShardLayout.of(BucketLayout.of_shapes({"w": (3, 2)}), 2)
        >>> bucket = made.bucket(cut, torch.ones(8), torch.zeros(4))
        >>> [r.kind for stage in made.plan(bucket.layout, StepContext(world_size=2)) for r in stage]
        ['reduce_scatter']
    """

    trips = 1

    def __init__(self, inner: Reduction) -> None:
        self.refuse(inner)
        self.inner, self.name, self.factor = inner, inner.name, 1.0
        self.granularity, self.lossy = inner.granularity, inner.lossy
        self.collectives = (inner.collectives - {"all_reduce", "all_gather"}) | {"reduce_scatter"}
        self.fields, self.scaled_fields = inner.fields, inner.scaled_fields
        self.levels, self.nodes = inner.levels, inner.nodes
        self._layouts: dict[BucketLayout, ShardLayout] = {}
        self._buckets: dict[tuple[int, int, str, torch.dtype], BucketLayout] = {}
        self._output: torch.Tensor | None = None

    @staticmethod
    def refuse(inner: Reduction) -> None:
        """Refuse a reduction without :meth:`.Reduction.run_scatter`."""
        if not inner.scatters:
            raise HookNotSupportedError(
                f"{inner!r} cannot leave each rank a part of the average, because it has no run_scatter(). Use a hook that "
                "scatters, such as allreduce, bf16_compress or quant4"
            )

    def bucket(self, layout: ShardLayout, storage: torch.Tensor, output: torch.Tensor, *, index: int = 0) -> Bucket:
        """Return the bucket to run next. Make and run one bucket at a time.

        Args:
            layout: division of the parameters into parts. Pass the same object every time.
            storage: ``(W * n,)``: this rank's gradient, see :class:`~ch_core.Shards`.
            output: ``(n,)``: place for this rank's part of the average.
            index: position in the step, equal on all ranks.
        """
        self._output = output
        world = storage.numel() // max(output.numel(), 1)
        key = (id(layout), world, str(storage.device), storage.dtype)
        if key not in self._buckets:
            whole = layout.bucket(world)
            self._buckets[key] = BucketLayout(whole.params, whole.numel, storage.dtype, storage.device)
            self._layouts[self._buckets[key]] = layout
        return Bucket(self._buckets[key], storage, index, output=output)

    def release(self) -> None:
        """Release the last bucket's output."""
        self._output = None

    def state_params(self, layout: BucketLayout) -> Sequence[ParamLayout]:
        cut = self._layouts.get(layout) or self._known(layout)
        return [cut.whole_param(p.name) for p in cut.part.params] if cut is not None else layout.params

    def memory_order(self, param: ParamLayout, step: int) -> frozenset[str]:
        return self.inner.memory_order(param, step)

    def packing(self, param: ParamLayout, step: int) -> Mapping[str, Packed]:
        return self.inner.packing(param, step)

    def phase(self, step: int) -> Hashable:
        return self.inner.phase(step)

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        cut = self._layouts.get(bucket.layout)
        dry = bucket.storage.is_meta
        if dry:  # a plan runs on meta tensors, and the known layouts are those of a real device
            cut = self._known(bucket.layout) or ShardLayout.of(bucket.layout, ctx.world_size)
        assert cut is not None  # noqa: S101 - bucket() has made it
        n = cut.part.numel
        storage = bucket.storage.new_empty(ctx.world_size * n) if dry else bucket.storage
        output = self._output if self._output is not None and not dry else storage.new_empty(n)
        yield from self.inner.start_scatter(Shards(cut, storage, output, bucket.index), ctx)
        if self.factor != 1.0:
            output.mul_(self.factor)

    def _known(self, layout: BucketLayout) -> ShardLayout | None:
        """Return how the parameters of a planned bucket, or of a selection from one, are cut; ``None`` if unknown.

        A report plans selections. Cut a second time, they would count 1/W of the bytes.
        """
        wanted = set(layout.params)
        for known, cut in self._layouts.items():
            if known.numel == layout.numel and wanted.issubset(known.params):
                names = frozenset(p.name for p in wanted)
                return cut if len(wanted) == len(known.params) else cut.select(names)
        return None

    def start(self, bucket: Bucket, ctx: StepContext) -> Stages:
        return self.run(bucket, ctx)  # the inner reduction averages parameters exactly that do not fit it

    def config(self) -> dict[str, Any]:
        return self.inner.config()

    def node(self) -> dict[str, Any]:
        return self.inner.node()

    def __repr__(self) -> str:
        return repr(self.inner)
