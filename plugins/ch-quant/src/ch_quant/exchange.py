"""A quantized average in two stages, each usable alone, or in one.

W ranks hold W parts of equal size, and part r belongs to rank r (after ZeRO++'s qgZ, arXiv:2306.10209)::

    1. all-to-all    rank r receives every rank's part r, packed           TwoStageExchange.send, then .take
       locally       m = mean over ranks, in fp32, in rank order
    2. all-gather    every rank receives every m, packed, from its owner   TwoStageExchange.share, then .deliver

The first stage alone is a reduce-scatter (:func:`reduce_scatter`), whose result is fp32 and rounded once. Both stages are an
all-reduce (:func:`all_reduce`). It costs the same number of bytes on every link for any W, and all ranks decode the same
bytes, hence the same bits.

If ranks send whole messages (:meth:`~ch_core.StepContext.sends_whole`), every rank receives all numbers of all ranks in one
all-gather, and all decode and add the same bytes in rank order. Numbers are then rounded once.

A part is a list of vectors, and each vector starts a new block. The exchange works chunk by chunk, so that each stage reads
and writes every number in memory once.

Error feedback covers all roundings. Rank i keeps the error of its first rounding, ``p_i - C(p_i)``. The owner of a part keeps
the error of the second rounding, ``m - C(m)``, in the same residual. It keeps W times the error, because the next average
divides it by W. So ``applied + mean residual = sum of the averages`` holds exactly. :mod:`ch_quant.feedback` decides how much
of the residual a step sends.
"""

import zlib
from collections.abc import Sequence
from types import ModuleType
from typing import Literal

import torch

from ch_quant import rotation
from ch_quant.blocks import Chunk, Cut, cut, gather, scatter, whole
from ch_quant.codec import Codec, Workspace
from ch_quant.feedback import Residuals
from commhooks import AllGather, AllToAll, HookConfigError, Stages, StepContext

Kernel = Literal["torch", "triton"]
Vectors = Sequence[torch.Tensor]


class TwoStageExchange:
    """One average in flight.

    Args:
        codec: the format on the wire.
        sizes: elements of each vector, of the whole if ``parts`` is W, of one part if it is 1.
        ctx: the step.
        device: of the vectors.
        parts: number of parts that the vectors are cut into; 1 if every part comes with its own vectors of these sizes, or if
            ranks send whole messages.
        rotated: True if blocks are rotated before they are rounded; ``block`` must be a power of two.
        seed: of stochastic rounding, such as the name of the first parameter.
        kernel: implementation of the arithmetic, ``"torch"`` or ``"triton"``; both send the same bytes.

    Raises:
        HookConfigError: the kernel cannot run here.

    Attributes:
        bytes: bytes of one packed part. A rank sends W parts in the first stage and one in the second.
    """

    def __init__(
        self,
        codec: Codec,
        sizes: Sequence[int],
        ctx: StepContext,
        device: torch.device,
        *,
        parts: int,
        rotated: bool = False,
        seed: str = "",
        kernel: Kernel = "torch",
    ) -> None:
        self.codec, self.ctx, self.rotated = codec, ctx, rotated
        # On a GPU each chunk costs several launches, and no cache holds it.
        self.cut: Cut = cut(tuple(sizes), codec.block, parts, codec.chunk if device.type == "cpu" else 1 << 40)
        self.bytes = codec.bytes(self.cut.rows)
        self._device, self._seed = device, seed
        self._numbers = device.type != "meta"  # a dry run only plans messages
        # On a CPU all buckets share this memory, so it has one size.
        rows = (
            codec.chunk
            if device.type in ("cpu", "meta")
            else max((chunk.rows for chunk in self.cut.parts[0]), default=0)
        )
        self._work = workspace(kernel, codec, ctx, device, rows)

    # -- the first stage

    def send(self, parts: Sequence[Vectors], feedback: Sequence[Residuals] | None = None) -> AllToAll:
        """Pack every part. After the request, this rank holds its part from every rank.

        Args:
            parts: vectors of each of the W parts; the same list W times if the exchange cuts it.
            feedback: residuals of each part. It adds the due residual to the numbers and keeps the rounding error. Its
                vectors may be shorter than those of the part, which end with padding.
        """
        shape = (self.ctx.world_size, self.bytes)
        self._sent, self._received = (self._scratch(name, shape) for name in ("sent", "received"))
        if self._numbers:
            noise = self._noise("send")
            for number, (vectors, message) in enumerate(zip(parts, self._sent, strict=True)):
                kept = feedback[number] if feedback is not None else None
                for chunk in self._chunks(number):
                    self._pack(vectors, chunk, message, noise, kept)
        return AllToAll(self._sent.view(-1), self._received.view(-1))

    def take(self, vectors: Vectors) -> None:
        """Write the fp32 mean over ranks of this rank's part, or of whole messages, to ``vectors``, in their dtype."""
        for chunk in self._own_chunks():
            place = None if self.rotated else whole(vectors, chunk, self.codec.block)
            mean = self._mean(chunk, place)
            if place is None:
                scatter(vectors, chunk, self._plain(mean))

    # -- the second stage

    def share(self, feedback: Residuals | None = None) -> AllGather:
        """Pack the mean of this rank's part, instead of :meth:`take`."""
        self._own = self._scratch("own", (self.bytes,))
        noise = self._noise("share")
        for chunk in self._own_chunks():
            mean = self._mean(chunk)
            scales, packed = self._split(self._own, chunk)
            self._work.encode(mean, scales, packed, noise, keep=feedback is not None)
            if feedback is not None:
                lost = self._work.subtract(mean, scales)  # m - C(m)
                feedback.keep_more(chunk, self._plain(lost).mul_(self.ctx.world_size), self._work.spare)
        return AllGather(self._own, self._received.view(-1))

    def send_own(self, vectors: Vectors, feedback: Residuals | None = None) -> AllGather:
        """Pack this rank's vectors. After the request, :meth:`deliver` or :meth:`take` finds those of every rank.

        Args:
            vectors: of one part.
            feedback: as for :meth:`send`.
        """
        self._received = self._scratch("every", (self.ctx.world_size, self.bytes))
        self._own = self._received[self.ctx.rank]
        noise = self._noise("send")
        for chunk in self._own_chunks():
            self._pack(vectors, chunk, self._own, noise, feedback)
        return AllGather(self._own, self._received.view(-1))

    def deliver(self, parts: Sequence[Vectors]) -> None:
        """Write the mean to the vectors of all parts."""
        if not self._numbers:
            return
        for number, (vectors, message) in enumerate(zip(parts, self._received, strict=True)):
            for chunk in self._chunks(number):
                place = None if self.rotated else whole(vectors, chunk, self.codec.block)
                found = self._work.decode(*self._split(message, chunk), out=place)
                if place is None:
                    scatter(vectors, chunk, self._plain(found))

    def owned(self) -> frozenset[int]:
        """Return the numbers of the vectors that have elements in this rank's part, whose mean it rounds once more."""
        if len(self.cut.parts) == 1:
            return frozenset()
        return frozenset(piece.number for chunk in self._chunks(self.ctx.rank) for piece in chunk.pieces)

    # -- a chunk

    def _pack(
        self,
        vectors: Vectors,
        chunk: Chunk,
        message: torch.Tensor,
        noise: torch.Generator | None,
        feedback: Residuals | None,
    ) -> None:
        x = whole(vectors, chunk, self.codec.block) if feedback is None else None
        if x is None:
            x = self._work.x[: chunk.rows]
            if feedback is None:
                gather(vectors, chunk, x)
            else:
                feedback.gather(vectors, chunk, x, self._work.spare)  # p = g + a e
        rotated = x
        if self.rotated:
            rotated = rotation.rotate(x, self._work.total[: chunk.rows], self._work.spare[: chunk.rows])
        scales, packed = self._split(message, chunk)
        self._work.encode(rotated, scales, packed, noise, keep=feedback is not None)
        if feedback is not None:
            if self.rotated:
                x.sub_(self._plain(self._work.decoded(chunk.rows, scales)))
            else:
                self._work.subtract(x, scales)
            feedback.keep(chunk, x, self._work.spare)  # p - C(p)

    def _own_chunks(self) -> tuple[Chunk, ...]:
        return self._chunks(self.ctx.rank) if self._numbers else ()

    def _mean(self, chunk: Chunk, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a chunk's mean over ranks, ``(rows, block)`` fp32, still rotated."""
        total = out if out is not None else self._work.total[: chunk.rows]
        for number, message in enumerate(self._received):
            parts = self._split(message, chunk)
            # Divide before adding: the sum may overflow although the mean fits.
            self._work.decode(*parts, out=total, factor=1.0 / self.ctx.world_size, add=number > 0)
        return total

    def _plain(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate a chunk back in place."""
        return rotation.turn_back(x, x, self._work.spare[: len(x)]) if self.rotated else x

    def _chunks(self, part: int) -> tuple[Chunk, ...]:
        return self.cut.parts[part if len(self.cut.parts) > 1 else 0]

    def _split(self, message: torch.Tensor, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        return self.codec.split(message, self.cut.rows, chunk.first, chunk.rows)

    def _noise(self, stage: str) -> torch.Generator | None:
        if self.codec.rounding == "nearest" or not self._numbers:
            return None
        return generator(self._device, f"{self._seed} {stage}", self.ctx.rank, self.ctx.step)

    def _scratch(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.ctx.scratch(name, shape, torch.uint8, self._device)


def all_reduce(exchange: TwoStageExchange, vectors: Vectors, feedback: Residuals | None = None) -> Stages:
    """Write the mean over ranks to ``vectors``, which the exchange cuts into W parts, or into one for whole messages.

    Example:
        >>> from commhooks import BucketLayout, Reduction
        >>> class Four(Reduction):
        ...     name, lossy, collectives = "four", True, frozenset({"all_to_all", "all_gather"})
        ...     def run(self, bucket, ctx):
        ...         vectors = [bucket.matrix(p).view(-1) for p in bucket.params]
        ...         sizes, parts = [p.numel for p in bucket.params], ctx.world_size
        ...         made = TwoStageExchange(Codec(4, 128), sizes, ctx, bucket.device, parts=parts)
        ...         yield from all_reduce(made, vectors)
        >>> stages = Four().plan(BucketLayout.of_shapes({"w": (64, 64)}), StepContext(world_size=4))
        >>> [(r.kind, r.payload_bytes) for stage in stages for r in stage]  # 4096 half bytes and 32 scales, padded to 4 parts
        [('all_to_all', 2112), ('all_gather', 2112)]
    """
    if len(exchange.cut.parts) == 1:
        yield exchange.send_own(vectors, feedback)
        exchange.take(vectors)
        return
    parts = [vectors] * exchange.ctx.world_size
    yield exchange.send(parts, [feedback] * exchange.ctx.world_size if feedback is not None else None)
    yield exchange.share(feedback)
    exchange.deliver(parts)


def reduce_scatter(
    exchange: TwoStageExchange, parts: Sequence[Vectors], own: Vectors, feedback: Sequence[Residuals] | None = None
) -> Stages:
    """Run the first stage alone, and write the mean over ranks of part r to rank r's ``own``.

    Args:
        exchange: one with ``parts=1`` and the sizes of one part.
        parts: vectors of each of the W parts, of any float dtype.
        own: vectors of the same sizes; they may be the vectors of this rank's part.
        feedback: residuals of each part.
    """
    yield exchange.send(parts, feedback)
    exchange.take(own)


def check_kernel(kernel: Kernel, codec: Codec, device: torch.device | None = None) -> None:
    """Refuse a kernel that cannot run here.

    Args:
        kernel: ``"torch"`` or ``"triton"``.
        codec: the format.
        device: of the numbers, if known.

    Raises:
        HookConfigError: Triton is not installed, has no kernel for the format, or cannot reach the device.
    """
    if kernel == "triton":
        found = _triton()
        found.check_codec(codec)
        if device is not None and device.type != "meta":
            found.check_device(device)


def workspace(kernel: Kernel, codec: Codec, ctx: StepContext, device: torch.device, rows: int) -> Workspace:
    """Return memory and arithmetic for chunks of up to ``rows`` blocks. Raises as :func:`check_kernel` does."""
    check_kernel(kernel, codec, device)
    if kernel == "torch" or device.type == "meta":  # a dry run computes nothing
        return Workspace(codec, ctx, device, rows)
    made: Workspace = _triton().TritonWorkspace(codec, ctx, device, rows)
    return made


def _triton() -> ModuleType:
    try:
        from ch_quant import triton_codec
    except ImportError as error:
        raise HookConfigError(
            f"kernel='triton' needs Triton, which cannot be imported here ({error}): pip install 'ch-quant[triton]', or "
            "leave kernel out: torch's operations send the same bytes"
        ) from error
    return triton_codec


def generator(device: torch.device, name: str, rank: int, step: int) -> torch.Generator:
    """Return the random numbers of one stage on one rank in one step.

    They follow from name, rank and step, so a resumed run draws the same ones. They differ between ranks, or the errors of
    all ranks would add up; decoding needs none of them.
    """
    seed = zlib.crc32(f"{name} {rank} {step}".encode()) | (step & 0x7FFFFFFF) << 32
    return torch.Generator(device).manual_seed(seed)
