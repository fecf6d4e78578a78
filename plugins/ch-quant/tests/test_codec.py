"""Packing, rotation and the block codec. Their properties hold for all numbers."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ch_quant import Codec, rotation
from ch_quant.blocks import cut, gather, scatter
from ch_quant.codec import WIDTHS, Workspace, pack, packed_bytes, unpack
from commhooks import StepContext

pytestmark = pytest.mark.timeout(120)
SIZES = (1, 127, 128, 129, 1009)


@given(st.sampled_from(WIDTHS), st.integers(1, 40), st.integers(0, 2**31))
@settings(max_examples=150, deadline=None)
def test_codes_come_back_and_no_byte_is_wasted(bits: int, sixteens: int, seed: int) -> None:
    n, low = 16 * sixteens, -(1 << (bits - 1))
    codes = torch.randint(low, -low, (n,), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))
    out = torch.empty(packed_bytes(n, bits), dtype=torch.int8)
    pack(codes, bits, out, torch.empty(n, dtype=torch.int8))
    back = torch.empty(n, dtype=torch.int8)
    unpack(out, bits, back)
    assert out.numel() * 8 == n * bits
    assert torch.equal(back, codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_byte_is_some_code(bits: int) -> None:
    """Unpacking inverts packing for all bytes, so a message loses no bit."""
    count = 3 if bits == 3 else 1
    packed = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).repeat(count * 2)
    codes, again = torch.empty(len(packed) * 8 // bits, dtype=torch.int8), torch.empty_like(packed)
    unpack(packed, bits, codes)
    pack(codes, bits, again, torch.empty_like(codes))
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
        assert [c.first for c in chunks] == list(range(0, made.rows, chunk))
        assert sum(c.rows for c in chunks) == made.rows
        for one in chunks:
            x = torch.full((one.rows, block), float("nan"))
            gather(vectors, one, x)
            seen += int((x != 0).sum())
            scatter(back, one, x)
    assert seen == sum(sizes)
    assert all(torch.equal(a, b) for a, b in zip(vectors, back, strict=True))


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
        assert codec.rounding == "stochastic" or codec.bits in (1, 3, 4)
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
    for bits in (8, 4, 3):
        x = torch.zeros(1 << 14, 16)
        x[:, 0] = torch.linspace(1.0, 4.0, 1 << 14)
        _, theirs = coded(Codec(bits, 16), x)
        assert ((theirs[:, 0] - x[:, 0]).abs() <= x[:, 0] / ((1 << bits) - 1) * 1.02).all()


@pytest.mark.parametrize("bits", [4, 3])
def test_the_farther_side_has_a_level_more_and_nothing_is_clipped(bits: int) -> None:
    """The codec uses all levels of b bits, for either longer side and every length of the other side."""
    last = (1 << (bits - 1)) - 1
    x = torch.zeros(400, 16)
    x[:, 0], x[:, 1] = 1.0, -torch.linspace(0.0, 1.0, 400)
    x[:, 2:] = torch.rand(400, 14, generator=torch.Generator().manual_seed(1)) * (1.0 - x[:, 1:2]) + x[:, 1:2]
    _, theirs = coded(Codec(bits, 16), x)
    _, mirrored = coded(Codec(bits, 16), -x)
    assert torch.equal(mirrored, -theirs) or torch.equal(mirrored[:-1], -theirs[:-1])  # the last one is a tie
    step = torch.maximum(x.amax(1) / (last + 1), -x.amin(1) / last)[:, None]
    assert ((theirs - x).abs() <= 0.5 * step * 1.04).all()  # the scale is rounded
    assert torch.allclose(theirs[:200, 0], torch.ones(200), rtol=2**-7)


def test_the_error_of_four_bits() -> None:
    x = torch.randn(2000, 128, generator=torch.Generator().manual_seed(4))
    error = {bits: float((coded(Codec(bits, 128), x)[1] - x).square().mean()) for bits in (8, 4, 3)}
    assert error[4] < 0.0115  # for a step of M / 7: 0.0138
    assert error[3] < 0.056  # 0.075
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
