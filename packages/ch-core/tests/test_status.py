"""The step's status: what it is made of, and when it travels."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from commhooks.bucket import Bucket
from commhooks.errors import RemoteHookError
from commhooks.reduction import Plain, Reduction, StepContext
from commhooks.requests import AllReduce
from commhooks.simulate import SimulatedRank, simulate
from commhooks.status import finiteness
from commhooks.transport import Stage
from commhooks.wire import WireCast

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


def events(reduction: Reduction, callback: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What rank 0 started, by elements, and where it waited, in a step of two buckets; the status has three."""
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
            engine.on_reduced = lambda bucket: None
        for i in range(2):
            bucket = Bucket.from_tensors({f"w{i}": torch.ones(64, i + 1)}, index=i, is_last=i == 1)
            engine.submit(bucket)
        assert engine.finish() is None

    simulate(2, body)
    started = [[event for event in log[rank] if event != "wait"] for rank in (0, 1)]
    assert started[0] == started[1], "a callback on one rank must not change what is started, nor the order"
    return log[0]


def test_the_status_travels_beside_the_last_messages_where_nothing_follows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for reduction in (Plain(), WireCast(Plain(), "bf16")):
        assert events(reduction, False, monkeypatch) == ["start 64", "start 128", "start 3", "wait", "wait", "wait"]


def test_it_follows_the_drain_where_something_is_left_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    late = ["start 64", "start 128", "wait", "start 2", "wait", "start 2", "wait", "wait", "start 3", "wait"]
    assert events(TwoRounds(), False, monkeypatch) == late
    assert events(TwoRounds(), True, monkeypatch) == late
    # What a callback does may fail, so the others hear of it; the first bucket is ended at once, for its sake.
    assert events(Plain(), True, monkeypatch) == ["start 64", "start 128", "wait", "wait", "start 3", "wait"]


class Raising(Reduction):
    """Fails on rank 1 before its only collective."""

    name, decodes = "raising", False

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        if ctx.rank == 1 and not bucket.buffer.is_meta:
            raise ArithmeticError("on purpose")
        yield AllReduce(bucket.buffer)


def test_a_failure_before_the_last_messages_is_heard_by_all() -> None:
    def body(rank: SimulatedRank) -> BaseException | None:
        engine = rank.engine(Raising())
        engine.submit(Bucket.from_tensors({"w": torch.ones(4)}))
        return engine.finish()

    others, own = simulate(2, body)
    assert isinstance(others, RemoteHookError)
    assert isinstance(own, ArithmeticError)
