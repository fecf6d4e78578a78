"""A process is killed. The others continue over a new group, and a new process joins them."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ch_core import checksum
from ch_outer import FixedRanks, OuterOptimizer, Schedule
from ch_testing import spawn
from commhooks import AllReduce, Bucket, HookTimeoutError, Reduction, StepContext, TransportError

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(110)]
EVERY, VICTIM = 3, 1


class InTwoStages(Reduction):
    """Computes the mean in two messages, with residuals. The victim dies between them."""

    name, lossy = "in_two_stages", True
    fields = {"residual": "local", "seen": "shared"}
    dies = False

    def run(self, bucket: Bucket, ctx: StepContext) -> Any:
        for p, view in bucket.views():
            before = ctx.read(p.name, "residual")
            if before is not None:
                view.add_(before)
            kept = view.to(torch.bfloat16).to(view.dtype)
            torch.sub(view, kept, out=ctx.write(p.name, "residual", p.shape, device=bucket.device))
            view.copy_(kept)
            ctx.write(p.name, "seen", (1,), device=bucket.device).fill_(float(ctx.step))
        half = bucket.buffer.numel() // 2
        yield AllReduce(bucket.buffer[:half])
        if self.dies and not bucket.buffer.is_meta:
            die()
        yield AllReduce(bucket.buffer[half:])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def step(model: nn.Module, optimizer: OuterOptimizer, rank: int) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(1000 * rank + optimizer.count)
    model(torch.randn(8, 6, generator=generator)).sin().square().mean().backward()
    optimizer.step()


def shared(optimizer: OuterOptimizer) -> list[str]:
    """Return the digests of start, momentum, averaged buffers and shared state."""
    state = optimizer.state_dict()
    momentum = [one["momentum_buffer"] for one in state["outer"]["state"].values()]
    starts = [tensor for fragment in state["fragments"] for tensor in fragment["start"].values()]
    seen = [row["seen"] for fragment in state["fragments"] for row in fragment["reducer"]["entries"].values()]
    held = [*momentum, *starts, *seen, *state["buffers"]["shared"].values()]
    return [str((optimizer.count, optimizer.landed)), *map(checksum, held)]


def over(folder: str, name: str, rank: int, world: int) -> dist.ProcessGroup:
    """Replace the default group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.FileStore(str(Path(folder, name)), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=40))
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def worker(rank: int, world: int, place: str, folder: str) -> tuple[int, list[int], list[list[str]]]:
    model, reduction = make(), InTwoStages()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = OuterOptimizer(inner, model, Schedule(every=EVERY), exchange=reduction, ranks=FixedRanks(timeout=8.0))
    losses, found, landed = 0, [], []
    while optimizer.count < 4 * EVERY:
        at = optimizer.count
        victim = rank == VICTIM and losses == 0
        if victim and ((place == "inner step" and at == EVERY + 1) or (place == "before" and at == 2 * EVERY - 1)):
            die()
        reduction.dies = victim and place == "inside" and at == 2 * EVERY - 1
        try:
            step(model, optimizer, rank)
        except (TransportError, HookTimeoutError):
            losses += 1
            landed.append(optimizer.landed)
            survivors = [r for r in range(world) if r != VICTIM]
            optimizer.move(over(folder, "survivors", survivors.index(rank), len(survivors)))
            found.append(shared(optimizer))
        if victim and place == "after" and optimizer.count == 2 * EVERY:
            die()
    found.append(shared(optimizer))
    # A new process with other weights replaces the dead one, as the last event of this test.
    if world == 2:
        pass
    elif rank == 0:
        group = over(folder, "with newcomer", 0, 2)
        optimizer.move(group)
        for _ in range(EVERY):
            step(model, optimizer, rank)
        found.append(shared(optimizer))
    elif rank == 2:
        dist.destroy_process_group()
        other = make(9)
        over(folder, f"alone {rank}", 0, 1)
        late = OuterOptimizer(
            torch.optim.AdamW(other.parameters(), lr=0.01),
            other,
            Schedule(every=EVERY),
            exchange=InTwoStages(),
            ranks=FixedRanks(timeout=8.0),
        )
        late.move(over(folder, "with newcomer", 1, 2))
        for _ in range(EVERY):
            step(other, late, 7)
        found.append(shared(late))
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses, landed, found


@pytest.mark.cpu("over NCCL a lost rank ends the process: its watchdog, not timeout=, applies")
@pytest.mark.parametrize(
    ("place", "rounds", "world"),
    [
        ("inside", 1, 3),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("inner step", 1, 3), ("before", 1, 3), ("after", 2, 3), ("inside", 1, 2), ("inside", 1, 4))
        ),
    ],
)
def test_survivors_lose_one_round_at_most_and_have_the_same_start_and_momentum(
    place: str, rounds: int, world: int, tmp_path: Path
) -> None:
    results = spawn(worker, world, place, str(tmp_path), expect_exit={VICTIM: -signal.SIGKILL}, timeout=100)
    survivors = [result for rank, result in enumerate(results) if rank != VICTIM]
    for losses, landed, _ in survivors:
        assert losses == 1
        assert landed == [rounds]  # of two or three due exchanges
    for found in zip(
        *(found for _, _, found in survivors), strict=False
    ):  # after the loss, at the end, and after the join
        assert all(one == found[0] for one in found)
    states = survivors[0][2]
    assert len(states) == (2 if world == 2 else 3)
    assert len({tuple(state) for state in states}) == len(states)


def late_peer(rank: int, world: int) -> list[float]:
    """Rank 2 sends its part of a lost round when the others, without it, have filled their memory for another round.

    Returns:
        The least and greatest move of the start in that round.
    """
    store = dist.distributed_c10d._get_default_store()
    model = nn.Linear(2000, 1000, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = OuterOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model,
        Schedule(every=2, overlap=1, mix="carry"),
        outer=lambda params: torch.optim.SGD(params, lr=1.0),
        ranks=FixedRanks(timeout=60.0 if rank == 2 else 1.5),
    )

    def inner() -> None:
        model.weight.grad = torch.full_like(model.weight, (1.0, 3.0, 2.0**10)[rank])
        optimizer.step()

    inner()
    if rank == 2:
        store.wait(["filled 0", "filled 1"])
        inner()
        inner()
        store.set("sent", "")
        return [4.0, 4.0]
    inner()
    with pytest.raises(HookTimeoutError):
        inner()
    optimizer.move(dist.new_group([0, 1], use_local_synchronization=True))
    fragment = optimizer.rounds.shared.fragments[0]
    filling, exchanges = fragment.fill, list[int]()

    def fill() -> Exception | None:
        error = filling()
        exchanges.append(optimizer.count)
        if len(exchanges) == 2:  # the first exchange also makes the moves of the lost one
            store.set(f"filled {rank}", "")
            store.wait(["sent"])
            time.sleep(0.3)  # this rank's part of the lost message ends, too
        return error

    fragment.fill = fill  # type: ignore[method-assign]
    starts = []
    while len(exchanges) < 2 or optimizer.under_way:
        starts.append(fragment.starts["weight"].clone())
        inner()
    moved = starts[-1] - fragment.starts["weight"]
    return [moved.min().item(), moved.max().item()]


@pytest.mark.cpu("over NCCL a lost rank ends the process: its watchdog, not timeout=, applies")
def test_a_late_peer_writes_nothing_into_a_round_of_the_survivors() -> None:
    assert spawn(late_peer, 3) == [[4.0, 4.0]] * 3
