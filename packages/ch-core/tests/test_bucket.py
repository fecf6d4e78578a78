"""Buckets: views, strides, pieces and splitting."""

import copy
import dataclasses
import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ch_core import Bucket, BucketLayout, ParamLayout, per_layout
from ch_core.bucket import contiguous_stride
from ch_core.engine.schedule import pieces as pieces_of

SHAPES = st.dictionaries(
    st.text("abcdef.", min_size=1, max_size=6),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    min_size=1,
    max_size=6,
)


@given(SHAPES)
def test_views_partition_the_buffer(shapes: dict[str, tuple[int, ...]]) -> None:
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    bucket = Bucket.from_tensors(tensors)
    for param, view in bucket.views():
        assert torch.equal(view, tensors[param.name])
        view.zero_()
    assert bucket.buffer.abs().sum() == 0


def test_a_digest_tells_places_apart_but_not_names() -> None:
    def digest(shape: tuple[int, ...], stride: tuple[int, ...], name: str = "w", offset: int = 0) -> bytes:
        return BucketLayout([ParamLayout(name, shape, stride, offset)], 24, torch.float32).digest

    assert digest((4, 6), (6, 1)) == digest((4, 6), (6, 1), "other")
    assert digest((4, 1), (1, 1)) == digest((4, 1), (1, 4)), "an axis with one element has any stride"
    others = [digest((6, 4), (4, 1)), digest((4, 6), (1, 4)), digest((24,), (1,)), digest((4, 5), (5, 1), offset=4)]
    assert len({digest((4, 6), (6, 1)), *others, digest((4, 5), (5, 1))}) == 6


@given(SHAPES, st.integers(1, 3))
def test_select_and_back(shapes: dict[str, tuple[int, ...]], groups: int) -> None:
    bucket = Bucket.from_tensors({name: torch.randn(shape) for name, shape in shapes.items()})
    before = bucket.buffer.clone()
    names = sorted(shapes)
    parts = [bucket.select(names[first::groups]) for first in range(groups)]
    assert sum(part.layout.size for part in parts) == bucket.layout.size
    for part in parts:
        part.buffer = part.buffer * 2
    assert torch.equal(bucket.buffer, before * 2)


@given(SHAPES, st.integers(4, 200), st.booleans())
def test_pieces_are_the_bucket(shapes: dict[str, tuple[int, ...]], nbytes: int, last: bool) -> None:
    bucket = Bucket.from_tensors({name: torch.randn(shape) for name, shape in shapes.items()}, index=3, is_last=last)
    for unused in (frozenset(list(shapes)[::2]), frozenset[str]()):
        bucket.unused = unused
        pieces = pieces_of(bucket, nbytes)
        assert [p.name for piece in pieces for p in piece.params] == [p.name for p in bucket.params]
        assert frozenset().union(*(piece.unused for piece in pieces)) == unused
        assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [last]
        for piece in pieces:
            assert piece.index == 3
            assert piece.storage.numel() == piece.layout.numel == sum(p.numel for p in piece.params)
            assert all(piece.view(p).data_ptr() == bucket.view(p.name).data_ptr() for p in piece.params)
        if len(pieces) > 1:  # at most half of its last parameter too large, or one parameter
            wanted = bucket.layout.numel / round(4 * bucket.layout.numel / (nbytes // 4 * 4))
            assert all(
                piece.layout.numel <= wanted + max(p.numel for p in piece.params) / 2
                or sum(p.numel > 0 for p in piece.params) == 1
                for piece in pieces
            )


def test_buckets_with_gaps_or_without_dense_gradients_stay_whole() -> None:
    bucket = Bucket.from_tensors({name: torch.randn(8) for name in "abc"})
    assert len(pieces_of(bucket, 32)) == 3
    assert pieces_of(bucket.select("ac"), 32) == (bucket.select("ac"),)
    params = [ParamLayout("a", (8,), (1,), 0), ParamLayout("b", (8,), (1,), 8, "complex")]
    assert len(pieces_of(Bucket(BucketLayout(params, 16, torch.float32), torch.zeros(16)), 32)) == 1


def test_transposed_parameter_is_seen_with_its_numbers_in_place() -> None:
    weight = torch.randn(4, 6).t()  # logical (6, 4), memory (4, 6)
    layout = BucketLayout([ParamLayout("w", (6, 4), tuple(weight.stride()), 0)], 24, torch.float32)
    bucket = Bucket(layout, weight.t().reshape(-1).clone())
    assert torch.equal(bucket.view("w"), weight)
    assert bucket.params[0].matrix_shape == (4, 6)
    assert torch.equal(bucket.matrix("w"), weight.t())


def test_layouts_are_equal_by_value_and_usable_as_keys() -> None:
    a = BucketLayout.of_shapes({"w": (2, 3), "b": (3,)})
    b = BucketLayout.of_shapes({"w": (2, 3), "b": (3,)})
    assert a == b
    assert hash(a) == hash(b)
    assert a != BucketLayout.of_shapes({"w": (3, 2), "b": (3,)})
    assert a != BucketLayout.of_shapes({"w": (2, 3), "b": (3,)}, device="meta")
    assert a.select(frozenset({"b"})).segments() == ((6, 3),)


def test_a_cached_view_belongs_to_one_bucket_and_its_maker() -> None:
    bucket = Bucket.from_tensors({"w": torch.ones(2), "b": torch.ones(3)})
    assert bucket.select(["b"]) is bucket.select({"b"})
    assert bucket.cached("runs", lambda: "mine") == "mine"
    assert bucket.segments()[0].numel() == 5
    other = dataclasses.replace(bucket, storage=torch.zeros(5))
    assert other.buffer.count_nonzero() == 0
    assert other.cached("runs", lambda: "another") == "another"
    assert bucket.cached("runs", lambda: "made of something else", of=other) == "made of something else"


def test_errors_name_the_problem() -> None:
    bucket = Bucket.from_tensors({"w": torch.ones(2)})
    with pytest.raises(KeyError, match=r"no parameter 'v'.*'w'"):
        bucket.view("v")
    with pytest.raises(ValueError, match="holds 2 elements, the new buffer 3"):
        bucket.buffer = torch.ones(3)
    with pytest.raises(ValueError, match="dtype and device"):
        Bucket.from_tensors({"a": torch.ones(1), "b": torch.ones(1, dtype=torch.float64)})
    assert contiguous_stride(()) == ()


class Counting:
    made = 0

    @per_layout
    def sizes(self, layout: BucketLayout, factor: int = 1) -> list[int]:
        type(self).made += 1
        return [factor * p.numel for p in layout.params]


def test_per_layout_runs_once_for_each_object() -> None:
    a, b = (BucketLayout.of_shapes({"w": shape}) for shape in ((2, 3), (4,)))
    one, other = Counting(), Counting()
    first = one.sizes(a, factor=2)
    assert one.sizes(BucketLayout.of_shapes({"w": (2, 3)})) is first
    assert (first, one.sizes(b), other.sizes(a), Counting.made) == ([12], [4], [6], 3)
    for again in (copy.copy(one), pickle.loads(pickle.dumps(one))):
        assert again.sizes(a) == [6]


def test_per_layout_values_are_freed_with_their_object() -> None:
    one = Counting()
    one.sizes(BucketLayout.of_shapes({"w": (2, 3)}))
    seen = weakref.ref(one)
    del one
    gc.collect()
    assert seen() is None


def test_a_view_of_a_sparse_bucket_is_its_storage() -> None:
    rows = torch.sparse_coo_tensor(torch.tensor([[1, 4]]), torch.ones(2, 3), (5, 3))
    layout = BucketLayout([ParamLayout.of("embedding", torch.empty(5, 3), 0, "sparse")], 15, torch.float32)
    bucket = Bucket(layout, rows)
    assert [(p.name, view is rows) for p, view in bucket.views()] == [("embedding", True)]
