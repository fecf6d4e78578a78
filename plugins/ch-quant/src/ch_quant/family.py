"""``quant``: average with a few bits a number on the wire; and its presets."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

from ch_quant.codec import Codec
from ch_quant.exchange import Exchange, all_reduce, reduce_scatter
from ch_quant.feedback import RELEASED, Feedback, PackedFeedback
from ch_quant.kernels import Kernel, check_kernel
from ch_quant.packing import WIDTHS
from commhooks import Bucket, BucketLayout, HookConfigError, Packed, ParamLayout, Reduction, Shards, Stages, StepContext

FIELD = "residual"
DRAWN = "drawn"


class Quantized(Reduction):
    """Average with blocks of ``bits``-bit codes on the wire, in two stages (see :mod:`ch_quant.exchange`).

    Args:
        bits: 8, 4, 3, 2 or 1.
        block: numbers that share a scale, a multiple of 16. Each parameter starts a block of its own.
        rounding: ``"nearest"``, or ``"stochastic"``: without bias, and with more noise.
        rotation: ``"hadamard"`` rotates each block before it is rounded; ``block`` is a power of two then.
        error_feedback: keep what both roundings lost, and send a quarter of it in every step (:mod:`ch_quant.feedback`).
        residual: in what it is kept: ``"fp32"``, or ``"int8"`` with a scale for each block (LoCo, arXiv:2407.04480):
            2.1 bytes a number instead of 8, and about a two-hundredth of a block's largest is forgotten in a step.
        exempt: average parameters of fewer than two dimensions, and those smaller than a block, exactly.
        kernel: what does the arithmetic: ``"torch"``, or ``"triton"``: Triton's kernels, on CUDA, for 8 and 4 bits rounded to
            nearest. The bytes on the wire are the same, so that each rank may have its own.
        name: a preset's, which says the bits.

    Raises:
        HookConfigError: an option that is none of these, or a kernel that cannot run here.

    State: ``residual``, local, one per quantized parameter, with ``error_feedback`` only. ``drawn``, shared, one number
    per quantized parameter, with stochastic rounding only: in how many steps it was rounded so. What is drawn follows from
    ``ctx.step``, which counts the steps that were used, for hooks that have state.

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
    piece_bytes = 4 << 20

    def __init__(
        self,
        bits: int = 4,
        block: int = 128,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        rotation: Literal["hadamard"] | None = None,
        error_feedback: bool = False,
        residual: Literal["fp32", "int8"] = "fp32",
        exempt: bool = True,
        kernel: Kernel = "torch",
        name: str = "quant",
    ) -> None:
        if bits not in WIDTHS or isinstance(bits, bool):
            raise HookConfigError(f"bits={bits!r}: expected one of {', '.join(map(str, WIDTHS))}")
        if isinstance(block, bool) or not isinstance(block, int) or block < 16 or block % 16:
            raise HookConfigError(f"block={block!r}: expected a multiple of 16")
        if rounding not in ("nearest", "stochastic"):
            raise HookConfigError(f"rounding={rounding!r}: expected 'nearest' or 'stochastic'")
        if rotation not in (None, "hadamard"):
            raise HookConfigError(f"rotation={rotation!r}: expected None or 'hadamard'")
        if rotation and block & (block - 1):
            raise HookConfigError(f"block={block}: rotation='hadamard' takes a power of two, such as 128")
        if residual not in ("fp32", "int8"):
            raise HookConfigError(f"residual={residual!r}: expected 'fp32' or 'int8'")
        if residual != "fp32" and not error_feedback:
            raise HookConfigError(f"residual={residual!r} without error_feedback: nothing is kept; leave it out")
        if error_feedback and rounding == "stochastic" and bits <= 2:
            raise HookConfigError(
                f"bits={bits} with rounding='stochastic' may lose more than a gradient has, so that error feedback would "
                "grow without bound: use rounding='nearest', or error_feedback=False"
            )
        self.name, self.codec = name, Codec(bits, block, rounding)
        self.rotation, self.error_feedback, self.residual = rotation, bool(error_feedback), residual
        check_kernel(kernel, self.codec)
        self.exempt, self.kernel = bool(exempt), kernel
        self.packed = Packed("residual_scale", block) if residual == "int8" else None
        self.packed_fields = {FIELD: self.packed} if self.packed is not None else {}
        # Which rank keeps what the second rounding lost depends on the parts, so on the bucket; and so does what is drawn.
        self.granularity = "bucket" if error_feedback or rounding == "stochastic" else "tensor"
        self.fields = {}
        if error_feedback:
            self.fields[FIELD] = "local"
        if rounding == "stochastic":
            self.fields[DRAWN] = "shared"
        self.memory_order_fields = frozenset({FIELD})

    def config(self) -> dict[str, Any]:
        bits = {"bits": self.codec.bits} if self.name == "quant" else {}
        return bits | {
            "block": self.codec.block,
            "rounding": self.codec.rounding,
            "rotation": self.rotation,
            "error_feedback": self.error_feedback,
            "residual": self.residual,
            "exempt": self.exempt,
            "kernel": self.kernel,
        }

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
        exchange = Exchange(
            self.codec,
            [p.numel for p in bucket.params],
            ctx,
            bucket.device,
            parts=ctx.world_size,
            rotated=self.rotation is not None,
            seed=bucket.params[0].name,
            kernel=self.kernel,
        )
        self._draw(bucket.params, ctx, bucket.device)
        yield from all_reduce(exchange, vectors, self._feedback(bucket, ctx, exchange) if self.error_feedback else None)

    def run_scatter(self, shards: Shards, ctx: StepContext) -> Stages:
        """The first stage alone: what a rank keeps is rounded once, and arrives in fp32."""
        exchange = Exchange(
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
                self.packed.pack(new, *self.packed.stage(ctx, p.name, FIELD, new.shape, new.device))

    def _draw(self, params: Iterable[ParamLayout], ctx: StepContext, device: torch.device) -> None:
        if DRAWN in self.fields:
            for p in params:
                ctx.stage(p.name, DRAWN, (1,), torch.int64, device).fill_(ctx.step + 1)

    def _feedback(self, bucket: Bucket, ctx: StepContext, exchange: Exchange) -> Feedback | PackedFeedback:
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
            new = [c.stage(p.name, FIELD, p.matrix_shape, device=bucket.device) for p, c in contexts]
            return Feedback([e.view(-1) if e is not None else None for e in old], [e.view(-1) for e in new], released)
        return PackedFeedback(
            packed,
            [packed.held(c, p.name, FIELD) for p, c in contexts],
            [packed.stage(c, p.name, FIELD, p.matrix_shape, bucket.device) for p, c in contexts],
            released,
        )

    def _wholes(
        self, params: Sequence[ParamLayout], ctx: StepContext, device: torch.device
    ) -> list[tuple[torch.Tensor | None, torch.Tensor]]:
        """Residuals of the last step, and the places for the new ones, fp32, where ranks have parts of parameters.

        Parts end where no block ends, so that 8 bits are unpacked as a whole; a place is for both then.
        """
        packed = self.packed
        if packed is None:
            return [(ctx.read(p.name, FIELD), ctx.stage(p.name, FIELD, p.matrix_shape, device=device)) for p in params]
        room = ctx.scratch("residuals", (sum(p.numel for p in params),), device=device)
        found: list[tuple[torch.Tensor | None, torch.Tensor]] = []
        for p, flat in zip(params, room.split([p.numel for p in params]), strict=True):
            held, place = packed.held(ctx, p.name, FIELD), flat.view(p.matrix_shape)
            if held is not None and held[1] is not None:
                packed.unpack(held[0], held[1], place)
            elif held is not None:
                place.copy_(held[0])
            found.append((place if held is not None else None, place))
        return found


def quant8(**options: Any) -> Quantized:
    """Eight bits: half of bf16's bytes, and hardly any noise. Options as those of :class:`Quantized` but for ``bits``."""
    return Quantized(8, name="quant8", **options)


def quant4(**options: Any) -> Quantized:
    """Four bits: a quarter of bf16's bytes."""
    return Quantized(4, name="quant4", **options)


def quant2(**options: Any) -> Quantized:
    """Two bits; with error feedback."""
    return Quantized(2, name="quant2", **{"error_feedback": True} | options)


def sign(**options: Any) -> Quantized:
    """One bit, and the mean magnitude of each block; with error feedback (Karimireddy et al. 2019, arXiv:1901.09847)."""
    return Quantized(1, name="sign", **{"error_feedback": True} | options)
