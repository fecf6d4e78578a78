"""Partition of a bucket among the ranks of a node: every element once, loads, cuts, and order of memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ch_wrappers.node_partition import EXTRA, MOST, TOLERATED, Partition, partition
from commhooks import Bucket, BucketLayout

shapes = st.lists(
    st.one_of(st.tuples(st.integers(0, 40)), st.tuples(st.integers(1, 40), st.integers(1, 40))), min_size=1, max_size=8
)


def made_of(some: list[tuple[int, ...]]) -> BucketLayout:
    return BucketLayout.of_shapes({f"p{i}": shape for i, shape in enumerate(some)})


@given(shapes, st.integers(1, 6), st.sampled_from(["rows", "elements"]))
def test_every_element_has_one_owner(some: list[tuple[int, ...]], ranks: int, splits: str) -> None:
    layout = made_of(some)
    made = partition(layout, ranks, splits)
    owners = torch.zeros(layout.numel, dtype=torch.int64)
    for part in made.owned:
        assert len({piece.param.name for piece in part}) == len(part)  # at most one piece of a parameter
        for piece in part:
            owners[piece.param.offset + piece.start : piece.param.offset + piece.stop] += 1
    assert bool((owners == 1).all())
    bucket = Bucket(layout, torch.arange(layout.numel, dtype=torch.float32))
    packed = made.pack(bucket, torch.empty(ranks * made.numel)).clone()
    bucket.storage.zero_()
    made.unpack(packed, bucket)
    assert torch.equal(bucket.storage, torch.arange(layout.numel, dtype=torch.float32))


def loads(made: Partition) -> list[int]:
    return [sum(piece.numel for piece in part) for part in made.owned]


def growth(made: Partition, layout: BucketLayout) -> float:
    factors = sum(
        piece.numel // piece.param.matrix_shape[1] + piece.param.matrix_shape[1]
        for part in made.owned
        for piece in part
    )
    return factors / sum(sum(p.matrix_shape) for p in layout.params)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_owns_at_most_twice_its_share(ranks: int) -> None:
    for some in ([(512, 512)], [(64, 2048)], [(2048, 64)], [(384, 1536), (384,), (384,)], [(100, 100), (10, 10)]):
        layout = made_of(some)
        made = partition(layout, ranks, "rows")
        mean = sum(loads(made)) / ranks
        assert max(loads(made)) <= MOST * mean * 1.02
        if max(loads(made)) > TOLERATED * mean * 1.02:  # one more cut would have cost too many bytes
            cols = max(p.matrix_shape[1] for p in layout.params if len(p.shape) > 1)
            assert growth(made, layout) + cols / sum(sum(p.matrix_shape) for p in layout.params) > EXTRA


def test_one_square_matrix_is_cut_into_as_few_pieces_as_the_limit_allows() -> None:
    made = partition(made_of([(512, 512)]), 4, "rows")
    assert sorted(map(len, made.owned)) == [0, 0, 1, 1]


def test_large_parts_of_several_buckets_have_several_owners() -> None:
    owners = set()
    for i in range(8):
        made = partition(BucketLayout.of_shapes({f"layers.{i}.weight": (64, 64)}), 4, "rows")
        owners.update(place for place, part in enumerate(made.owned) if part)
    assert owners == {0, 1, 2, 3}
