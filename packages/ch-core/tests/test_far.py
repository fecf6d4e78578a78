"""Ranks that are far apart: receives posted ahead, and a status that travels with the last messages."""

import gc
import os
import random
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ch_core import (
    AllGather,
    Bucket,
    CpuTuning,
    Engine,
    FarTransport,
    HookState,
    HookTimeoutError,
    Link,
    Plain,
    RankMismatchError,
    Reduction,
    RemoteHookError,
    SimulatedRank,
    Stages,
    StepContext,
    TransportError,
    simulate,
)
from ch_core.transport.base import Work
from ch_core.transport.far import PostedReceives
from ch_testing import spawn
from tests.seed import SEED

FAR = Link.parse("far")

# -- the transport


def tensor_of(rank: int, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    made = torch.randint(-9, 9, (numel,), generator=generator)
    return (made / 3).to(dtype) if dtype.is_floating_point or dtype.is_complex else made.abs().to(dtype)


def in_rank_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def collectives(rank: int, world: int, seed: int) -> int:
    """Start several collectives at once, some of equal length, and compare each with its result."""
    transport, rng = FarTransport(None, FAR), random.Random(seed)
    number = checked = 0
    for _ in range(6):
        started = []
        for _ in range(rng.randrange(1, 6)):
            kind = rng.choice(("all_gather", "all_to_all", "reduce_scatter", "all_reduce"))
            sums = kind in ("reduce_scatter", "all_reduce")
            dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]
            dtype = rng.choice(dtypes if sums else [*dtypes, torch.uint8, torch.int64])
            numel = rng.choice((1, 2, 3, 33, 1001))
            every = [
                tensor_of(r, number, numel * (world if kind in ("all_to_all", "reduce_scatter") else 1), dtype)
                for r in range(world)
            ]
            mine = every[rank].clone()
            if kind == "all_gather":
                output, wanted = torch.empty(numel * world, dtype=dtype), torch.cat(every)
                work = transport.all_gather(output, mine)
            elif kind == "all_to_all":
                output, wanted = (
                    torch.empty(numel * world, dtype=dtype),
                    torch.cat([one.chunk(world)[rank] for one in every]),
                )
                work = transport.all_to_all(output, mine)
            elif kind == "reduce_scatter":
                output = torch.empty(numel, dtype=dtype)
                wanted = in_rank_order([one.chunk(world)[rank] for one in every])
                work = transport.reduce_scatter(output, mine, "sum")
            else:
                output, wanted = mine, in_rank_order(every)
                work = transport.all_reduce(output, "sum")
            started.append((kind, work, output, wanted))
            number += 1
        dropped = rng.randrange(8)  # nobody waits for it
        for index, (kind, work, output, wanted) in enumerate(started):
            if index != dropped or kind == "all_reduce":
                work.wait(30.0)
                assert torch.equal(output, wanted), (kind, output.dtype, output.numel(), number)
                checked += 1
    return checked


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_collectives_in_flight_together_have_the_sums_of_rank_order(world: int) -> None:
    assert min(spawn(collectives, world, SEED, timeout=100)) > 6


def second_halves(rank: int, world: int) -> list[str]:
    transport = FarTransport(None, FAR)
    works = [transport.all_reduce(torch.ones(100 * n), "sum") for n in (1, 2, 3)]
    started: list[str] = []
    exchange = PostedReceives.exchange
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            PostedReceives, "exchange", lambda self, what, *rest: started.append(what) or exchange(self, what, *rest)
        )
        works[0].wait(30.0)
    for work in works[1:]:
        work.wait(30.0)
    return started


@pytest.mark.gloo
def test_all_reduces_in_flight_together_take_two_halves_of_a_round_trip() -> None:
    """The first wait starts the second half of all of them."""
    assert spawn(second_halves, 3, timeout=100) == [["all-gather"] * 3] * 3


def drops_exchanges(rank: int, world: int) -> list[int]:
    transport, numbers = FarTransport(None, FAR), torch.ones(300_000)

    def start() -> Work:
        return transport.all_gather(torch.empty(world * numbers.numel()), numbers)

    def messages() -> int:
        gc.collect()
        return sum(type(one) is torch.Tensor and one.shape == (numbers.nbytes,) for one in gc.get_objects())

    start().wait(30.0)
    found = [messages()]
    for _ in range(5):
        start()
    found.append(messages())
    start().wait(30.0)
    return [*found, messages()]


@pytest.mark.gloo
def test_an_exchange_ends_the_memory_of_dropped_ones_before_it_and_the_first_of_a_length_its_own() -> None:
    assert spawn(drops_exchanges, 2, timeout=100) == [[0, 10, 1]] * 2  # both ways of five, and the next receive


def drops_and_destroys(rank: int, world: int) -> int:
    for start in (FarTransport.reduce_scatter, FarTransport.all_reduce):
        transport = FarTransport(dist.new_group(), FAR)
        half = [torch.empty(50)] if start is FarTransport.reduce_scatter else []
        start(transport, *half, torch.ones(100), "sum")  # nobody waits for it
        dist.destroy_process_group(transport.group)
    del transport
    gc.collect()
    return sum(type(one) is PostedReceives for one in gc.get_objects())


@pytest.mark.gloo
def test_a_dropped_exchange_keeps_no_destroyed_group() -> None:
    assert spawn(drops_and_destroys, 2, timeout=100) == [0, 0]


def ends_first(rank: int, world: int) -> list[float]:
    transport, gathered = FarTransport(None, FAR), torch.empty(world)
    works = [transport.all_gather(gathered, torch.full((1,), float(rank))) for _ in range(3)]
    if rank == 1:
        time.sleep(1.0)  # rank 0 has ended
    for work in works:
        work.wait(20.0)
    dist.destroy_process_group()  # without the barrier at the end of a test
    return gathered.tolist()


@pytest.mark.gloo
def test_a_rank_that_has_ended_breaks_no_exchange_that_has_arrived() -> None:
    """The next receive from it cannot be posted."""
    assert spawn(ends_first, 2, timeout=100) == [[0.0, 1.0]] * 2


def lose(rank: int, world: int, frozen: bool) -> str:
    transport, ones = FarTransport(None, FAR), torch.ones(100)
    gathered = torch.empty(100 * world)
    for _ in range(2):
        transport.all_gather(gathered, ones).wait(10.0)
    if rank == 1:
        if not frozen:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(4.0)
        dist.destroy_process_group()
        return ""
    begun = time.monotonic()
    with pytest.raises((TransportError, HookTimeoutError)) as raised:
        transport.all_gather(gathered, ones).wait(2.0)
    assert time.monotonic() - begun < 3.5
    dist.destroy_process_group()  # without the barrier at the end of a test
    return type(raised.value).__name__


@pytest.mark.gloo
@pytest.mark.parametrize("frozen", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_lost_or_frozen_rank_is_an_error_within_the_deadline(frozen: bool) -> None:
    results = spawn(
        lose, 2, frozen, timeout=100, group_timeout=20.0, expect_exit={} if frozen else {1: -signal.SIGKILL}
    )
    assert results[0] == (HookTimeoutError if frozen else TransportError).__name__


def starts_late(rank: int, world: int) -> str:
    transport = FarTransport(None, FAR, timeout=1.0)
    if rank == 1:
        time.sleep(3.0)
        dist.destroy_process_group()  # without the barrier at the end of a test
        return ""
    with pytest.raises(HookTimeoutError, match="deadline 1 s") as raised:
        transport.all_gather(torch.empty(2), torch.ones(1))
    dist.destroy_process_group()
    return type(raised.value).__name__


@pytest.mark.gloo
def test_the_first_exchange_waits_for_the_deadline_and_not_for_that_of_the_group() -> None:
    assert spawn(starts_late, 2, timeout=100, group_timeout=20.0)[0] == HookTimeoutError.__name__


# -- the engine


class Careless(Reduction):
    """Averages by an all-gather, keeps a residual, and may raise while it decodes."""

    name, lossy, collectives = "careless", True, frozenset({"all_gather"})
    fields = {"residual": "local"}

    def __init__(self, raises_at: int = -1) -> None:
        self.raises_at = raises_at

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        every = ctx.scratch("every", (ctx.world_size, bucket.buffer.numel()))
        for p in bucket.params:
            ctx.write(p.name, "residual", p.shape).fill_(ctx.step + 1)
        yield AllGather(bucket.buffer.clone(), every.view(-1))
        if ctx.step == self.raises_at and bucket.device.type != "meta":
            self.raises_at = -1
            raise ValueError("decode")
        bucket.buffer.copy_(every.mean(0))


def outcomes(rank: SimulatedRank, tuning: CpuTuning, raises_at: int, infinite_at: int) -> list[tuple[str, int]]:
    reduction = Careless(raises_at if rank.rank == 1 else -1)
    engine = rank.engine(reduction, tuning=tuning)
    seen = []
    for step in range(4):
        numbers = torch.full((3,), float("inf") if step == infinite_at and rank.rank == 1 else 1.0)
        bucket = Bucket.from_tensors({"w": numbers})
        engine.submit(bucket)
        error = engine.finish()
        engine.resolve_step()
        seen.append((type(error).__name__ if error is not None else "", engine.state.step))
    return seen


def run(tuning: CpuTuning, raises_at: int = -1, infinite_at: int = -1) -> list[Any]:
    return simulate(2, lambda rank: outcomes(rank, tuning, raises_at, infinite_at))


def test_an_error_after_the_status_is_told_to_far_ranks_by_every_later_step() -> None:
    remote, own = RemoteHookError.__name__, "ValueError"
    peer, raised = run(CpuTuning.over(FAR), raises_at=1)
    assert peer == [("", 1), ("", 2), (remote, 2), (remote, 2)]
    assert raised == [("", 1), (own, 2), (own, 2), (own, 2)]
    peer, raised = run(CpuTuning.off(), raises_at=1)
    assert peer == [("", 1), (remote, 1), ("", 2), ("", 3)]
    assert raised == [("", 1), (own, 1), ("", 2), ("", 3)]


@pytest.mark.parametrize("tuning", [CpuTuning.over(FAR), CpuTuning.off()], ids=["far", "near"])
def test_infinite_numbers_after_the_status_undo_the_step_on_all_ranks(tuning: CpuTuning) -> None:
    assert run(tuning, infinite_at=1) == [[("", 1), ("", 1), ("", 2), ("", 3)]] * 2


def drops_a_step_alone(rank: int, world: int, reduction: Reduction, numel: int) -> list[str]:
    transport = FarTransport(None, FAR)
    engine = Engine(reduction, transport, HookState(), timeout=20.0)
    seen = []
    for step in range(4):
        bucket = Bucket.from_tensors({"w": torch.zeros(numel)})
        if rank == 0 and step == 1:
            engine.submit(bucket)  # sends its message
            engine.abandon()
        engine.submit(bucket)
        error = engine.finish()
        engine.resolve_step()
        seen.append(type(error).__name__)
    if rank == 1:
        engine.submit(bucket)  # the message for which rank 0 waits in its last step
        engine.abandon()
    return seen


@pytest.mark.gloo
@pytest.mark.parametrize(("reduction", "numel"), [(Careless(), 5), (Plain(), 3)])
def test_a_rank_that_drops_a_step_alone_is_an_error_on_all_in_every_later_step(
    reduction: Reduction, numel: int
) -> None:
    """Messages are matched by their order, so other ranks would take a message of the dropped step for one of the next step.

    An average of three numbers is as long as the status of two ranks, and zeros in it say that no rank has raised.
    """
    mismatch = RankMismatchError.__name__
    assert (
        spawn(drops_a_step_alone, 2, reduction, numel, timeout=100) == [["NoneType", mismatch, mismatch, mismatch]] * 2
    )
