"""The transport runs an all-reduce by ring or direct exchange, in one message or two."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ch_core import AllReduce, Bucket, Plain, Reduction, SimulatedRank, simulate
from ch_core.engine.schedule import TUNED, CpuTuning
from ch_wrappers import WireCast


class Twice(Reduction):
    """Averages in two rounds, so that the engine may choose the order of addition."""

    name = "twice"
    lossy = True

    def run(self, bucket: Bucket, ctx: object) -> Iterator[Any]:
        half = bucket.buffer.numel() // 2
        yield AllReduce(bucket.buffer[:half])
        yield AllReduce(bucket.buffer[half:])


def averaged(
    reduction: Reduction, gradients: torch.Tensor, *, free: bool, tuning: CpuTuning = TUNED
) -> tuple[list[torch.Tensor], list[tuple[str, int]]]:
    """Return every rank's average of one gradient, and rank 0's messages as (kind, elements)."""
    log: list[tuple[str, int]] = []

    def body(rank: SimulatedRank) -> torch.Tensor:
        rank.transport.free = free
        post = rank.transport._post

        def record(kind: str, op: str, *tensors: torch.Tensor) -> Any:
            if rank.rank == 0:
                log.append((kind, tensors[-1].numel()))
            return post(kind, op, *tensors)

        rank.transport._post = record  # type: ignore[method-assign]
        engine = rank.engine(reduction, tuning=tuning)
        bucket = Bucket.from_tensors({"w": gradients[rank.rank].clone()})
        engine.submit(bucket)
        assert engine.finish() is None
        return bucket.buffer

    return simulate(len(gradients), body), log


@settings(max_examples=30, deadline=None)
@given(
    world=st.integers(2, 6),
    numel=st.integers(2, 300),
    wire=st.sampled_from([None, "bf16", "fp16"]),
    seed=st.integers(0, 1000),
)
def test_direct_exchange_gives_the_same_average_on_all_ranks(world: int, numel: int, wire: Any, seed: int) -> None:
    gradients = torch.randn(world, numel, generator=torch.Generator().manual_seed(seed))
    reduction = Twice() if wire is None else WireCast(Twice(), wire)
    ring, by_ring = averaged(reduction, gradients, free=False)
    swapped, by_swap = averaged(reduction, gradients, free=True)
    assert all(torch.equal(swapped[0], other) for other in swapped)
    if world == 2:
        assert torch.equal(ring[0], swapped[0])
    tolerance = 1e-6 if wire is None else 2e-2
    torch.testing.assert_close(swapped[0], gradients.mean(0), rtol=tolerance, atol=tolerance)
    assert {kind for kind, _ in by_ring} == {"all_reduce"}
    assert {kind for kind, _ in by_swap} == {"all_to_all"}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_an_average_that_ends_at_once_is_added_up_as_ddp_does(world: int) -> None:
    """From three ranks on, the order of addition shows. The engine then exchanges directly only rounded casts and the
    status.
    """
    gradients = torch.randn(world, 50)
    ring, _ = averaged(Plain(), gradients, free=False)
    got, messages = averaged(Plain(), gradients, free=True)
    assert torch.equal(got[0], ring[0])
    kinds = [kind for kind, _ in messages]
    assert kinds == (["all_to_all"] * 2 if world == 2 else ["all_reduce", "all_to_all"])
    _, cast = averaged(WireCast(Plain(), "bf16"), gradients, free=True)
    assert [kind for kind, _ in cast] == ["all_to_all"] * 2


def test_numbers_are_added_in_the_order_of_the_ranks() -> None:
    gradients = torch.tensor([[3e8], [3.0], [-3e8]]).repeat(1, 2)  # 1e8 + 1 - 1e8 in fp32
    got, _ = averaged(Twice(), gradients, free=True)
    assert got[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("numel", [100, int(TUNED.halved_from) // 2])
def test_switched_off_every_message_is_one_all_reduce_and_the_average_the_same(numel: int) -> None:
    gradients = torch.randn(2, numel)
    tuned, by_choice = averaged(Twice(), gradients, free=True)
    plain, messages = averaged(Twice(), gradients, free=True, tuning=CpuTuning.off())
    assert [kind for kind, _ in messages] == ["all_reduce"] * 3
    assert by_choice != messages
    assert torch.equal(plain[0], tuned[0])


def test_a_direct_exchange_counts_its_sent_bytes() -> None:
    def body(rank: SimulatedRank) -> dict[str, float]:
        rank.transport.free = True
        engine = rank.engine(WireCast(Plain(), "bf16"))
        engine.submit(Bucket.from_tensors({"w": torch.ones(18)}))
        assert engine.finish() is None
        return engine.counters.as_dict()

    stats = simulate(4, body)[0]
    assert stats["payload_bytes"] == 2 * 18
    assert stats["wire_bytes"] == (2 * 18 + 4 * (4 + 1)) * 3  # three others get all of it, and the status
