"""The step's status: what it is made of, and when it travels."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from commhooks.bucket import Bucket
from commhooks.compositions.wire_cast import WireCast
from commhooks.engine.collectives import Stage
from commhooks.engine.outcome import finiteness
from commhooks.errors import RemoteHookError
from commhooks.reduction import Plain, Reduction, StepContext
from commhooks.requests import AllGather, AllReduce
from commhooks.simulate import SimulatedRank, simulate

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finiteness_is_told_where_the_sum_overflows_too(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    for numbers in ([], [1.0, -2.0], [largest] * 9, [-largest] * 9, [largest, -largest] * 3):
        assert finiteness(torch.tensor(numbers, dtype=dtype)) == 0, numbers
    for numbers in ([1.0, INF], [-INF, INF], [-INF] * 3, [NAN, 1.0], [largest] * 9 + [NAN], [INF, *[-largest] * 3]):
        assert math.isnan(finiteness(torch.tensor(numbers, dtype=dtype))), numbers


class TwoRounds(Reduction):
    """A second round so small that it waits for the drain."""

    name, lossy = "two_rounds", True

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        yield AllReduce(bucket.buffer)
        yield AllReduce(ctx.scratch("later", (2,), device=bucket.device).zero_())


class AsManyRounds(TwoRounds):
    """As many rounds as the name of the bucket's first parameter says."""

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        yield from itertools.islice(super().run(bucket, ctx), int(bucket.params[0].name[0]))


class Further(Plain):
    """Fails on rank 1 after its last collective."""

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        yield from super().run(bucket, ctx)
        if ctx.rank == 1 and not bucket.buffer.is_meta:
            raise ArithmeticError("late")


def events(
    reduction: Reduction, callback: bool, monkeypatch: pytest.MonkeyPatch, names: Sequence[str] = ("2", "2 again")
) -> list[str]:
    """What rank 0 started, by elements, and where it waited, in a step of some buckets; the status has three."""
    log: dict[int, list[str]] = {0: [], 1: []}
    starting, waiting = Stage.start, Stage.wait

    def start(self: Stage, requests: tuple[Any, ...]) -> Stage:
        log[self.transport.rank].append(f"start {sum(r.tensor.numel() for r in requests)}")
        return starting(self, requests)

    def wait(self: Stage, timeout: float | None) -> None:
        if self._works:
            log[self.transport.rank].append("wait")
        waiting(self, timeout)

    monkeypatch.setattr(Stage, "start", start)
    monkeypatch.setattr(Stage, "wait", wait)

    def body(rank: SimulatedRank) -> None:
        engine = rank.engine(reduction)
        if callback and rank.rank == 0:
            engine.set_on_reduced(lambda bucket: None)
        for i, name in enumerate(names):
            engine.submit(Bucket.from_tensors({name: torch.ones(64, i + 1)}, index=i, is_last=i == len(names) - 1))
        assert engine.finish() is None

    simulate(2, body)
    monkeypatch.undo()
    started = [[event for event in log[rank] if event != "wait"] for rank in (0, 1)]
    assert started[0] == started[1], "a callback on one rank must not change what is started, nor the order"
    return log[0]


def test_the_status_travels_beside_the_last_messages_if_nothing_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    for reduction in (Plain(), WireCast(Plain(), "bf16")):
        assert events(reduction, False, monkeypatch) == ["start 64", "start 128", "start 3", "wait", "wait", "wait"]


def test_it_follows_the_drain_where_something_is_left_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    late = ["start 192", "wait", "start 2", "start 2", "wait", "wait", "start 3", "wait"]
    assert events(TwoRounds(), False, monkeypatch) == late
    assert events(TwoRounds(), True, monkeypatch) == late
    # What a callback does may fail, so the others hear of it; the first bucket is ended at once, for its sake.
    assert events(Plain(), True, monkeypatch) == ["start 64", "start 128", "wait", "wait", "start 3", "wait"]


@pytest.mark.parametrize("rounds", ["220", "221", "2210", "2120", "1202", "0220", "1110", "2211"])
def test_a_callback_on_one_rank_changes_nothing_that_is_started(rounds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{count} in bucket {i}" for i, count in enumerate(rounds)]
    assert events(AsManyRounds(), True, monkeypatch, names)


@pytest.mark.parametrize("wrap", [lambda inner: inner, lambda inner: WireCast(inner, "bf16")])
def test_a_failure_is_heard_by_all_wherever_the_status_travels(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: SimulatedRank) -> tuple[BaseException | None, bool | None]:
        engine = rank.engine(wrap(reduction))
        for i in range(2):
            engine.submit(Bucket.from_tensors({f"w{i}": torch.ones(4)}, index=i, is_last=i == 1))
        return engine.finish(), engine.resolve_step(force=True)

    def early(self: Plain, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        if ctx.rank == 1 and bucket.index == 1 and not bucket.buffer.is_meta:
            raise ArithmeticError("early")
        yield AllReduce(bucket.buffer)

    for reduction in (Further(), Plain()):  # a subclass may do more than average: its status follows the drain
        if type(reduction) is Plain:
            monkeypatch.setattr(Plain, "run", early)
        (others, kept), (own, own_kept) = simulate(2, body)
        assert isinstance(others, RemoteHookError)
        assert isinstance(own, ArithmeticError)
        assert not kept
        assert not own_kept


class Quiet(Reduction):
    """Asks for nothing, and fails on rank 1."""

    name, lossy = "quiet", True

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        if ctx.rank == 1 and not bucket.buffer.is_meta:
            raise ArithmeticError("alone")
        yield from ()


def test_a_rank_that_fails_where_nothing_is_sent_asks_nobody() -> None:
    def body(rank: SimulatedRank) -> BaseException | None:
        engine = rank.engine(Quiet())
        engine.submit(Bucket.from_tensors({"w": torch.ones(4)}))
        return engine.finish()

    others, own = simulate(2, body)
    assert others is None
    assert isinstance(own, ArithmeticError)


class Halves(Reduction):
    """Gathers bytes, and fails where it is told to on rank 1."""

    name, lossy, collectives = "halves", True, frozenset({"all_gather"})

    def __init__(self, where: str) -> None:
        self.where = where

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        fails = ctx.rank == 1 and not bucket.buffer.is_meta
        if fails and self.where == "before":
            raise ArithmeticError("as told")
        mine = bucket.buffer.to(torch.float16).view(torch.uint8)
        everyone = mine.new_empty(ctx.world_size * mine.numel())
        yield AllGather(mine, everyone)
        if fails and self.where == "after":
            raise ArithmeticError("as told")
        bucket.buffer.copy_(everyone.view(torch.float16).view(ctx.world_size, -1)[0])  # all are the same


@pytest.mark.parametrize("where", ["before", "after", "nowhere"])
def test_a_failure_that_is_told_late_leaves_nan_on_every_rank(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: a scaler skips the step on all ranks, or on none. Of bytes that were gathered nothing shows by itself."""
    monkeypatch.setattr("commhooks.engine.outcome.is_asynchronous", lambda device: True)
    monkeypatch.setattr("commhooks.engine.engine.is_asynchronous", lambda device: True)

    def body(rank: SimulatedRank) -> tuple[BaseException | None, list[bool], list[float]]:
        engine, found = rank.engine(Halves(where)), []
        for i in range(2):
            numbers = {f"w{i}": torch.full((2, 2), -0.0), f"v{i}": torch.full((3,), 2.0)}
            found.append(Bucket.from_tensors(numbers, index=i, is_last=i == 1))
            engine.submit(found[-1])
        error = engine.finish()
        assert not engine.buckets.submitted
        spoilt = [bool(bucket.view(p).isnan().any()) for bucket in found for p in bucket.params]
        return error, spoilt, torch.cat([bucket.buffer for bucket in found]).tolist()

    for error, spoilt, numbers in simulate(2, body):
        assert error is None, "it is told when the next step begins"
        assert spoilt == [where != "nowhere"] * 4
        if where == "nowhere":
            assert list(map(str, numbers)) == ["-0.0"] * 4 + ["2.0"] * 3 + ["-0.0"] * 4 + ["2.0"] * 3, "to the bit"
