"""The flat sum over simulated ranks: factors, fp32 accumulation, bytes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ch_core import SimulatedRank, simulate
from ch_fsdp.flat_sum import FlatSum, fits_flat, flat_bucket, flat_version
from ch_powersgd import PowerSGD
from ch_wrappers import WireCast
from commhooks import HookNotSupportedError, Plain, Reduction

BF16, BF16_FP32 = WireCast(Plain(), "bf16"), WireCast(Plain(), "bf16", accumulate="fp32")


def grads(world: int, numel: int) -> torch.Tensor:
    """Return ``(world, numel)`` gradients in fp32, a common part plus noise."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(numel, generator=generator) + torch.randn(world, numel, generator=generator)


def reduce(
    reduction: Reduction, rows: torch.Tensor, *, scatter: bool = True, **factors: Any
) -> tuple[torch.Tensor, Any]:
    """Return all ranks' results side by side, and rank 0's counters."""
    world, numel = rows.shape

    def body(rank: SimulatedRank) -> tuple[torch.Tensor, Any]:
        torch.manual_seed(rank.rank)
        flat, whole = flat_version(reduction, scatter=scatter)
        for name, value in factors.items():
            setattr(flat, name, value)
        flat.output = torch.empty(numel // world) if scatter else None
        engine = rank.engine(whole)
        mine = rows[rank.rank].clone()
        engine.run(flat_bucket("flat", mine))
        assert engine.finish() is None
        return (flat.output if scatter else mine), engine.counters

    ranks = simulate(world, body)
    result = torch.cat([r for r, _ in ranks]) if scatter else torch.stack([r for r, _ in ranks])
    return result, ranks[0][1]


def error(reduction: Reduction, world: int) -> float:
    rows = grads(world, 4096)
    exact = rows.double().mean(0)
    result, _ = reduce(reduction, rows, op="mean")
    return float((result.double() - exact).norm() / exact.norm())


def test_error_grows_with_the_world_only_without_fp32_accumulation() -> None:
    plain = [error(BF16, world) for world in (2, 8, 64)]
    accumulated = [error(BF16_FP32, world) for world in (2, 8, 64)]
    assert plain[0] < plain[1] < plain[2]
    assert plain[2] > 3 * plain[0]
    assert accumulated[0] >= accumulated[1] >= accumulated[2]
    assert accumulated[2] < plain[2] / 10


@settings(max_examples=20, deadline=None)
@given(world=st.sampled_from([1, 2, 3, 5]), per_rank=st.integers(1, 7), scatter=st.booleans(), wide=st.booleans())
def test_factors_and_bytes(world: int, per_rank: int, scatter: bool, wide: bool) -> None:
    """The result is ``premultiply * sum / divide``, whole or scattered. The payload is elements times bytes of the wire
    dtype.
    """
    rows = torch.arange(world * world * per_rank, dtype=torch.float32).view(world, -1).remainder(8.0)
    reduction = Plain() if wide else BF16
    result, counters = reduce(reduction, rows, scatter=scatter, premultiply=0.5, divide=4.0)
    expected = rows.sum(0) / 8.0
    assert torch.equal(result, expected if scatter else expected.expand(world, -1))
    assert counters.traffic.payload_bytes == rows.shape[1] * (4 if wide else 2)
    assert counters.traffic.rounds == 1
    assert counters.compressed_steps == (not wide)


def test_accumulated_reduce_scatter_sends_16_bits() -> None:
    rows = grads(4, 64)
    assert reduce(BF16_FP32, rows)[1].traffic == reduce(BF16, rows)[1].traffic


def test_only_plain_averaging_and_its_casts_fit() -> None:
    assert fits_flat(Plain())
    assert fits_flat(BF16)
    for reduction in (PowerSGD(), WireCast(PowerSGD(), "bf16"), FlatSum(scatter=True)):
        assert not fits_flat(reduction)
    with pytest.raises(HookNotSupportedError, match="shape of each parameter"):
        flat_version(PowerSGD(), scatter=True)
