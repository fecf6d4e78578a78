"""Kernel launches per step, counted on meta tensors. Their number must not grow unnoticed."""

import pytest
from programs.cost.kernel_launches import DEFAULT_CAP, ONE_BUCKET, cut, operations

from ch_bench.shapes import gpt_shapes

SHAPES = gpt_shapes(12, 768, 50257, 1024)
MOST = {  # operations of GPT-2 small in 17 buckets and in one, counted once
    "allreduce": (0, 0),
    "bf16_compress": (0, 0),
    "powersgd(rank=1)": (766, 267),
    "powersgd(rank=4)": (1112, 293),
    "batched_powersgd(rank=4)": (1243, 491),
    "error_feedback(bf16_compress)": (68, 4),
}


def test_buckets_are_those_of_ddp() -> None:
    buckets = cut(SHAPES, DEFAULT_CAP)
    assert len(buckets) == 17
    assert [name for bucket in buckets for name in bucket] == list(reversed(SHAPES))
    assert len(cut(SHAPES, ONE_BUCKET)) == 1


@pytest.mark.parametrize("hook", MOST)
def test_no_hook_starts_more_than_it_did(hook: str) -> None:
    found = tuple(operations(hook, cut(SHAPES, cap)).total() for cap in (DEFAULT_CAP, ONE_BUCKET))
    assert found <= MOST[hook], operations(hook, cut(SHAPES, ONE_BUCKET))
    assert all(a <= b for a, b in zip(found, MOST[hook], strict=True))
