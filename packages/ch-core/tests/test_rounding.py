"""Rounding to 16 bits handles the edges of the range."""

import math

import pytest
import torch

import commhooks
from ch_core import Bucket, SimulatedRank, encode, simulate

DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaling_comes_before_the_cast(dtype: torch.dtype) -> None:
    source = torch.full((3,), torch.finfo(dtype).max * (2.0 if dtype == torch.float16 else 1.0))
    found = torch.empty_like(source, dtype=dtype)
    encode(source, found, 0.25)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("accumulate", ["wire", "fp32"])
def test_an_overflow_on_one_rank_arrives_as_infinity(accumulate: str) -> None:
    def body(rank: SimulatedRank) -> list[float]:
        numbers = torch.tensor([3e6, -3e6, 1.0, 2e5, -2e5])
        engine = rank.engine(commhooks.create(f"fp16_compress(accumulate='{accumulate}')").built)
        bucket = Bucket.from_tensors({"w": numbers if rank.rank == 0 else torch.zeros(5)})
        engine.submit(bucket)
        assert engine.finish() is None
        return bucket.buffer.tolist()

    for found in simulate(2, body):
        assert found == [math.inf, -math.inf, 0.5, math.inf, -math.inf]
