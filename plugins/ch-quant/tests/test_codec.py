"""Packing, rotation and the block codec. Their properties hold for all numbers."""

import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ch_core import SimulatedRank, simulate
from ch_quant import Codec, quantize_per_channel, rotation
from ch_quant.blocks import cut, gather, scatter, whole
from ch_quant.codec import WIDTHS, Workspace, in_lanes, pack, packed_bytes, unpack
from commhooks import Bucket, StepContext

pytestmark = pytest.mark.timeout(120)
SIZES = (1, 127, 128, 129, 1009)


@given(st.sampled_from(WIDTHS), st.integers(1, 40), st.integers(0, 2**31))
@settings(max_examples=150, deadline=None)
def test_codes_come_back_and_no_byte_is_wasted(bits: int, sixteens: int, seed: int) -> None:
    n, low = 16 * sixteens, -(1 << (bits - 1))
    codes = torch.randint(low, -low, (n,), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))
    out = torch.empty(packed_bytes(n, bits), dtype=torch.int8)
    pack(in_lanes(codes, bits), bits, out, torch.empty(len(in_lanes(codes, bits)[0]), dtype=torch.int8))
    back = torch.empty(n, dtype=torch.int8)
    unpack(out, bits, in_lanes(back, bits))
    assert out.numel() * 8 == n * bits
    assert torch.equal(back, codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_byte_is_some_code(bits: int) -> None:
    """Unpacking inverts packing for all bytes, so a message loses no bit."""
    packed = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).repeat(2)
    codes, again = torch.empty(len(packed) * 8 // bits, dtype=torch.int8), torch.empty_like(packed)
    lanes = in_lanes(codes, bits)
    unpack(packed, bits, lanes)
    pack(lanes, bits, again, torch.empty_like(lanes[0]))
    assert torch.equal(again, packed)


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=6),
    st.sampled_from((16, 48, 128)),
    st.integers(1, 5),
    st.integers(1, 7),
)
@settings(max_examples=150, deadline=None)
def test_every_number_is_in_exactly_one_part(sizes: list[int], block: int, parts: int, chunk: int) -> None:
    made = cut(tuple(sizes), block, parts, chunk)
    vectors = [torch.arange(n) + 1000.0 * (i + 1) for i, n in enumerate(sizes)]
    back = [torch.zeros(n) for n in sizes]
    seen = 0
    for chunks in made.parts:
        assert [c.first for c in chunks] == [0, *itertools.accumulate(c.rows for c in chunks)][: len(chunks)]
        assert sum(c.rows for c in chunks) == made.rows
        assert all(c.rows <= chunk for c in chunks)
        assert all(2 * c.rows >= chunk for c in chunks[:-1])  # short chunks would cost calls
        for one in chunks:
            x = torch.full((one.rows, block), float("nan"))
            gather(vectors, one, x)
            seen += int((x != 0).sum())
            scatter(back, one, x)
    assert seen == sum(sizes)
    assert all(torch.equal(a, b) for a, b in zip(vectors, back, strict=True))


def test_the_chunks_of_a_long_vector_need_no_copy() -> None:
    vectors = [torch.zeros(n) for n in (16 * 100, 16 * 5 + 1, 16 * 100)]
    (chunks,) = cut(tuple(len(v) for v in vectors), 16, 1, 30).parts
    views = [whole(vectors, chunk, 16) is not None for chunk in chunks]
    assert views == [True, True, True, True, False, True, True, True]  # the fifth begins with the short vector


def coded(codec: Codec, x: torch.Tensor, noise: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers that the sender and a receiver decode."""
    rows = len(x)
    work = Workspace(codec, StepContext(), torch.device("cpu"), rows)
    message = torch.empty(codec.bytes(rows), dtype=torch.uint8)
    scales, packed = codec.split(message, rows, 0, rows)
    work.encode(x, scales, packed, None if noise is None else torch.Generator().manual_seed(noise))
    mine = work.decoded(rows, scales).clone()
    return mine, work.decode(scales, packed, torch.empty_like(x))


CODECS = [
    Codec(bits, block, rounding) for bits in WIDTHS for block in (16, 128) for rounding in ("nearest", "stochastic")
]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("exponent", [-30, 0, 36])
def test_the_sender_knows_the_received_numbers(codec: Codec, exponent: int) -> None:
    x = torch.randn(37, codec.block, generator=torch.Generator().manual_seed(1)) * 10.0**exponent
    x[3] = 0.0
    x[4, 1:] = 0.0
    mine, theirs = coded(codec, x, None if codec.rounding == "nearest" else 5)
    assert torch.equal(mine, theirs)
    assert torch.equal(theirs[3], x[3])
    step = theirs.abs().amax(1, keepdim=True)
    if codec.bits > 2:
        width = x.abs().amax(1, keepdim=True) / ((1 << (codec.bits - 1)) - 1)
        assert ((theirs - x).abs() <= width * (1.0 if codec.rounding == "stochastic" else 0.5) * 1.01).all()
    elif codec.rounding == "nearest":  # never further away than zero
        assert ((theirs - x).norm(dim=1) <= x.norm(dim=1)).all()
    assert step.isfinite().all()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("exponent", [-44, -30, 0, 12, 36])
def test_feedback_and_mean_take_the_received_numbers_to_the_bit(codec: Codec, exponent: int) -> None:
    rows = 37
    x = torch.randn(rows, codec.block, generator=torch.Generator().manual_seed(1)) * 2.0 ** (3.3 * exponent)
    work = Workspace(codec, StepContext(), torch.device("cpu"), rows)
    scales, packed = codec.split(torch.empty(codec.bytes(rows), dtype=torch.uint8), rows, 0, rows)
    noise = None if codec.rounding == "nearest" else torch.Generator().manual_seed(2)
    work.encode(x, scales, packed, noise, keep=True)
    lost = work.subtract(x.clone(), scales)
    assert torch.equal(lost, x - work.decode(scales, packed))
    for factor in (0.5, 1.0 / 3.0):
        added = work.decode(scales, packed, x.clone(), factor, add=True)
        assert torch.equal(added, x + work.decode(scales, packed, factor=factor))


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec.rounding == "nearest"], ids=repr)
@pytest.mark.parametrize("exponent", [-100, -40, 40, 100])
def test_the_error_does_not_depend_on_the_size_of_numbers(codec: Codec, exponent: int) -> None:
    """2 ** 40 is 1.1e12. A scale in fp16 would be zero or Inf."""
    x = torch.randn(37, codec.block, generator=torch.Generator().manual_seed(1))
    assert torch.equal(coded(codec, x * 2.0**exponent)[1], coded(codec, x)[1] * 2.0**exponent)


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec.centred], ids=repr)
def test_a_zero_among_other_numbers_stays_zero(codec: Codec) -> None:
    x = torch.randn(37, codec.block, generator=torch.Generator().manual_seed(1)) + 3.0  # on one side, mostly
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) < 0.7] = 0.0
    _, theirs = coded(codec, x, None if codec.rounding == "nearest" else 5)
    assert not theirs[x == 0.0].any()


def drawn(chance: torch.Generator, *shape: int) -> torch.Tensor:
    """Return random numbers that every build draws. Normal numbers are not: builds have different logarithms."""
    return torch.randint(-(1 << 20), 1 << 20, shape, generator=chance).float() * 2.0**-18


def affine_mean() -> torch.Tensor:
    """Return rank 0's average of three ranks in affine codes."""

    def body(rank: SimulatedRank) -> torch.Tensor:
        engine = rank.engine(quantize_per_channel())
        chance = torch.Generator().manual_seed(rank.rank)
        bucket = Bucket.from_tensors({"w": drawn(chance, 61, 1000)})
        engine.submit(bucket)
        assert engine.finish() is None
        return bucket.buffer

    return simulate(3, body)[0]


def build_digests() -> dict[str, str]:
    """Return a digest of the bits that this build of torch decodes, and one of those that it encodes."""
    decoded, encoded = hashlib.sha256(affine_mean().numpy().tobytes()), hashlib.sha256()
    for bits, rows, block in itertools.product(WIDTHS, (1, 37, 700), (48, 128)):
        codec, chance = Codec(bits, block), torch.Generator().manual_seed(bits)
        work = Workspace(codec, StepContext(), torch.device("cpu"), rows)
        x = drawn(chance, rows, block)
        for factor in (1.0, 0.5, 1.0 / 3.0):
            message = torch.randint(0, 256, (codec.bytes(rows),), generator=chance, dtype=torch.uint8)
            scales, packed = codec.split(message, rows, 0, rows)
            scales.copy_(drawn(chance, rows, 1))
            decoded.update(work.decode(scales, packed, factor=factor).numpy().tobytes())
            decoded.update(work.decode(scales, packed, x, factor, add=True).numpy().tobytes())
        work.encode(x, scales, packed, None, keep=True)
        if codec.centred:  # torch does not specify the order of the sum of magnitudes
            encoded.update(message.numpy().tobytes())
            encoded.update(work.subtract(x, scales).numpy().tobytes())
    return {"decoded": decoded.hexdigest(), "encoded": encoded.hexdigest()}


@pytest.mark.full
@pytest.mark.timeout(180)
def test_every_build_and_number_of_threads_has_equal_bits() -> None:
    """Ranks with other processors decode the same numbers, or their parameters would drift apart."""
    here = ["default", "avx2", "avx512"]
    capability = torch.backends.cpu.get_cpu_capability().lower()
    known = here[: here.index(capability) + 1] if capability in here else ["default"]
    code = "import sys, test_codec as t; t.torch.set_num_threads(int(sys.argv[1])); print(t.build_digests())"
    found = {
        subprocess.run(
            [sys.executable, "-c", code, threads],
            env={**os.environ, "ATEN_CPU_CAPABILITY": build},
            cwd=Path(__file__).parent, check=True, capture_output=True, text=True, timeout=100,
        ).stdout
        for build, threads in [*((one, "1") for one in known[:-1]), (known[-1], "2")]
    }  # fmt: skip
    assert found == {f"{build_digests()}\n"}


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_is_not_finite_arrives_so_and_no_other_does(codec: Codec, value: float) -> None:
    x = torch.ones(5, codec.block)
    x[2, 7] = value
    _, theirs = coded(codec, x, None if codec.rounding == "nearest" else 5)
    assert not theirs[2].isfinite().any()
    assert theirs[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("value", [1e-44, 1e-40, 1e-37, 3.3e38, -3.4e38])
def test_the_ends_of_the_range(codec: Codec, value: float) -> None:
    _, theirs = coded(codec, torch.full((3, codec.block), value), None if codec.rounding == "nearest" else 5)
    if abs(value) > 3.3e38 and not theirs.isfinite().all():
        # For a power of two, the scale is the number itself. If bf16 rounds the scale up, the product is Inf.
        assert codec.rounding == "stochastic" or codec.bits in (1, 4)
        return
    assert theirs.isfinite().all()
    assert torch.allclose(theirs.abs().amax(), torch.tensor(abs(value)), rtol=0.5, atol=1e-34)


@pytest.mark.parametrize("bits", WIDTHS)
def test_stochastic_rounding_has_no_bias(bits: int) -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(3))
    codec, draws = Codec(bits, 128, "stochastic"), 400
    mean = torch.stack([coded(codec, x, seed)[1] for seed in range(draws)]).mean(0)
    levels = max(1, (1 << bits) - 1)
    step = 2 * x.abs().amax(1, keepdim=True) / levels
    assert ((mean - x).abs() < 5 * step / (2 * draws**0.5) * 1.3).all()  # five standard errors of the worst coin


@pytest.mark.parametrize("block", [16, 128, 512])
def test_the_rotation_is_orthonormal_and_exact_to_undo(block: int) -> None:
    x = torch.randn(33, block, generator=torch.Generator().manual_seed(2))
    spare = torch.empty_like(x)
    y = rotation.rotate(x, torch.empty_like(x), spare)
    identity = rotation.rotate(torch.eye(block), torch.empty(block, block), torch.empty(block, block))
    assert torch.allclose(identity @ identity.t(), torch.eye(block), atol=1e-5)
    assert torch.allclose(x @ identity, y, atol=1e-5)
    assert torch.allclose(rotation.turn_back(y, y, spare), x, atol=1e-5)


def test_no_scale_rounds_a_code_beyond_its_width() -> None:
    """A block's largest number lies at the edge of the last cell, and the scale is rounded. The test tries every
    mantissa.
    """
    for bits in (8, 4):
        x = torch.zeros(1 << 14, 16)
        x[:, 0] = torch.linspace(1.0, 4.0, 1 << 14)
        _, theirs = coded(Codec(bits, 16), x)
        assert ((theirs[:, 0] - x[:, 0]).abs() <= x[:, 0] / ((1 << bits) - 1) * 1.02).all()


def test_the_farther_side_has_a_level_more_and_nothing_is_clipped() -> None:
    """The codec uses all levels of 4 bits, for either longer side and every length of the other side."""
    last = 7
    x = torch.zeros(400, 16)
    x[:, 0], x[:, 1] = 1.0, -torch.linspace(0.0, 1.0, 400)
    x[:, 2:] = torch.rand(400, 14, generator=torch.Generator().manual_seed(1)) * (1.0 - x[:, 1:2]) + x[:, 1:2]
    _, theirs = coded(Codec(4, 16), x)
    _, mirrored = coded(Codec(4, 16), -x)
    assert torch.equal(mirrored, -theirs) or torch.equal(mirrored[:-1], -theirs[:-1])  # the last one is a tie
    step = torch.maximum(x.amax(1) / (last + 1), -x.amin(1) / last)[:, None]
    assert ((theirs - x).abs() <= 0.5 * step * 1.04).all()  # the scale is rounded
    assert torch.allclose(theirs[:200, 0], torch.ones(200), rtol=2**-7)


def test_the_error_of_four_bits() -> None:
    x = torch.randn(2000, 128, generator=torch.Generator().manual_seed(4))
    error = {bits: float((coded(Codec(bits, 128), x)[1] - x).square().mean()) for bits in (8, 4)}
    assert error[4] < 0.0115  # for a step of M / 7: 0.0138
    assert error[8] < 4.3e-5


def test_a_single_spike_is_spread_over_its_block() -> None:
    x = torch.zeros(1, 128)
    x[0, 5] = 128.0**0.5
    y = rotation.rotate(x, torch.empty_like(x), torch.empty_like(x))
    assert torch.allclose(y.abs(), torch.ones(1, 128), atol=1e-5)


@pytest.mark.parametrize(("size", "bits"), list(itertools.product(SIZES, WIDTHS)))
def test_a_message_of_an_odd_vector_has_the_bytes_of_its_blocks(size: int, bits: int) -> None:
    rows = cut((size,), 128, 1, 1 << 10).rows
    assert rows == -(-size // 128)
    assert Codec(bits, 128).bytes(rows) == rows * (2 + 16 * bits)
