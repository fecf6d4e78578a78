"""Block-scaled int8 all-reduce in two stages (after ZeRO++'s quantized gradients, arXiv:2306.10209).

A block of ``block`` elements travels as ``s = max|x| / 127`` in fp32 and int8 codes ``round(x / s)``. Each parameter
starts a block of its own, so without error feedback results do not depend on the buckets. With W ranks the blocks of
a bucket are W equal shards::

    all-to-all    rank r receives every rank's shard r
    locally       m = mean over ranks, in fp32, in rank order
    all-gather    everybody receives m, quantized once more, from its owner

so a bucket costs 1 + 4/block bytes per element and trip, two trips, whatever W is: a quarter of an fp32 all-reduce.
All ranks decode the same bytes, hence the same bits.

Error feedback covers both roundings. What rank i lost at the first, ``p_i - C(p_i)``, is its own. What the owner of a
shard lost at the second, ``m - C(m)``, everybody misses; the owner keeps it, W times, in the same residual: it will be
divided by W. So ``applied + mean residual = sum of the averages`` holds exactly, and the residual has no second kind
of entry that another world size would not fit.

A block that is not finite has a scale that is not, and arrives as NaN or inf.
"""

from typing import Any, Literal

import torch

from commhooks import (
    AllGather,
    AllToAll,
    Bucket,
    BucketLayout,
    HookConfigError,
    ParamLayout,
    Reduction,
    Stages,
    StepContext,
)

LEVELS = 127
SMALLEST = 1e-36  # a scale whose reciprocal is finite
FIELD = "residual"


class BlockQuantized(Reduction):
    """Average with int8 on the wire.

    Args:
        block: elements that share a scale, a multiple of 4 (scales and codes lie in one message).
        error_feedback: keep what was lost for the next step, in fp32.
        exempt: average parameters of fewer than two dimensions, and those smaller than a block, exactly.

    Raises:
        HookConfigError: a bad ``block``.

    State: ``residual``, local, fp32, one per quantized parameter, with ``error_feedback`` only.

    Example:
        >>> layout = BucketLayout.of_shapes({"w": (64, 64)})
        >>> stages = BlockQuantized().plan(layout, StepContext(world_size=4))
        >>> [(r.kind, r.payload_bytes) for stage in stages for r in stage]  # 4096 codes and 16 scales
        [('all_to_all', 4160), ('all_gather', 4160)]
    """

    name = "quant8"
    granularity: Literal["tensor", "bucket"] = "tensor"
    collectives = frozenset({"all_to_all", "all_gather"})
    lossy = True

    def __init__(self, block: int = 256, error_feedback: bool = False, exempt: bool = True) -> None:
        if isinstance(block, bool) or not isinstance(block, int) or block < 16 or block % 4:
            raise HookConfigError(f"block={block!r}: expected a multiple of 4, 16 or more")
        self.block, self.error_feedback, self.exempt = block, bool(error_feedback), bool(exempt)
        if error_feedback:  # which rank keeps what the second rounding lost depends on the shards, so on the bucket
            self.granularity = "bucket"
        self.fields = {FIELD: "local"} if error_feedback else {}
        self.memory_order_fields = frozenset({FIELD})

    def config(self) -> dict[str, Any]:
        return {"block": self.block, "error_feedback": self.error_feedback, "exempt": self.exempt}

    def route(self, param: ParamLayout, step: int) -> str | None:
        if not self.exempt:
            return None
        if len(param.shape) < 2:
            return f"{len(param.shape)}-D"
        return f"fewer than {self.block} elements" if param.numel < self.block else None

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        shards = Shards(bucket.layout, self.block, ctx)
        grid = ctx.scratch("grid", (shards.blocks, self.block), device=bucket.device)
        mean = ctx.scratch("mean", (shards.each, self.block), device=bucket.device)
        spare = ctx.scratch("spare", (shards.each, self.block), device=bucket.device)
        parts = list(zip(bucket.params, shards.places(grid), strict=True))
        for p, place in parts:
            place[p.numel :].zero_()
            place[: p.numel].copy_(bucket.matrix(p).view(-1))
            before = ctx.read(p.name, FIELD) if self.error_feedback else None
            if before is not None:
                place[: p.numel].add_(before.view(-1))
        grid[shards.used :].zero_()

        sent, received = shards.messages("sent"), shards.messages("received")
        for shard, message in zip(grid.chunk(ctx.world_size), sent, strict=True):
            encode(shard, message, spare)
        yield AllToAll(sent.view(-1), received.view(-1))

        mean.zero_()
        for message in received:  # in rank order; divided before it is added: the sum may overflow where the mean fits
            mean.add_(decode(message, spare), alpha=1.0 / ctx.world_size)
        own = ctx.scratch("own", received[0].shape, torch.uint8, bucket.device)
        encode(mean, own, spare)
        if self.error_feedback:
            for shard, message in zip(grid.chunk(ctx.world_size), sent, strict=True):
                shard.sub_(decode(message, spare))  # p - C(p)
            mean.sub_(decode(own, spare))  # m - C(m)
            grid.chunk(ctx.world_size)[ctx.rank].add_(mean, alpha=ctx.world_size)
            for p, place in parts:
                kept = ctx.stage(p.name, FIELD, p.matrix_shape, device=bucket.device)
                kept.view(-1).copy_(place[: p.numel])
        yield AllGather(own, received.view(-1))

        for shard, message in zip(grid.chunk(ctx.world_size), received, strict=True):
            decode(message, shard)
        for p, place in parts:
            bucket.matrix(p).view(-1).copy_(place[: p.numel])


class Shards:
    """Where a bucket's parameters lie in a grid of blocks that W ranks share equally."""

    def __init__(self, layout: BucketLayout, block: int, ctx: StepContext) -> None:
        self.sizes = [-(-p.numel // block) for p in layout.params]
        self.used = sum(self.sizes)
        self.each = -(-self.used // ctx.world_size)  # blocks of one shard
        self.blocks = self.each * ctx.world_size
        self._block, self._ctx, self._device = block, ctx, layout.device

    def places(self, grid: torch.Tensor) -> list[torch.Tensor]:
        """The blocks of each parameter, as one row."""
        return [rows.view(-1) for rows in grid[: self.used].split(self.sizes)]

    def messages(self, name: str) -> torch.Tensor:
        """A message per rank, ``(W, each * (4 + block))`` bytes."""
        shape = (self._ctx.world_size, self.each * (4 + self._block))
        return self._ctx.scratch(name, shape, torch.uint8, self._device)


def views(message: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales ``(rows, 1)`` fp32 and codes ``(rows, block)`` int8 of a message for ``x`` ``(rows, block)``."""
    rows = x.shape[0]
    return message[: 4 * rows].view(torch.float32).view(rows, 1), message[4 * rows :].view(torch.int8).view(x.shape)


def encode(x: torch.Tensor, message: torch.Tensor, spare: torch.Tensor) -> None:
    """Fill a message from ``x`` ``(rows, block)`` fp32; ``spare`` is one like it."""
    scales, codes = views(message, x)
    low, high = torch.aminmax(x, dim=1, keepdim=True)
    # NaN and inf go through all of this into the scale, and so into every element, whatever its code.
    scales.copy_(torch.maximum(-low, high).div_(LEVELS).clamp_(min=SMALLEST))
    codes.copy_(torch.mul(x, 1.0 / scales, out=spare).round_())


def decode(message: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out`` ``(rows, block)`` fp32, filled from a message."""
    scales, codes = views(message, out)
    return torch.mul(codes, scales, out=out)
