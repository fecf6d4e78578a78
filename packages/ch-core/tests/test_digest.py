"""Digests against a definition in Python's integers, and changes that cancel in weaker sums."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ch_core.digest import checksum, digests, folded
from ch_core.sizes import SIZES

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.int64),
    *(torch.bool, torch.complex64, torch.complex128),
)
ROW = SIZES.digest_row_words
BLOCK = SIZES.digest_rows * ROW
BITS = (1 << 64) - 1


def mixed(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & BITS
    return x ^ (x >> 31)


def weight(place: int) -> int:
    return mixed(((place + 1) * 0x9E3779B97F4A7C15) & BITS) | 1


def defined(raw: bytes) -> int:
    """Return the digest of bytes by its definition."""
    padded = raw + bytes(-len(raw) % 4)
    words = [int.from_bytes(padded[i : i + 4], "little", signed=True) for i in range(0, len(padded), 4)]
    weights = [weight(i) for i in range(min(ROW, len(words)))]
    rows = [words[i : i + ROW] for i in range(0, len(words), ROW)]
    sums = [len(raw), *(sum(w * x for w, x in zip(weights, row, strict=False)) & BITS for row in rows)]
    return sum(weight(i) * mixed(row) for i, row in enumerate(sums)) & BITS


def drawn(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return random bytes as a tensor: NaNs, infinities and zeros of both signs are among them."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype) if dtype != torch.bool else raw > 127


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 4, ROW - 1, ROW, ROW + 1, 2 * ROW + 3])
def test_the_digest_is_that_of_the_raw_bytes(dtype: torch.dtype, count: int) -> None:
    tensor = drawn(count, dtype)
    (found,) = digests([tensor])
    assert found.dtype == torch.int64 and found.dim() == 0
    assert found.item() & BITS == defined(bytes(tensor.view(torch.uint8).tolist()))


def test_it_is_so_at_the_size_of_a_block() -> None:
    for count in (BLOCK - 1, BLOCK, BLOCK + ROW + 1):
        tensor = drawn(count, torch.int32)
        assert digests([tensor])[0].item() & BITS == defined(bytes(tensor.view(torch.uint8).tolist()))


def flip(tensor: torch.Tensor, index: int, bit: int) -> None:
    raw = tensor.view(-1).view(torch.uint8)
    raw[index * tensor.element_size() + bit // 8] ^= 1 << (bit % 8)


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_any_flipped_bit_changes_the_digest_of_its_tensor_alone(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([d for d in DTYPES if d != torch.bool]))
    numel = data.draw(st.sampled_from([1, 2, 7, 1000, (1 << 20) + 3]))
    tensors = [torch.zeros(3), torch.zeros(numel, dtype=dtype), torch.ones(2, 2)]
    before = digests(tensors)
    flip(tensors[1], data.draw(st.integers(0, numel - 1)), data.draw(st.integers(0, 8 * dtype.itemsize - 1)))
    after = digests(tensors)
    assert [bool(a != b) for a, b in zip(before, after, strict=True)] == [False, True, False]
    assert folded(torch.stack(before)) != folded(torch.stack(after))


def negated(tensor: torch.Tensor) -> None:
    tensor.neg_()


def exchanged(first: int, second: int, count: int = 1) -> Callable[[torch.Tensor], None]:
    def change(tensor: torch.Tensor) -> None:
        a, b = (tensor[start : start + count].clone() for start in (first, second))
        tensor[first : first + count], tensor[second : second + count] = b, a

    return change


def second_difference(tensor: torch.Tensor) -> None:
    """Add 1, -2 and 1 to the bits of three neighbours. Their sums with weights 1, 3, 5 stay."""
    bits = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    bits[10:13] += torch.tensor([1, -2, 1], dtype=bits.dtype)


REGULAR = {
    "all signs": negated,
    "two signs": lambda t: t[5:7].neg_(),
    "signs of a row": lambda t: t[:ROW].neg_(),
    "neighbours": exchanged(0, 1),
    "in a row": exchanged(3, 2000),
    "between rows": exchanged(1, ROW),
    "between rows, with equal products": exchanged(3 * 1000 + 1, ROW + 1000),
    "between chunks of 2**20": exchanged(1, 1 << 20),
    "a prime apart": exchanged(0, 8191),
    "rows": exchanged(0, 5 * ROW, ROW),
    "blocks": exchanged(0, BLOCK, BLOCK),
    "half": exchanged(0, 1 << 20, 1 << 20),
    "reversed": lambda t: t.copy_(t.flip(0)),
    "rotated": lambda t: t.copy_(t.roll(1)),
    "second difference": second_difference,
}


@pytest.mark.parametrize("change", REGULAR.values(), ids=REGULAR)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_regular_changes_do_not_cancel(dtype: torch.dtype, change: Callable[[torch.Tensor], object]) -> None:
    tensor = torch.randn((1 << 21) + 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = checksum(tensor)
    change(tensor)
    assert checksum(tensor) != before


def test_rows_are_folded_one_to_one_and_in_order() -> None:
    rows = torch.stack(digests([torch.arange(4.0), torch.arange(5.0)]))
    assert folded(rows) != folded(rows.flip(0))
    some = torch.randint(-(2**62), 2**62, (1000,), generator=torch.Generator().manual_seed(0))
    every = torch.cat([some, ~some, some ^ -(1 << 63), torch.tensor([0, -1])])
    assert len({int(folded(one.view(1))) for one in every.unique()}) == len(every.unique())


def test_it_depends_on_order_and_size_and_not_on_memory_or_neighbours() -> None:
    wide = torch.randn(3, 4)
    assert digests([wide]) == digests([wide.t().contiguous().t()])
    assert digests([torch.zeros(2)]) != digests([torch.zeros(3)])
    odd = torch.cat([torch.zeros(1), wide.view(-1)]).bfloat16()[1:]  # begins in the middle of a word
    assert digests([odd, wide]) == [*digests([odd.clone()]), *digests([wide])]
    number = torch.randn(3, dtype=torch.complex64)
    assert digests([number.conj(), number.conj().imag]) == digests([number.conj().resolve_conj(), -number.imag])


def test_a_checksum_covers_dtypes_shapes_and_order() -> None:
    a, b = torch.zeros(2), torch.ones(2)
    made = [(a, b), (b, a), (a,), (a.int(), b), (a.view(1, 2), b), (a.double(),), (), (torch.cat([a, b]),)]
    assert len({checksum(*one) for one in made}) == len(made)


def test_a_sparse_tensor_counts_by_its_indices_and_values() -> None:
    def made(place: int, value: float) -> torch.Tensor:
        return torch.sparse_coo_tensor([[0, place]], [1.0, value], (9,), check_invariants=True)

    assert checksum(made(2, 2.0)) == checksum(made(2, 2.0)) != checksum(made(3, 2.0))
    assert checksum(made(2, 2.0)) != checksum(made(2, -2.0))


def test_the_host_reads_nothing_of_a_device() -> None:
    """A tensor on ``meta`` has no numbers, so an operation that waits for some of them raises."""
    tensors = [torch.empty(BLOCK + 5, device="meta"), torch.empty(7, device="meta", dtype=torch.bfloat16)]
    found = digests(tensors)
    assert [one.device.type for one in found] == ["meta", "meta"]
    assert folded(torch.stack(found)).device.type == "meta"
    with pytest.raises(RuntimeError, match="meta"):
        checksum(*tensors)


@pytest.mark.nccl
def test_a_gpu_gives_the_same_digests_without_a_wait_of_the_host() -> None:
    tensors = [drawn(count, dtype) for dtype in DTYPES for count in (0, 3, ROW + 1, (1 << 10) * ROW + 5)]
    there = [tensor.cuda() for tensor in tensors]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = digests(there)
        together = folded(torch.stack(found))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [one.item() for one in found] == [one.item() for one in digests(tensors)]
    assert together.item() == folded(torch.stack(digests(tensors))).item()
    assert checksum(*there) == checksum(*tensors)
    half = [tensor.cuda() if at % 2 else tensor for at, tensor in enumerate(tensors)]
    assert checksum(*half) == checksum(*tensors)
