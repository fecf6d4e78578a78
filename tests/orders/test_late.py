"""Late collectives have torch's results, overtake each other, and show each access to memory in flight."""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commhooks.simulate import SimulatedGroup, together
from commhooks.testing import spawn
from tests.orders.late import LateTransport, late_collectives

pytestmark = pytest.mark.timeout(120)

SEED = 7
SLOW = 127950  # its first three delays are between a quarter and a half of the longest, on both ranks


class Never(random.Random):
    """Chance that completes no work early."""

    def randint(self, a: int, b: int) -> int:
        return a


def numbers(rank: int, count: int = 12) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 100.0 * rank


def every_collective(rank: int, world: int) -> dict[str, list[torch.Tensor]]:
    """Return the results of each collective that is delayed, by the name of its function."""
    found: dict[str, list[torch.Tensor]] = {}
    works = []

    def start(
        name: str, collective: Callable[..., Any], *args: Any, outputs: list[torch.Tensor], **kwargs: Any
    ) -> None:
        found[name] = outputs
        works.append(collective(*args, async_op=True, **kwargs))

    one, source = numbers(rank), numbers(rank)
    start("all_reduce", dist.all_reduce, one, outputs=[one])
    start("broadcast", dist.broadcast, source, outputs=[source], src=1)
    row, rows = numbers(rank).to(torch.int64), [torch.zeros(12, dtype=torch.int64) for _ in range(world)]
    start("all_gather", dist.all_gather, rows, row, outputs=rows)
    together = torch.zeros(12 * world)
    start("all_gather_into_tensor", dist.all_gather_into_tensor, together, numbers(rank), outputs=[together])
    inside = torch.zeros(12 * world)
    mine = inside[12 * rank : 12 * rank + 12].copy_(numbers(rank))  # FSDP2 gathers in place
    start("all_gather_into_tensor in place", dist.all_gather_into_tensor, inside, mine, outputs=[inside])
    exchanged = torch.zeros(12)
    start("all_to_all_single", dist.all_to_all_single, exchanged, numbers(rank), outputs=[exchanged])
    part = torch.zeros(12 // world)
    start("reduce_scatter_tensor", dist.reduce_scatter_tensor, part, numbers(rank), outputs=[part])
    sparse = torch.sparse_coo_tensor([[rank]], [1.0 + rank], (world,)).coalesce()
    start("sparse all_reduce", dist.all_reduce, sparse, outputs=[sparse])
    for work in reversed(works):
        work.wait()
    return {name: [t.to_dense().clone() for t in outputs] for name, outputs in found.items()}


def compared(rank: int, world: int) -> tuple[list[str], int, int, list[str]]:
    plain = every_collective(rank, world)
    with late_collectives(SEED) as late:
        for _ in range(5):
            found = every_collective(rank, world)
    wrong = [name for name, outputs in plain.items() if not all(map(torch.equal, outputs, found[name]))]
    assert dist.all_reduce.__name__ == "all_reduce"
    return wrong, late.started, late.overtaken, late.violations


@pytest.mark.gloo
def test_every_collective_has_torchs_result_in_another_order() -> None:
    for wrong, started, overtaken, violations in spawn(compared, 2):
        assert wrong == [] and violations == []
        assert started == 5 * 8 and overtaken > 0


def touched(rank: int, world: int) -> dict[str, Any]:
    """Read a result, write to an output and change an input, each while its collective is in flight."""
    with late_collectives(SLOW, longest=2.0) as late:
        result, output, given = numbers(rank), torch.zeros(12), numbers(rank)
        reduced = dist.all_reduce(result, async_op=True)
        early, completed = result.clone(), reduced.is_completed()
        exchanged = dist.all_to_all_single(output, given, async_op=True)
        arrived: list[torch.Tensor] = []
        exchanged.get_future().add_done_callback(lambda future: arrived.append(future.value()[0].clone()))
        output.fill_(1.0)
        given.add_(1.0)
        codes = torch.zeros(6 * world, dtype=torch.uint8)
        gathered = dist.all_gather_into_tensor(codes, torch.ones(6, dtype=torch.uint8), async_op=True)
        noise = codes.clone()
        for work in (gathered, exchanged, reduced):
            work.wait()
    return {
        "hidden": bool(early.isnan().all()) and not completed and len(noise.unique()) > 2,
        "right": result.tolist() == (numbers(0) + numbers(1)).tolist() and codes.tolist() == [1] * 12,
        "future": len(arrived) == 1 and torch.equal(arrived[0], output),
        "violations": late.violations,
    }


@pytest.mark.gloo
def test_results_are_hidden_and_accesses_in_flight_are_seen() -> None:
    for found in spawn(touched, 2):
        assert found.pop("violations") == [
            "an input of all_to_all_single 1 of 12 numbers changed in flight",
            "the output of all_to_all_single 1 of 12 numbers was written to in flight",
        ]
        assert found == {"hidden": True, "right": True, "future": True}


def lost(rank: int, world: int) -> str:
    if rank == 1:
        time.sleep(3.0)
        dist.destroy_process_group()
        return ""
    with late_collectives(SEED):
        work = dist.all_reduce(numbers(rank), async_op=True)
        with pytest.raises(RuntimeError) as raised:
            work.wait()
        with pytest.raises(RuntimeError):
            work.get_future().value()
    dist.destroy_process_group()
    return str(raised.value)


@pytest.mark.gloo
def test_an_error_of_the_network_is_raised() -> None:
    assert "imed out" in spawn(lost, 2, group_timeout=1.0)[0]


def simulated(seed: int) -> list[tuple[list[list[float]], int, list[str]]]:
    """Return the results, the number of works that overtook others, and the violations of every simulated rank."""
    group = SimulatedGroup(2)

    def body(rank: int) -> tuple[list[list[float]], int, list[str]]:
        transport = LateTransport(group, rank, seed=seed)
        tensors = [torch.full((2,), float(rank + index)) for index in range(6)]
        works = [transport.all_reduce(tensor, "sum") for tensor in tensors]
        for work in works:
            work.wait(None)
        return [tensor.tolist() for tensor in tensors], transport.late.overtaken, transport.late.violations

    return together(group, body)


def test_simulated_works_overtake_each_other() -> None:
    overtaken = 0
    for seed in range(5):
        for tensors, count, violations in simulated(seed):
            assert tensors == [[2.0 * index + 1.0] * 2 for index in range(6)]
            assert violations == []
            overtaken += count
    assert overtaken > 0


def test_a_simulated_rank_that_writes_to_memory_in_flight_is_seen() -> None:
    group = SimulatedGroup(1)
    transport, output, given = LateTransport(group, 0), torch.zeros(2), torch.ones(2)

    def body(rank: int) -> None:
        transport.late.random = Never()  # completes nothing before the wait
        work = transport.all_gather(output, given)
        output.fill_(5.0)
        given.zero_()
        work.wait(None)

    together(group, body)
    assert output.tolist() == [1.0, 1.0]
    assert [text.split(" of ")[0] for text in transport.late.violations] == ["an input", "the output"]
