"""Each method in fp64, from the definition in its paper or its documentation, over the gradients of all ranks at once.

Nothing here calls a reduction of the packages. A method gets a :class:`Part`, the numbers of one parameter (or of a whole
bucket) on every rank, and the residuals that the ranks had before the step. It returns an :class:`Answer`: the average, the
residuals after the step, and how far a right implementation in fp32 may be from them.
"""

import fnmatch
import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy
import torch

FP32, FP16, BF16 = 2.0**-24, 2.0**-11, 2.0**-8
"""Largest relative error of one rounding to the nearest."""
NONE = torch.zeros((), dtype=torch.float64)


@dataclass(frozen=True)
class Tolerance:
    """How far numbers may be from the reference, in units that the method returns for each element.

    Attributes:
        bound: of every element.
        usual: of all elements but ``few + share * numel``. Rounding to a grid is not continuous: a number within fp32's
            rounding of the middle between two levels may go either way.
        share: part of the elements that may be off by more than ``usual``.
        few: number of elements that may be, however short the parameter is.
    """

    bound: float
    usual: float | None = None
    share: float = 0.0
    few: int = 0


def _roundings(unit: float, count: int) -> float:
    """Return the largest relative error of ``count`` roundings one after another."""
    return (1.0 + unit) ** count - 1.0


TOLERANCES: dict[str, Callable[[int], Tolerance]] = {
    # Unit: mean magnitude of the ranks. Each g / W is rounded once, and W - 1 sums are, none of which is larger than the sum
    # of the magnitudes. fp32's own roundings of the same numbers at other places of a composition fit into the last one.
    "exact": lambda world: Tolerance(_roundings(FP32, world + 1)),
    # The same with messages of 16 bits, which gloo adds in 16 bits. fp16's numbers below 2**-14 have an absolute error of
    # 2**-25 instead, in each rank's message and in each sum, so the unit has W 2**-14 more.
    "bf16": lambda world: Tolerance(_roundings(BF16, world)),
    "fp16": lambda world: Tolerance(_roundings(FP16, world)),
    # accumulate="fp32" rounds each message and the sum.
    "bf16, fp32 sum": lambda world: Tolerance(_roundings(BF16, 2) + 4 * FP32),
    "fp16, fp32 sum": lambda world: Tolerance(_roundings(FP16, 2) + 4 * FP32),
    # two_level in 16 bits rounds twice inside the node, and once for each addend between the nodes.
    "bf16, two levels": lambda world: Tolerance(_roundings(BF16, world + 2)),
    # Unit: mean step (range / 255) of the ranks. fp32 rounds numbers of up to 255 steps four times. x / s is off by at most
    # 255 * 2**-23 of a step, so each rank rounds an element the other way with a chance of 2**-14, by one step.
    "affine": lambda world: Tolerance(1.01, 2.0**-12, 2.0**-13 * world, 2),
    # Unit: the step of the block's mean plus the mean step of the ranks' blocks. A number decodes to a code times its scale of
    # 8 bits, which is exact. x / s is off by 127 * 2**-23 of a step at most; a scale is rounded to bf16 the other way with a
    # chance of 2**-14, and then all numbers of its block differ. Then the mean is off by a mean step, and its code by that,
    # by one step, and by what the other scale changes, which is no more than the first. A mean of a few levels has few bits, so
    # it often lies exactly between two levels, or a seventh of it between two scales: `Answer.others`.
    "blocks": lambda world: Tolerance(2.0, 2.0**-18, 2.0**-13 * (world + 1), 256),
    # One rounding. The average is a sum of numbers of up to 127 steps, which fp32 rounds W times to a 2**-24th.
    "blocks, once": lambda world: Tolerance(2.0, world * 2.0**-17, 2.0**-13 * (world + 1), 256),
    # The rotation back rounds numbers of up to some steps in fp32. It may join all errors of a block in one number.
    "blocks, rotated": lambda world: Tolerance(4.0, 2.0**-16, 2.0**-12 * (world + 1), 256),
    # Random rounding errs by less than a step, at both stages.
    "blocks, random": lambda world: Tolerance(1.0),
    # Unit: steps that follow from the largest magnitude within a block's length on either side, because two_level's parts
    # begin blocks at other elements. Each rounding errs by half a step; inside= by two more roundings.
    "blocks, two levels": lambda world: Tolerance(1.5),
    # Unit: threshold of the ranks' chunks over W. Entries whose magnitudes agree within fp32's rounding may change places.
    # A value is rounded to bf16, or to one of two levels of its chunk, which follow from sums.
    "topk": lambda world: Tolerance(1.01, 2.0**-16, 2.0**-15, 4),
    # A level near the middle of two numbers of bf16 may go either way, with up to 41 values, 1 % of a chunk.
    "topk, two levels": lambda world: Tolerance(1.01, 2.0**-16, 2.0**-15, 4 + 41),
    # Unit: largest magnitude of the average's matrix. A product adds up to 40 000 numbers in fp32, whose roundings make 2**-16
    # of the sum if they are independent. There are three products, and factors of gradients that are noise have condition
    # numbers below 3.
    "low rank": lambda world: Tolerance(2.0**-13),
    # P and Q travel in bf16, each off by W roundings. P counts twice in P P^T D, and orthonormal columns spread an error of one
    # column over the others.
    "low rank, bf16": lambda world: Tolerance(4.0 * _roundings(BF16, world)),
    # Residuals. Unit: |p|, which fp32 rounds before it is cast, and again when the sent number is subtracted. A number within
    # that of the middle between two numbers of 16 bits may go either way, by a whole step.
    "kept, bf16": lambda world: Tolerance(2.1 * BF16, 4 * FP32, 2.0**-13, 2),
    "kept, fp16": lambda world: Tolerance(2.1 * FP16, 4 * FP32, 2.0**-10, 2),
    # Unit: a step of the rank's own block plus W steps of the mean's block. fp32 rounds residuals of up to 127 steps.
    "kept, blocks": lambda world: Tolerance(2.0, 2.0**-13, 2.0**-13 * (world + 1), 256),
    # A residual of a few steps is rounded twice to a 254th of the largest of its block.
    "kept, packed blocks": lambda world: Tolerance(2.0, 2.0**-4, 2.0**-13 * (world + 1), 256),
    # Unit: |p| plus the chunk's threshold.
    "kept, topk": lambda world: Tolerance(1.01, 4 * FP32, 2.0**-15, 4),
    # Input minus sent and residual. Unit: all terms of the sum. Each passes a dozen operations in fp32 on two or more ranks. The
    # method adds the rounding of the messages' sum (`Answer.rounding`), and what it forgets.
    "law": lambda world: Tolerance(32 * FP32),
}
"""The only tolerances, by name. They depend on the number of ranks."""


@dataclass(frozen=True)
class Param:
    """A parameter as a hook sees it: its name there, and its shape in the order of memory."""

    name: str
    memory: tuple[int, ...]
    numel: int

    @property
    def rows(self) -> int:
        return self.memory[0] if self.memory else 1

    @property
    def cols(self) -> int:
        return self.numel // self.rows


@dataclass(frozen=True)
class Part:
    """Numbers on every rank, and what the ranks remember before the step.

    Attributes:
        params: the parameters, one after another. Methods of a whole bucket get several.
        gradients: ``(world, n)`` fp64.
        residuals: ``(world, n)``; ``None`` if there are none yet.
        shared: fields that are equal on all ranks, of the first parameter.
        step: number of committed steps before this one.
        start: first element, if the numbers are a slice of one parameter.
        whole: True if ranks are so far apart that each sends its whole message to all others.
    """

    params: tuple[Param, ...]
    gradients: torch.Tensor
    residuals: torch.Tensor | None
    shared: Mapping[str, torch.Tensor]
    step: int
    start: int = 0
    whole: bool = False

    @property
    def param(self) -> Param:
        return self.params[0]

    @property
    def world(self) -> int:
        return len(self.gradients)

    @property
    def stages(self) -> int:
        """Number of exchanges of quantized blocks. Two ranks send as many bytes in one as in two."""
        return 1 if self.whole or self.world <= 2 else 2

    def owed(self, decay: float = 1.0) -> torch.Tensor:
        """Return gradients plus residuals."""
        return self.gradients if self.residuals is None else self.gradients + decay * self.residuals


@dataclass(frozen=True)
class Answer:
    """What a right implementation returns.

    Attributes:
        mean: ``(n,)``, or ``(world, n)`` if ranks get different numbers.
        unit: of the tolerance, broadcast to the mean.
        tolerance: its name.
        others: distances from the mean to other right results, ``(count, n)``.
        turn: ``(block, block)``, multiplies the errors of each block before they are judged.
        sent: each rank's contribution as its peers receive it, ``(world, n)``, if the method reports one.
        owed: numbers that a rank sends or keeps; ``None`` if it keeps nothing.
        kept: residuals after the step, ``(world, n)``. Each element may agree with any of them.
        kept_unit: of their tolerance, broadcast to them.
        kept_tolerance: its name.
        rounding: relative error of one rounding of the sum over ranks, which no residual returns.
        forgotten: what roundings of factors, or of residuals in 8 bits, lose beside that, ``(n,)``.
        shared: fields after the step.
    """

    mean: torch.Tensor
    unit: torch.Tensor
    tolerance: str
    others: torch.Tensor = NONE
    turn: torch.Tensor | None = None
    sent: torch.Tensor | None = None
    owed: torch.Tensor | None = None
    kept: tuple[torch.Tensor, ...] = ()
    kept_unit: torch.Tensor = NONE
    kept_tolerance: str = "exact"
    rounding: float = 0.0
    forgotten: torch.Tensor = NONE
    shared: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Method:
    """A method of averaging. Its numbers may be cut at multiples of ``grain`` elements of a parameter.

    Attributes:
        grain: 0 if a parameter, or with ``whole_bucket`` a bucket, cannot be cut.
        whole_bucket: True if the result depends on the other parameters of the bucket.
    """

    grain: int = 1
    whole_bucket: bool = False

    def __call__(self, part: Part) -> Answer:
        raise NotImplementedError

    def of(self, param: Param, step: int) -> "Method":
        """Return the method that treats a parameter in a step."""
        return self


@dataclass(frozen=True)
class Exact(Method):
    """The mean."""

    def __call__(self, part: Part) -> Answer:
        return Answer(part.gradients.mean(0), part.gradients.abs().mean(0), "exact")


@dataclass(frozen=True)
class Alone(Method):
    """Each rank's own gradient, or from step ``start`` on the mean of consecutive ranks."""

    start: int = 0
    ranks: int = 1

    def __call__(self, part: Part) -> Answer:
        g = part.gradients
        ranks = self.ranks if part.step >= self.start else part.world
        means = g.view(-1, ranks, g.shape[1]).mean(1).repeat_interleave(ranks, 0)
        return Answer(means, g.abs().mean(0), "exact")


@dataclass(frozen=True)
class Cast(Method):
    """The mean of messages ``g / W`` in 16 bits."""

    dtype: torch.dtype
    tolerance: str

    def __call__(self, part: Part) -> Answer:
        g = part.gradients
        unit = g.abs().mean(0)
        if self.dtype == torch.float16:
            unit = unit + part.world * 2.0**-14
        sent = (g / part.world).to(self.dtype).double() * part.world
        rounding = BF16 if self.dtype == torch.bfloat16 else FP16
        small = torch.tensor(part.world * 2.0**-14 if self.dtype == torch.float16 else 0.0, dtype=torch.float64)
        name = "kept, bf16" if self.dtype == torch.bfloat16 else "kept, fp16"
        return Answer(
            g.mean(0), unit, self.tolerance, sent=sent, rounding=rounding, kept_unit=small, kept_tolerance=name
        )


@dataclass(frozen=True)
class Feedback(Method):
    """Error feedback: send ``C(g + e)`` and keep ``g + e - C(g + e)`` (arXiv:1901.09847)."""

    inner: Method

    @property
    def grain(self) -> int:  # type: ignore[override]
        return self.inner.grain

    def of(self, param: Param, step: int) -> Method:
        inner = self.inner.of(param, step)
        return inner if isinstance(inner, Exact) else Feedback(inner)

    def __call__(self, part: Part) -> Answer:
        owed = part.owed()
        return self.of_sent(self.inner(replace(part, gradients=owed, residuals=None)), owed)

    @staticmethod
    def of_sent(answer: Answer, owed: torch.Tensor) -> Answer:
        """Keep the numbers that were not sent."""
        assert answer.sent is not None
        return replace(answer, owed=owed, kept=(owed - answer.sent,), kept_unit=answer.kept_unit + owed.abs())


@dataclass(frozen=True)
class Warmup(Method):
    """One method for some steps, then another."""

    first: Method
    then: Method
    steps: int

    def of(self, param: Param, step: int) -> Method:
        return (self.first if step < self.steps else self.then).of(param, step)


@dataclass(frozen=True)
class Policy(Method):
    """A method for each parameter, by the first pattern that matches its name."""

    rules: tuple[tuple[str, Method], ...]

    def of(self, param: Param, step: int) -> Method:
        chosen = next(method for pattern, method in self.rules if fnmatch.fnmatchcase(param.name, pattern))
        return chosen.of(param, step)


# -- blocks of few bits


@dataclass(frozen=True)
class Blocks(Method):
    """Quantized blocks in two stages, as ZeRO++'s qgZ (arXiv:2306.10209): ``C(mean(C(p_i)))``; ``mean(C(p_i))`` of two ranks.

    With feedback, ``p = g + e / 4`` and each rank keeps ``e + g - C(p)``. The rank that rounds a part of the mean for all
    keeps W times that error, too (arXiv:2407.04480). The reference does not know which rank that is.
    """

    bits: int
    block: int = 128
    rotated: bool = False
    random: bool = False
    feedback: bool = False
    packed: bool = False
    exempt: bool = True

    @property
    def grain(self) -> int:  # type: ignore[override]
        return self.block

    def of(self, param: Param, step: int) -> Method:
        return Exact() if self.exempt and (len(param.memory) < 2 or param.numel < self.block) else self

    def __call__(self, part: Part) -> Answer:
        """Zeros pad the last block. Without a level at zero they decode to other numbers, which count in the second stage."""
        n = part.gradients.shape[1]
        g = torch.nn.functional.pad(part.gradients, (0, -n % self.block))
        e = torch.nn.functional.pad(part.residuals, (0, -n % self.block)) if part.residuals is not None else 0.0 * g
        p = g + 0.25 * e if self.feedback else g
        if self.random:
            last = 2 ** (self.bits - 1) - 1
            first = _reach(p, self.block).mean(0) / last * 1.02
            second = _reach(p, self.block).mean(0) / last * 1.02 + first / last * 1.02
            return Answer(p.mean(0)[:n], (first + second)[:n] if part.stages > 1 else first[:n], "blocks, random")
        sent, first, *_ = self._coded(p)
        mean = sent.mean(0, keepdim=True)
        if part.stages == 1:
            name = "blocks, rotated" if self.rotated else "blocks, once"
            answer = Answer(mean[0, :n], first.mean(0)[:n], name, turn=_hadamard(self.block) if self.rotated else None)
            kept = e + g - sent
            return answer if not self.feedback else self._with_kept(answer, part, g + e, (kept,), first)
        coded, second, level, tie = self._coded(mean)
        others = [tie]
        for nudge in (1.0 - 2.0**-21, 1.0 + 2.0**-21):
            *_, nudged, tie = self._coded(mean, nudge)
            others += [nudged - level, nudged + tie - level]
        answer = Answer(
            coded[0, :n],
            (first.mean(0) + second[0])[:n],
            "blocks, rotated" if self.rotated else "blocks",
            torch.cat(others)[:, :n],
            _hadamard(self.block) if self.rotated else None,
        )
        if not self.feedback:
            return answer
        kept = e + g - sent
        owner = kept + part.world * (mean - coded)
        every = (kept, owner, *(owner - part.world * other for other in others))
        return self._with_kept(answer, part, g + e, every, first + part.world * second)

    def _with_kept(
        self, answer: Answer, part: Part, owed: torch.Tensor, kept: tuple[torch.Tensor, ...], unit: torch.Tensor
    ) -> Answer:
        n = part.gradients.shape[1]
        largest = torch.stack([one.abs() for one in kept[:2]]).amax(0)
        return replace(
            answer,
            owed=owed[:, :n],
            kept=tuple(one[:, :n] for one in kept),
            kept_unit=unit[:, :n],
            kept_tolerance="kept, packed blocks" if self.packed else "kept, blocks",
            forgotten=_reach(largest, self.block).mean(0)[:n] / 120.0 if self.packed else NONE,
        )

    def _coded(self, x: torch.Tensor, nudge: float = 1.0) -> tuple[torch.Tensor, ...]:
        """Return the decoded numbers, the step of each, its level before it is turned back, and the distance to one as near.

        ``nudge`` multiplies the scales before they are rounded.
        """
        blocks = x.view(len(x), -1, self.block)
        turn = _hadamard(self.block) if self.rotated else None
        level, step, tie = _levels(blocks @ turn.t() if turn is not None else blocks, self.bits, nudge)
        decoded = level @ turn if turn is not None else level
        return tuple(one.reshape(x.shape) for one in (decoded, step.expand_as(blocks), level, tie))


def _levels(blocks: torch.Tensor, bits: int, nudge: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return blocks at the nearest of their levels, the distance between two levels, and that to a level as near or zero."""
    if bits <= 2:  # levels at odd multiples of h
        h = _bf16(blocks.abs().mean(-1, keepdim=True) * (0.7 if bits == 2 else 1.0) * nudge)
        scale, last = 2 * h, 2 ** (bits - 1)
        at = blocks / scale - 0.5
        code = torch.floor(at + 0.5).clamp(-last, last - 1)
        found = (code + 0.5) * scale
    else:
        last = 2 ** (bits - 1) - 1
        high, low = blocks.amax(-1, keepdim=True), -blocks.amin(-1, keepdim=True)
        if bits == 8:
            scale = torch.maximum(high, low) / last
        else:  # one more level on the side that reaches farther; the scale is negative if that is the positive one
            scale = torch.maximum(torch.maximum(high, low) / (last + 1), torch.minimum(high, low) / last)
            scale = torch.where(low >= high, scale, -scale)
        scale = _bf16(scale * nudge)
        at = blocks / scale
        code = torch.round(at)
        found = code * scale
    rest = at - code
    middle = (rest.abs() - 0.5).abs() < 2.0**-15  # fp32 rounds numbers of up to 127 steps
    other = torch.where(middle, torch.sign(rest) * scale, 0.0)
    return torch.where(scale != 0, found, 0.0), scale.abs(), other.nan_to_num(0.0)


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).double()


def _reach(x: torch.Tensor, block: int, window: int = 0) -> torch.Tensor:
    """Return the largest magnitude of each element's block; with ``window``, of that many blocks on either side too."""
    blocks = torch.nn.functional.pad(x.abs(), (0, -x.shape[-1] % block)).view(len(x), -1, block).amax(-1)
    if window:
        blocks = torch.nn.functional.max_pool1d(blocks.unsqueeze(1), 2 * window + 1, 1, window).squeeze(1)
    return blocks.repeat_interleave(block, -1)[:, : x.shape[-1]]


def _hadamard(n: int) -> torch.Tensor:
    """Return Sylvester's matrix, with random signs of its columns, orthonormal. The documented seed is ``n``."""
    made = torch.ones(1, 1, dtype=torch.float64)
    while len(made) < n:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    coins = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(n), dtype=torch.int64)
    return made * (2.0 * coins - 1.0) * n**-0.5


@dataclass(frozen=True)
class BlocksOnLevels(Method):
    """A bound for quantized blocks whose begin depends on the partition of a bucket over the ranks of a node.

    Inside a node, blocks of 8 bits hold numbers of several parameters, in the order of the bucket.
    """

    bits: int
    inside: bool = False
    block: int = 128
    grain = 0

    @property
    def whole_bucket(self) -> bool:  # type: ignore[override]
        return self.inside

    def __call__(self, part: Part) -> Answer:
        g = part.gradients
        reach = _reach(g, self.block, 1).mean(0)
        unit = reach / (2 ** (self.bits - 1) - 1) * 1.02 + reach * (2 / 127 if self.inside else 0.0)
        return Answer(g.mean(0), unit + 8 * FP32 * g.abs().mean(0), "blocks, two levels")


@dataclass(frozen=True)
class Affine(Method):
    """The mean of uint8 codes with an affine scale for a row of elements; 0 for a parameter."""

    row: int = 0

    @property
    def grain(self) -> int:  # type: ignore[override]
        return self.row

    def __call__(self, part: Part) -> Answer:
        g = part.gradients
        n = g.shape[1]
        width = self.row or n
        rows = torch.nn.functional.pad(g, (0, -n % width)).view(part.world, -1, width)  # a range holds zero anyway
        low, high = rows.amin(-1, keepdim=True).clamp(max=0.0), rows.amax(-1, keepdim=True).clamp(min=0.0)
        scale = ((high - low) / 255).clamp(min=1.2e-38)
        zero = torch.round(-low / scale).clamp(0, 255)
        code = (torch.round(rows / scale) + zero).clamp(0, 255)
        flat = ((code - zero) * scale).reshape(part.world, -1)[:, :n]
        return Answer(flat.mean(0), scale.expand_as(rows).reshape(part.world, -1)[:, :n].mean(0), "affine")


# -- low rank


@dataclass(frozen=True)
class LowRank(Method):
    """PowerSGD, algorithm 1 (arXiv:1905.13727)."""

    rank: int
    rate: float = 2.0
    averaged: bool = False
    feedback: bool = True
    warm: bool = True
    start: int = 0
    bucket: bool = False
    wire: torch.dtype | None = None
    grain = 0

    @property
    def whole_bucket(self) -> bool:  # type: ignore[override]
        return self.bucket

    def of(self, param: Param, step: int) -> Method:
        if step < self.start:
            return Exact() if self.wire is None else Cast(self.wire, "bf16")
        if self.bucket or (len(param.memory) > 1 and self._pays(param.rows, param.cols)):
            return self
        return Exact() if self.wire is None else Cast(self.wire, "bf16")

    def _pays(self, rows: int, cols: int) -> bool:
        return (rows + cols) * min(rows, cols, self.rank) * self.rate < rows * cols

    def __call__(self, part: Part) -> Answer:
        n = part.gradients.shape[1]
        rows, cols = part.param.rows, part.param.cols
        if self.bucket:
            cols = int(numpy.ceil(numpy.sqrt(n)))
            rows = -(-n // cols)
            if not self._pays(rows, cols):
                return Exact()(part)
        rank = min(rows, cols, self.rank)
        d = part.owed() if self.feedback else part.gradients
        matrix = torch.nn.functional.pad(d, (0, rows * cols - n)).view(-1, rows, cols)
        q = part.shared.get("q") if self.warm else None
        if q is None:
            q = _drawn(f"0/{0 if self.warm else part.step}/{part.param.name}", (rank, cols))
        p = _orthonormal((matrix @ _orthonormal(q.t())).mean(0))
        each = matrix.mT @ p  # (world, cols, rank)
        decoded = p @ each.mean(0).t()
        mean = decoded.reshape(-1)[:n]
        own = (matrix - (decoded if self.averaged else p @ each.mT)).reshape(part.world, -1)[:, :n]
        name = "low rank" if self.wire is None else "low rank, bf16"
        answer = Answer(mean, mean.abs().max(), name, shared={"q": each.mean(0).t()} if self.warm else {})
        if not self.feedback:
            return answer
        # The sum of the Q's is rounded W - 1 times, and no rank subtracts that.
        sizes = (p.abs() @ each.abs().mean(0).t()).reshape(-1)[:n] * (1.25 * (part.world - 1))
        lost = NONE if self.wire is None else BF16 * sizes
        return replace(answer, owed=d, kept=(own,), kept_unit=d.abs().max(), kept_tolerance=name, forgotten=lost)


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Return Gram and Schmidt's columns."""
    q, r = torch.linalg.qr(columns)
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def _drawn(seed: str, shape: tuple[int, int]) -> torch.Tensor:
    """Return unit rows of normal numbers, by the documented seed."""
    number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "little") >> 1
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    return torch.nn.functional.normalize(drawn.double(), dim=-1)


# -- a part of the entries


@dataclass(frozen=True)
class TopK(Method):
    """The largest entries of each chunk, with error feedback that may decay (arXiv:1712.01887, arXiv:2508.15706)."""

    density: float = 0.01
    chunk: int = 4096
    bits: int = 16
    decay: float = 1.0
    feedback: bool = True
    wire: torch.dtype | None = None

    @property
    def grain(self) -> int:  # type: ignore[override]
        return self.chunk

    def of(self, param: Param, step: int) -> Method:
        if len(param.memory) < 2 or param.numel < round(1.0 / self.density):
            return Exact() if self.wire is None else Cast(self.wire, "bf16")
        return self

    def __call__(self, part: Part) -> Answer:
        p = part.owed(self.decay) if self.feedback else part.gradients
        sent, unit = torch.zeros_like(p), torch.zeros_like(p)
        whole = p.shape[1] // self.chunk * self.chunk
        for begin, end, width in ((0, whole, self.chunk), (whole, p.shape[1], p.shape[1] - whole)):
            if width and begin < end:
                rows = p[:, begin:end].reshape(-1, width)
                chosen, threshold = self._chosen(rows)
                sent[:, begin:end] = chosen.view(part.world, -1)
                unit[:, begin:end] = threshold.expand_as(rows).reshape(part.world, -1)
        answer = Answer(
            sent.mean(0),
            unit.mean(0) + sent.abs().mean(0),
            "topk, two levels" if self.bits == 2 else "topk",
            sent=sent,
            kept_unit=unit,
            kept_tolerance="kept, topk",
        )
        return Feedback.of_sent(answer, p) if self.feedback else answer

    def _chosen(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what peers decode of each row, zero elsewhere, and the smallest magnitude that is sent."""
        k = max(1, round(self.density * rows.shape[1]))
        order = rows.abs().topk(k, dim=1)
        values = rows.gather(1, order.indices)
        if self.bits == 16:
            values = _bf16(values)
        elif self.bits == 2:
            values = torch.sign(values) * _two_levels(order.values)
        elif self.wire is not None:
            values = values.to(self.wire).double()
        return torch.zeros_like(rows).scatter_(1, order.indices, values), order.values[:, -1:]


def _two_levels(magnitudes: torch.Tensor) -> torch.Tensor:
    """Return the best two levels of sorted magnitudes, by trying every split into a larger and a smaller side."""
    rows, k = magnitudes.shape
    best = torch.full((rows,), torch.inf, dtype=torch.float64)
    made = torch.zeros_like(magnitudes)
    for split in range(1, k + 1):
        above, below = magnitudes[:, :split], magnitudes[:, split:]
        levels = above.mean(1, keepdim=True), below.mean(1, keepdim=True) if split < k else torch.zeros(rows, 1)
        error = (above - levels[0]).square().sum(1) + (below - levels[1]).square().sum(1)
        better = error < best
        best = torch.where(better, error, best)
        coded = torch.cat([_bf16(levels[0]).expand(-1, split), _bf16(levels[1].double()).expand(-1, k - split)], 1)
        made = torch.where(better.unsqueeze(1), coded, made)
    return made


@dataclass(frozen=True)
class RandomK(Method):
    """One entry of each run of ``1 / density`` elements, chosen by splitmix64 of seed 0, the step, the name and the run."""

    density: float = 0.05
    feedback: bool = True
    wire: torch.dtype | None = None

    @property
    def size(self) -> int:
        return round(1.0 / self.density)

    @property
    def grain(self) -> int:  # type: ignore[override]
        return self.size

    def of(self, param: Param, step: int) -> Method:
        if len(param.memory) < 2 or param.numel < self.size:
            return Exact() if self.wire is None else Cast(self.wire, "bf16")
        return self

    def __call__(self, part: Part) -> Answer:
        p = part.owed() if self.feedback else part.gradients
        first, n = part.start // self.size, p.shape[1]
        runs = numpy.arange(first, first - (-n // self.size), dtype=numpy.uint64)
        keys = _splitmix(_splitmix(runs, zlib.crc32(part.param.name.encode())), 0)
        column = _splitmix(keys, part.step).view(numpy.int64) % self.size
        at = torch.from_numpy((runs - first).astype(numpy.int64) * self.size + column)
        chosen = torch.zeros(n, dtype=torch.bool)
        chosen[at[at < n]] = True
        values = torch.where(chosen, p, 0.0) * (1.0 if self.feedback else self.size)
        name, rounding, sent = "exact", 0.0, values
        if self.wire is not None:
            name, rounding = "bf16", BF16
            sent = (values / part.world).to(self.wire).double() * part.world
        answer = Answer(
            values.mean(0), values.abs().mean(0), name, sent=sent, rounding=rounding, kept_tolerance="kept, bf16"
        )
        return Feedback.of_sent(answer, p) if self.feedback else answer


def _splitmix(keys: numpy.ndarray, number: int) -> numpy.ndarray:
    """Return splitmix64's finalizer of ``golden * (key + number)``."""
    golden, first, second = (numpy.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
    with numpy.errstate(over="ignore"):
        z = (keys + numpy.uint64(number)) * golden
        z = (z ^ (z >> numpy.uint64(30))) * first
        z = (z ^ (z >> numpy.uint64(27))) * second
        return z ^ (z >> numpy.uint64(31))


@dataclass(frozen=True)
class Conserved(Method):
    """A method whose average depends on a partition that the reference does not know. Only the law of feedback is checked."""

    grain = 0

    def __call__(self, part: Part) -> Answer:
        owed = part.owed()
        return Answer(owed.mean(0), torch.full((), torch.inf), "exact", owed=owed)


def groups(
    method: Method, params: Sequence[Param], buckets: Sequence[Sequence[int]], step: int
) -> list[tuple[Method, tuple[int, ...]]]:
    """Return the parts of a model in a step: the method of each, and the numbers of its parameters."""
    if method.of(params[0], step).whole_bucket:
        return [(method.of(params[bucket[0]], step), tuple(bucket)) for bucket in buckets]
    return [(method.of(param, step), (number,)) for number, param in enumerate(params)]
