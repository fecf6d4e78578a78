"""Integers of any width are packed without gaps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ch_sparse.message import BitPacking


@given(st.integers(1, 16).flatmap(lambda w: st.tuples(st.just(w), st.lists(st.integers(0, 2**w - 1), max_size=70))))
@settings(deadline=None, max_examples=200)
def test_unpacking_inverts_packing(case: tuple[int, list[int]]) -> None:
    width, numbers = case
    packing = BitPacking(width)
    packed = torch.full((packing.bytes(len(numbers)),), 255, dtype=torch.uint8)
    packing.pack(torch.tensor(numbers, dtype=torch.int64), packed)
    assert packing.unpack(packed, len(numbers)).tolist() == numbers
    assert 8 * packing.bytes(len(numbers)) < width * len(numbers) + 8 * width  # at most one group is partly filled


@pytest.mark.parametrize("width", range(1, 17))
def test_every_bit_of_the_bytes_is_used(width: int) -> None:
    packing = BitPacking(width)
    full = torch.full((packing.members * 5,), 2**width - 1)
    packed = torch.zeros(packing.bytes(len(full)), dtype=torch.uint8)
    packing.pack(full, packed)
    assert packed.eq(255).all()
    assert 8 * len(packed) == width * len(full)


def test_two_places_of_a_chunk_of_4096_take_three_bytes() -> None:
    assert BitPacking(12).bytes(2) == 3


@pytest.mark.parametrize("width", [0, 17])
def test_a_width_that_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match="1 to 16"):
        BitPacking(width)
