"""Rounding to 16 bits keeps the expectation and handles the edges of the range."""

import math

import pytest
import torch

import commhooks
from ch_core import Bucket, SimulatedRank, Wire, simulate
from ch_core.rounding import encode, stochastic_round

DTYPES = (torch.bfloat16, torch.float16)


def edges(dtype: torch.dtype) -> torch.Tensor:
    """Return fp32 numbers that are exact in ``dtype``, numbers beyond its range, infinities and NaN of several
    payloads.
    """
    info = torch.finfo(dtype)
    beyond = [info.max * 1.5, info.max * 4] if dtype == torch.float16 else [3.4028234663852886e38]
    exact = [0.0, -0.0, 1.0, info.max, info.tiny, info.smallest_normal / 2, info.tiny * 2.0**-7]
    numbers = torch.tensor([*exact, *beyond, math.inf], dtype=torch.float32)
    nans = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    return torch.cat([numbers, -numbers, nans])


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_numbers_and_numbers_out_of_range_round_as_to_the_nearest(dtype: torch.dtype) -> None:
    source = edges(dtype)
    nearest = source.to(dtype)
    assert nearest.isinf().sum() == (6 if dtype == torch.float16 else 4)
    for _ in range(50):
        found = torch.empty_like(nearest)
        stochastic_round(source, found)
        torch.testing.assert_close(found, nearest, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.signbit()[:-4], nearest.signbit()[:-4])  # also signs of zeros


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [1.0001, -1.0001, 3e-8, -3e-8, 60001.0, -60001.0])
def test_the_expectation_is_the_source(dtype: torch.dtype, number: float) -> None:
    torch.manual_seed(0)
    source = torch.full((200_000,), number)
    found = torch.empty_like(source, dtype=dtype)
    stochastic_round(source, found)
    values = found.float().unique().tolist()
    assert len(values) == 2 and values[0] <= number <= values[1]
    assert abs(found.double().mean().item() - number) < 0.01 * (values[1] - values[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaling_comes_before_the_cast(dtype: torch.dtype) -> None:
    source = torch.full((3,), torch.finfo(dtype).max * (2.0 if dtype == torch.float16 else 1.0))
    for rounding in ("nearest", "stochastic"):
        found = torch.empty_like(source, dtype=dtype)
        encode(source, found, 0.25, Wire(dtype, rounding))  # type: ignore[arg-type]
        assert torch.isfinite(found).all()


@pytest.mark.parametrize("accumulate", ["wire", "fp32"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_an_overflow_on_one_rank_arrives_as_infinity(rounding: str, accumulate: str) -> None:
    def body(rank: SimulatedRank) -> list[float]:
        numbers = torch.tensor([3e6, -3e6, 1.0, 2e5, -2e5])
        engine = rank.engine(commhooks.create(f"fp16_compress(rounding='{rounding}', accumulate='{accumulate}')").built)
        bucket = Bucket.from_tensors({"w": numbers if rank.rank == 0 else torch.zeros(5)})
        engine.submit(bucket)
        assert engine.finish() is None
        return bucket.buffer.tolist()

    for found in simulate(2, body):
        assert found == [math.inf, -math.inf, 0.5, math.inf, -math.inf]
