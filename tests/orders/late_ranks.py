"""What the ranks of test_late do, in a module that a started process can import."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.orders.late import late_collectives

SEED = 7
SLOW = 127950  # its first three delays are between a quarter and a half of the longest, on both ranks


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
