"""``quant``: average with a few bits a number on the wire, and its presets."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

from ch_quant.codec import Codec
from ch_quant.exchange import TwoStageExchange, all_reduce, check_kernel, reduce_scatter
from ch_quant.feedback import RELEASED, Feedback, PackedFeedback
from ch_quant.options import FED, PRESETS, QuantOptions
from ch_quant.sizes import SIZES
from commhooks import Bucket, BucketLayout, Packed, ParamLayout, Reduction, Shards, Stages, StepContext, Weights

FIELD = "residual"
DRAWN = "drawn"


class Quantized(QuantOptions, Reduction):
    """Average with blocks of ``bits``-bit codes on the wire, in two stages, or in one (see :mod:`ch_quant.exchange`).

    Options: see :class:`~ch_quant.options.QuantOptions`. The residual in 8 bits follows LoCo (arXiv:2407.04480): it takes
    2.1 bytes a number instead of 8, and forgets about a two-hundredth of a block's largest number in a step.

    Raises:
        HookConfigError: options that contradict each other, or a kernel that cannot run here.

    State: ``residual``, local, fp32 or int8, one per quantized parameter, with ``error_feedback``. ``drawn``, shared,
    int64, one number per quantized parameter, with stochastic rounding: it counts the steps that drew. The draws follow from
    ``ctx.step``, which counts only used steps for a hook with state.

    Example:
        >>> from commhooks import BucketLayout
        >>> layout = BucketLayout.of_shapes({"w": (64, 64)})
        >>> stages = Quantized(4).plan(layout, StepContext(world_size=4))
        >>> [(r.kind, r.payload_bytes) for stage in stages for r in stage]  # 4096 half bytes and 32 scales
        [('all_to_all', 2112), ('all_gather', 2112)]
    """

    granularity: Literal["tensor", "bucket"] = "tensor"
    fields: dict[str, Literal["local", "shared"]]
    collectives = frozenset({"all_to_all", "all_gather"})
    lossy = True
    piece_bytes = SIZES.piece_bytes
    splits = "elements"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.codec = Codec(self.bits, self.block, self.rounding)
        check_kernel(self.kernel, self.codec)
        self.packed = Packed(self.block) if self.residual == "int8" else None
        self.packed_fields = {FIELD: self.packed} if self.packed is not None else {}
        # The parts of a bucket decide which rank owes the error of the second rounding, and the draws.
        self.granularity = "bucket" if self.error_feedback or self.rounding == "stochastic" else "tensor"
        self.fields = {}
        if self.error_feedback:
            self.fields[FIELD] = "local"
        if self.rounding == "stochastic":
            self.fields[DRAWN] = "shared"
        self.memory_order_fields = frozenset({FIELD})

    def config(self) -> dict[str, Any]:
        """Return the options; a preset's name stands for its bits."""
        return {name: value for name, value in super().config().items() if name != "bits" or self.name not in PRESETS}

    def check(self, layout: BucketLayout) -> None:
        check_kernel(self.kernel, self.codec, layout.device)

    def route(self, param: ParamLayout, step: int) -> str | None:
        if not self.exempt:
            return None
        if len(param.shape) < 2:
            return f"{len(param.shape)}-D"
        return f"fewer than {self.codec.block} elements" if param.numel < self.codec.block else None

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        vectors = bucket.cached((self, "vectors"), lambda: [bucket.matrix(p).view(-1) for p in bucket.params])
        sizes = [p.numel for p in bucket.params]
        nbytes = self.codec.bytes(sum(-(-size // self.block) for size in sizes))
        exchange = TwoStageExchange(
            self.codec,
            sizes,
            ctx,
            bucket.device,
            parts=1 if ctx.sends_whole(nbytes) else ctx.world_size,
            rotated=self.rotation is not None,
            seed=bucket.params[0].name,
            kernel=self.kernel,
        )
        self._draw(bucket.params, ctx, bucket.device)
        yield from all_reduce(exchange, vectors, self._feedback(bucket, ctx, exchange) if self.error_feedback else None)

    def run_scatter(self, shards: Shards, ctx: StepContext) -> Stages:
        """Run the first stage alone. A rank's part is rounded once and arrives in fp32."""
        exchange = TwoStageExchange(
            self.codec,
            [p.numel for p in shards.params],
            ctx,
            shards.device,
            parts=1,
            rotated=self.rotation is not None,
            seed=shards.params[0].name,
            kernel=self.kernel,
        )
        self._draw(shards.params, ctx, shards.device)
        if not self.error_feedback:
            yield from reduce_scatter(exchange, shards.vectors(), shards.own())
            return
        kept = self._wholes([shards.whole(p) for p in shards.params], ctx, shards.device)
        none = [None] * shards.world_size
        before = [
            shards.cut(p, old) if old is not None else none for p, (old, _) in zip(shards.params, kept, strict=True)
        ]
        after = [shards.cut(p, new) for p, (_, new) in zip(shards.params, kept, strict=True)]
        parts = [Feedback(b, a) for b, a in zip(zip(*before, strict=True), zip(*after, strict=True), strict=True)]
        yield from reduce_scatter(exchange, shards.vectors(), shards.own(), parts)
        for p, (_, new), pieces in zip(shards.params, kept, after, strict=True):
            shards.join(p, pieces, new)
            if self.packed is not None:
                self.packed.pack(new, *ctx.write_packed(p.name, FIELD, new.shape, self.packed, new.device))

    def gather_weights(self, weights: Weights, ctx: StepContext) -> Stages:
        """Send this rank's shards in blocks. Every rank decodes the same bytes (ZeRO++'s qwZ, arXiv:2306.10209)."""
        exchange = TwoStageExchange(
            self.codec,
            [p.numel for p in weights.params],
            ctx,
            weights.device,
            parts=1,
            rotated=self.rotation is not None,
            kernel=self.kernel,
        )
        yield exchange.send_own(weights.own())
        exchange.deliver(weights.vectors())

    def _draw(self, params: Iterable[ParamLayout], ctx: StepContext, device: torch.device) -> None:
        if DRAWN in self.fields:
            for p in params:
                ctx.write(p.name, DRAWN, (1,), torch.int64, device).fill_(ctx.step + 1)

    def _feedback(self, bucket: Bucket, ctx: StepContext, exchange: TwoStageExchange) -> Feedback | PackedFeedback:
        """Return the residuals of a bucket's parameters, of their shapes in memory.

        A rank that sends no gradient of a parameter still owns a part of its average. It sends nothing of the residual
        then, and adds the error of the second rounding to it.
        """
        packed, owned = self.packed, exchange.owned()
        contexts, released = [], []
        for number, p in enumerate(bucket.params):
            owes = number in owned and not ctx.sends(p.name)
            contexts.append((p, ctx.as_owner() if owes else ctx))
            released.append(0.0 if owes else RELEASED)
        if packed is None:
            old = [c.read(p.name, FIELD) for p, c in contexts]
            new = [c.write(p.name, FIELD, p.matrix_shape, device=bucket.device) for p, c in contexts]
            return Feedback([e.view(-1) if e is not None else None for e in old], [e.view(-1) for e in new], released)
        return PackedFeedback(
            packed,
            [c.read_packed(p.name, FIELD) for p, c in contexts],
            [c.write_packed(p.name, FIELD, p.matrix_shape, packed, bucket.device) for p, c in contexts],
            released,
        )

    def _wholes(
        self, params: Sequence[ParamLayout], ctx: StepContext, device: torch.device
    ) -> list[tuple[torch.Tensor | None, torch.Tensor]]:
        """Return, for each parameter that ranks share out, its old residual and the place of the new one, fp32.

        Parts end within blocks, so an 8-bit residual is unpacked as a whole, and old and new share one place.
        """
        packed = self.packed
        if packed is None:
            return [(ctx.read(p.name, FIELD), ctx.write(p.name, FIELD, p.matrix_shape, device=device)) for p in params]
        room = ctx.scratch("residuals", (sum(p.numel for p in params),), device=device)
        found: list[tuple[torch.Tensor | None, torch.Tensor]] = []
        for p, flat in zip(params, room.split([p.numel for p in params]), strict=True):
            held, place = ctx.read_packed(p.name, FIELD), flat.view(p.matrix_shape)
            if held is not None and held[1] is not None:
                packed.unpack(held[0], held[1], place)
            elif held is not None:
                place.copy_(held[0])
            found.append((place if held is not None else None, place))
        return found


def preset(name: str, **options: Any) -> Quantized:
    """Return the hook of a preset."""
    return Quantized(PRESETS[name], name=name, **({"error_feedback": name in FED} | options))  # type: ignore[arg-type]


def quant8(**options: Any) -> Quantized:
    """Return a hook of eight bits, which sends half of bf16's bytes with hardly any noise.

    Args:
        **options: of :class:`~ch_quant.options.QuantOptions`, without ``bits``.
    """
    return preset("quant8", **options)


def quant4(**options: Any) -> Quantized:
    """Return a hook of four bits, which sends a quarter of bf16's bytes. Options as in :func:`quant8`."""
    return preset("quant4", **options)


def quant2(**options: Any) -> Quantized:
    """Return a hook of two bits with error feedback. Options as in :func:`quant8`."""
    return preset("quant2", **options)


def sign(**options: Any) -> Quantized:
    """Return a hook of one bit and each block's mean magnitude, with error feedback (Karimireddy et al. 2019,
    arXiv:1901.09847). Options as in :func:`quant8`.
    """
    return preset("sign", **options)
