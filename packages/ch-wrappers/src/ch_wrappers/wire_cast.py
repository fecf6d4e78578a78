"""16-bit wires: a wrapper that casts the requests of a reduction.

Floating-point all-reduces and reduce-scatters travel in 16 bits. All-gathers and all-to-alls that are marked as
castable do the same. The others carry opaque bytes. The algebra, state and residual of the wrapped reduction stay
unchanged.

With ``accumulate="fp32"`` no sum is made in 16 bits. An all-reduce becomes an all-to-all of 16-bit shards, a local fp32 sum, and
an all-gather of the 16-bit results. A reduce-scatter becomes the first two. The volume equals the volume of the 16-bit
collective. There are two roundings (one for a reduce-scatter) at any world size; a ring makes W - 1.
"""

from collections.abc import Generator
from typing import Any, Literal

import torch

from ch_core import as_tuple, encode
from commhooks import (
    AllGather,
    AllReduce,
    AllToAll,
    Bucket,
    Composite,
    HookConfigError,
    ParamLayout,
    ReduceScatter,
    Reduction,
    Request,
    Requests,
    Shards,
    Stages,
    StepContext,
    Weights,
    Wire,
)

NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class WireCast(Composite):
    """A reduction whose numbers travel in 16 bits.

    Args:
        inner: the reduction to wrap.
        dtype: ``"bf16"`` or ``"fp16"``.
        accumulate: ``"wire"`` sums in 16 bits as the transport does; ``"fp32"`` as the module describes.
        name: name of a hook that is not a wrapper (``"bf16_compress"``).

    Raises:
        HookConfigError: unknown option, or ``inner`` has no request that the wire could change.
    """

    lossy = True
    delivers = True  # if ``inner`` does: the collective casts its numbers in place
    DTYPES = NAMES  # by option value

    def __init__(
        self,
        inner: Reduction,
        dtype: Literal["bf16", "fp16"],
        *,
        accumulate: Literal["wire", "fp32"] = "wire",
        name: str | None = None,
    ) -> None:
        if dtype not in NAMES:
            raise HookConfigError(f"dtype={dtype!r}: expected one of {sorted(NAMES)}")
        if accumulate not in ("wire", "fp32"):
            raise HookConfigError(f"accumulate={accumulate!r}: expected 'wire' or 'fp32'")
        if not inner.collectives & inner.castable:
            raise HookConfigError(
                f"{dtype}_wrapper({inner.name}) would change nothing, because the wrapper may not cast the messages of "
                f"{inner.name} ({sorted(inner.collectives) or 'none'}). Use {inner.name} without it"
            )
        self.name = f"{dtype}_wrapper"
        super().__init__(inner)
        self.wire, self.accumulate, self._alone = Wire(NAMES[dtype]), accumulate, name
        self.name = name or self.name
        if accumulate == "fp32":
            self.collectives, self.delivers = _accumulating(inner.collectives), False

    def label(self, param: ParamLayout, step: int) -> str:
        return self._alone or super().label(param, step)

    def start(self, bucket: Bucket, ctx: StepContext) -> Stages:
        return self.run_with_plain(bucket, ctx, {p.name for p in bucket.params if p.kind != "dense"})  # sparse, complex

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        return self._rounded(self.inner.start(bucket, ctx), ctx)

    def run_scatter(self, shards: Shards, ctx: StepContext) -> Stages:
        return self._rounded(self.inner.start_scatter(shards, ctx), ctx)

    def gather_weights(self, weights: Weights, ctx: StepContext) -> Stages:
        return self._rounded(self.inner.start_gather_weights(weights, ctx), ctx)

    def _rounded(self, inner: Stages, ctx: StepContext) -> Stages:
        try:
            for number, requests in enumerate(inner):
                if self.accumulate == "fp32":
                    yield from self._accumulated(as_tuple(requests), ctx, number)
                else:
                    yield tuple(self._cast(r) for r in as_tuple(requests))
        finally:
            inner.close()

    def config(self) -> dict[str, Any]:
        return {"accumulate": self.accumulate}

    def node(self) -> dict[str, Any]:
        config = self.config() if self.accumulate != "wire" else {}
        return {"hook": self._alone, "config": config} if self._alone else {**super().node(), "config": config}

    def _cast(self, request: Request) -> Request:
        if self._narrows(request):
            request.wire = self.wire
        return request

    def _narrows(self, request: Request) -> bool:
        tensor = request.tensor if isinstance(request, AllReduce) else request.input
        free = request.castable if isinstance(request, AllGather | AllToAll) else request.op != "max"
        return free and request.wire is None and self.wire.narrows(tensor.dtype)

    def _accumulated(
        self, requests: tuple[Request, ...], ctx: StepContext, number: int
    ) -> Generator[Requests, None, None]:
        """Yield a stage's 16-bit sums as two stages: all-to-all of shards, fp32 sum, all-gather."""
        shards: list[_Sharded] = []
        first: list[Request] = []
        for i, r in enumerate(requests):
            if isinstance(r, AllReduce | ReduceScatter) and self._narrows(r):
                shards.append(_Sharded(r, self.wire, ctx, f"{number}.{i}"))
                first.append(shards[-1].exchange())
            else:
                first.append(self._cast(r))
        levels = self.inner.levels  # another place of the node may have sums in this stage: both count on all places
        if first or levels:
            yield tuple(first)
        second = tuple(gather for s in shards if (gather := s.gather()) is not None)
        if second or levels:
            yield second
        if second:
            for s in shards:
                s.finish()


def _accumulating(collectives: frozenset[str]) -> frozenset[str]:
    """Return the kinds of requests if 16-bit sums are made locally."""
    extra = {"all_to_all", "all_gather"} if "all_reduce" in collectives else {"all_to_all"}
    return (collectives - {"all_reduce", "reduce_scatter"}) | extra


class _Sharded:
    """One sum over ranks as all-to-all, local fp32 sum and, for an all-reduce, all-gather. Shard r belongs to rank r."""

    def __init__(self, request: AllReduce | ReduceScatter, wire: Wire, ctx: StepContext, name: str) -> None:
        self.request, self.wire, self.world = request, wire, ctx.size(request.scope)
        self.source = (request.tensor if isinstance(request, AllReduce) else request.input).reshape(-1)
        self.numel = self.source.numel()
        self.shard = -(-self.numel // self.world)
        whole, device = (self.shard * self.world,), self.source.device
        self.sent = ctx.scratch(f"fp32 {name} sent", whole, wire.dtype, device)
        self.received = ctx.scratch(f"fp32 {name} received", whole, wire.dtype, device)
        if isinstance(request, AllReduce):
            self.mine = ctx.scratch(f"fp32 {name} mine", (self.shard,), wire.dtype, device)

    def exchange(self) -> AllToAll:
        scale = 1.0 / self.world if self.request.op == "mean" else 1.0
        encode(self.source, self.sent[: self.numel], scale)
        self.sent[self.numel :].zero_()
        if isinstance(self.request, AllReduce) and self.request.sent is not None:
            self.request.sent.view(-1).copy_(self.sent[: self.numel]).mul_(1.0 / scale)
        return AllToAll(self.sent, self.received, scope=self.request.scope)

    def gather(self) -> AllGather | None:
        """Sum this rank's shard. Returns the request for an all-reduce's second stage."""
        total = self.received.view(self.world, self.shard).sum(0, dtype=torch.float32)  # (shard,) fp32
        if isinstance(self.request, ReduceScatter):
            self.request.output.copy_(total)
            return None
        encode(total, self.mine, 1.0)
        return AllGather(self.mine, self.received, scope=self.request.scope)

    def finish(self) -> None:
        if isinstance(self.request, AllReduce):
            self.request.tensor.view(-1).copy_(self.received[: self.numel])
