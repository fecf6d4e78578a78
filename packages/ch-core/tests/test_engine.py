"""The engine over simulated ranks: order, plans, counting, failures, outcomes."""

import dataclasses
import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import commhooks
from ch_core import (
    AllGather,
    AllReduce,
    AllToAll,
    Bucket,
    HookConfigError,
    HookResultError,
    HookTimeoutError,
    Plain,
    ReduceScatter,
    Reduction,
    RemoteHookError,
    SimulatedGroup,
    SimulatedRank,
    SimulatedTransport,
    Stages,
    StepContext,
    TransportError,
    Wire,
    simulate,
)
from ch_core.engine.engine import Engine
from ch_core.engine.schedule import TUNED, CpuTuning
from ch_core.engine.stateless import StatelessEngine
from ch_core.engine.stats import Recording
from ch_wrappers import WireCast
from ch_wrappers.error_feedback import ErrorFeedback


class TwoStage(Reduction):
    """Averages twice and remembers the last average. It stands for any reduction with two stages and a state."""

    name = "two_stage"
    lossy = True
    fields = {"last": "shared"}

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        mean = ctx.scratch("mean", (1,), device=bucket.device).copy_(bucket.buffer.sum())
        yield AllReduce(mean)
        yield AllReduce(bucket.buffer)
        for p in bucket.params:
            ctx.write(p.name, "last", p.shape, device=bucket.device).copy_(bucket.view(p))


def buckets(rank: int, count: int = 3, value: float | None = None) -> list[Bucket]:
    fill = float(rank + 1) if value is None else value
    return [
        Bucket.from_tensors({f"w{i}": torch.full((3, i + 1), fill)}, index=i, is_last=i == count - 1)
        for i in range(count)
    ]


def step(engine: Engine, parts: list[Bucket]) -> BaseException | None:
    for bucket in parts:
        engine.submit(bucket)
    return engine.finish()


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 64), st.integers(1, 4), st.integers(0, 2**31))
def test_64_simulated_ranks_average_exactly(world: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(world, count, 7, generator=generator)
    expected = gradients.double().mean(0)

    def body(rank: SimulatedRank) -> torch.Tensor:
        engine = rank.engine(Plain())
        parts = [Bucket.from_tensors({f"w{i}": gradients[rank.rank, i]}, index=i) for i in range(count)]
        assert step(engine, parts) is None
        return torch.stack([b.buffer for b in parts])

    results = simulate(world, body)
    assert all(torch.equal(r, results[0]) for r in results)
    torch.testing.assert_close(results[0].double(), expected, rtol=1e-5, atol=1e-6)


class SmallLater(Reduction):
    """Sends at most a sixteenth of the gradient after its first stage, like the Q of PowerSGD."""

    name = "small_later"
    lossy = True
    later = 3

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        yield AllReduce(bucket.buffer)
        yield AllReduce(ctx.scratch("later", (self.later,), device=bucket.device).zero_())


class LargeLater(SmallLater):
    later = 4


class OneLarge(SmallLater):
    """Ends after its first stage for the bucket of 96 elements, as PowerSGD does for a bucket without matrices."""

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        yield AllReduce(bucket.buffer)
        if bucket.layout.size != 96:
            yield AllReduce(ctx.scratch("later", (3,), device=bucket.device).zero_())


def messages(reduction: Reduction, rows: int = 1, told: bool = False, tuning: CpuTuning = TUNED) -> list[int]:
    """Return the elements of every all-reduce of a step of three buckets, the same on two ranks. The last is the
    status.

    With ``told`` only the last bucket says that it is the last, so earlier buckets may wait for it.
    """
    log: dict[int, list[int]] = {0: [], 1: []}

    def body(rank: SimulatedRank) -> None:
        engine = rank.engine(reduction, tuning=tuning)
        original = SimulatedTransport.all_reduce

        def record(self: SimulatedTransport, tensor: torch.Tensor, op: str) -> Any:
            log[rank.rank].append(tensor.numel())
            return original(self, tensor, op)

        rank.transport.all_reduce = record.__get__(rank.transport)  # type: ignore[method-assign]
        parts = [
            Bucket.from_tensors({f"w{i}": torch.ones(rows, 3 * (i + 1))}, index=i, is_last=not told or i == 2)
            for i in range(3)
        ]
        assert step(engine, parts) is None

    simulate(2, body)
    assert log[0] == log[1]
    return log[0]


def test_order_of_collectives_follows_the_rule_alone() -> None:
    # Each submitted bucket starts its first stage, then advances the earlier buckets.
    assert messages(TwoStage()) == [1, 1, 3, 1, 6, 9, 3]


def test_small_later_stages_wait_for_the_drain() -> None:
    assert messages(SmallLater(), rows=16) == [48, 96, 144, 6, 3, 3]
    first_is_too_large = [48, 96, 4, 144, 4, 4, 3]
    assert messages(LargeLater(), rows=16) == first_is_too_large


def test_small_first_stages_gather_until_they_are_worth_a_message() -> None:
    assert messages(SmallLater(), rows=16, told=True) == [48 + 96 + 144, 6, 3, 3]
    assert messages(Plain(), rows=16, told=True) == [48, 96, 144, 3], "an average is DDP's to the bit"
    assert messages(OneLarge(), rows=16, told=True) == [48, 96, 144, 3, 3, 3], "nor does it go with others"
    assert messages(LargeLater(), rows=16, told=True) == [48, 4, 96 + 144, 4, 4, 3]
    fewer = dataclasses.replace(TUNED, coalesced_bytes=4 * 144)  # bytes of the third bucket
    assert messages(SmallLater(), rows=16, told=True, tuning=fewer) == [48 + 96, 144, 6, 3, 3]
    assert messages(SmallLater(), rows=16, told=True, tuning=CpuTuning.off()) == [48, 96, 3, 144, 3, 3, 3]


def test_counts_are_the_formula() -> None:
    def body(rank: SimulatedRank) -> dict[str, float]:
        engine = rank.engine(WireCast(Plain(), "bf16"))
        step(engine, buckets(rank.rank))
        return engine.counters.as_dict()

    stats = simulate(4, body)[0]
    numel = 3 * (1 + 2 + 3)
    assert stats["payload_bytes"] == 2 * numel
    status = 4 * (4 + 1)
    assert stats["wire_bytes"] == (2 * numel + status) * 2 * 3 / 4
    assert stats["rounds"] == 3
    assert stats["steps"] == stats["compressed_steps"] == 1


class Unplanned(Reduction):
    """Looks at numbers, and then asks for a different request than it planned."""

    name = "unplanned"

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        extra = 0 if bucket.buffer.is_meta else 1
        yield AllReduce(torch.zeros(3 + extra, device=bucket.device))


def test_requests_outside_the_plan_raise_on_all_ranks_without_a_hang() -> None:
    def body(rank: SimulatedRank) -> BaseException | None:
        return step(rank.engine(Unplanned()), buckets(rank.rank))

    errors = simulate(2, body)
    assert all(isinstance(e, HookResultError) and "its plan says" in str(e) for e in errors)


class LooksAtNumbers(Reduction):
    name = "looks"

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        if bucket.buffer.sum().item() > 0:
            yield AllReduce(bucket.buffer)


def test_a_plan_that_cannot_be_made_says_why() -> None:
    with pytest.raises(HookConfigError, match=r"looks.*meta tensors.*do not read numbers"):
        LooksAtNumbers().plan(buckets(0)[0].layout, StepContext())


class Faulty(TwoStage):
    """Raises once on one rank, at a chosen stage of a chosen bucket."""

    def __init__(self, rank: int, stage: int, bucket: int = 1) -> None:
        self.where = (rank, stage, bucket)

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        stages = super().run(bucket, ctx)
        for number in range(3):
            if (ctx.rank, number, bucket.index) == self.where and not bucket.buffer.is_meta:
                self.where = (-1, -1, -1)
                raise ArithmeticError(f"broken at stage {number}")
            try:
                yield next(stages)
            except StopIteration:
                return


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_rank_failing_raises_on_all_and_the_next_step_is_right(stage: int) -> None:
    def body(rank: SimulatedRank) -> tuple[BaseException | None, torch.Tensor, int]:
        engine = rank.engine(Faulty(1, stage))
        error = step(engine, buckets(rank.rank))
        parts = buckets(rank.rank)
        assert step(engine, parts) is None
        engine.resolve_step()
        return error, parts[1].buffer.clone(), engine.state.step

    (e0, x0, s0), (e1, x1, s1), (e2, x2, s2) = simulate(3, body)
    assert isinstance(e1, ArithmeticError)
    for remote in (e0, e2):
        assert isinstance(remote, RemoteHookError)
        assert f"ArithmeticError: broken at stage {stage}" in str(remote)
        assert "rank 1" in str(remote)
    assert x0.unique().tolist() == [2.0]
    assert torch.equal(x0, x1)
    assert torch.equal(x0, x2)
    assert s0 == s1 == s2 == 1  # the failed step does not count


def test_non_finite_steps_leave_no_trace_and_reach_the_caller() -> None:
    def body(rank: SimulatedRank) -> tuple[torch.Tensor | None, int, bool]:
        engine = rank.engine(TwoStage())
        step(engine, buckets(rank.rank))
        poisoned = buckets(rank.rank)
        if rank.rank == 1:
            poisoned[2].buffer[0] = float("nan")
        step(engine, poisoned)
        engine.resolve_step()
        return engine.state.read("w0", "last"), engine.state.step, bool(poisoned[2].buffer.isnan().any())

    for kept, steps, reached in simulate(2, body):
        assert kept is not None
        assert kept.unique().tolist() == [1.5]
        assert steps == 1
        assert reached


def test_rollback_undoes_the_last_step_only() -> None:
    def body(rank: SimulatedRank) -> tuple[float, int]:
        engine = rank.engine(TwoStage())
        step(engine, buckets(rank.rank, value=1.0))
        step(engine, buckets(rank.rank, value=2.0))
        engine.rollback()
        engine.resolve_step()
        last = engine.state.read("w1", "last")
        assert last is not None
        return float(last[0, 0]), engine.state.step

    assert simulate(2, body) == [(1.0, 1), (1.0, 1)]


@pytest.mark.parametrize("call", ["advance", "finish"])
def test_an_abandoned_step_sends_no_first_stage_later(call: str) -> None:
    def body(rank: SimulatedRank) -> int:
        engine = rank.engine(commhooks.create("powersgd(rank=1)").reduction)  # small first stages are collected
        engine.submit(Bucket.from_tensors({"a": torch.ones(16, 16)}, is_last=False))
        engine.abandon()
        posted: list[str] = []
        engine.messenger.start = lambda batch: posted.append("batch")  # type: ignore[method-assign]
        if call == "advance":
            engine.advance()
        else:
            engine.finish(outside=ValueError("bad batch"))
        return len(posted)

    assert simulate(2, body) == [0, 0]


def test_kept_buckets_are_released_when_the_next_step_begins() -> None:
    def body(rank: SimulatedRank) -> list[bool]:
        engine = rank.engine(commhooks.create("bf16_compress").reduction)
        engine.keep_buckets()
        first = Bucket.from_tensors({"a": torch.ones(4, 4)}, is_last=True)
        storage = weakref.ref(first.storage)
        engine.submit(first)
        del first
        engine.finish()
        kept = storage() is not None
        engine.submit(Bucket.from_tensors({"a": torch.ones(4, 4)}, is_last=True))
        gc.collect()
        released = storage() is None  # while the next step runs
        engine.finish()
        return [kept, released]

    assert simulate(2, body) == [[True, True]] * 2


def test_an_abandoned_step_is_forgotten() -> None:
    def body(rank: SimulatedRank) -> tuple[list[float], int]:
        engine = rank.engine(Plain())
        engine.submit(buckets(rank.rank)[0])
        engine.abandon()
        parts = buckets(rank.rank)
        assert step(engine, parts) is None
        return parts[2].buffer.unique().tolist(), len(parts)

    assert simulate(2, body) == [([1.5], 3), ([1.5], 3)]


class EveryKind(Reduction):
    """Sends one request of each kind and checks the results."""

    name = "every_kind"
    collectives = frozenset({"all_reduce", "all_gather", "all_to_all", "reduce_scatter"})

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        world, rank, device = ctx.world_size, float(ctx.rank), bucket.device
        gathered = torch.empty(world, device=device)
        exchanged, scattered = torch.empty(world, device=device), torch.empty(1, device=device)
        peak = torch.full((1,), rank, device=device)
        sent = torch.full((world,), rank, device=device)
        yield (
            AllGather(torch.full((1,), rank, device=device), gathered),
            AllToAll(sent.clone(), exchanged),
            ReduceScatter(sent.clone(), scattered, op="sum"),
            AllReduce(peak, op="max"),
        )
        bucket.buffer.copy_(torch.stack([gathered.sum(), exchanged.sum(), scattered[0], peak[0]]))


def test_all_four_collectives_in_one_stage() -> None:
    def body(rank: SimulatedRank) -> list[float]:
        bucket = Bucket.from_tensors({"w": torch.zeros(4)})
        assert step(rank.engine(EveryKind()), [bucket]) is None
        return [float(x) for x in bucket.buffer]

    assert simulate(3, body) == [[3.0, 3.0, 3.0, 2.0]] * 3


def test_ranks_that_disagree_or_stay_away_get_typed_errors() -> None:
    def disagree(rank: SimulatedRank) -> None:
        bucket = Bucket.from_tensors({"w": torch.zeros(3 + rank.rank)})
        step(rank.engine(Plain()), [bucket])

    with pytest.raises(TransportError, match="different collectives"):
        simulate(2, disagree)

    def absent(rank: SimulatedRank) -> None:
        if rank.rank == 0:
            step(Engine(Plain(), rank.transport, timeout=0.2), [Bucket.from_tensors({"w": torch.zeros(3)})])

    with pytest.raises(HookTimeoutError, match=r"ranks \[1\] did not take part"):
        simulate(2, absent)


def test_a_lost_transport_stays_lost() -> None:
    group = SimulatedGroup(2)
    engine = Engine(Plain(), SimulatedTransport(group, 0), timeout=0.1)
    bucket = Bucket.from_tensors({"w": torch.zeros(3)})
    with pytest.raises(HookTimeoutError):
        step(engine, [bucket])
    with pytest.raises(HookTimeoutError):
        engine.submit(bucket)
    assert not engine.in_step


class EmptyStage(Reduction):
    """Has an empty stage between two stages that send."""

    name = "empty_stage"

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        yield AllReduce(bucket.buffer, op="sum")
        yield ()
        yield AllReduce(bucket.buffer, op="sum")


def test_an_empty_stage_is_not_the_end() -> None:
    def body(rank: SimulatedRank) -> list[float]:
        bucket = Bucket.from_tensors({"w": torch.ones(2)})
        assert step(rank.engine(EmptyStage()), [bucket]) is None
        return bucket.buffer.tolist()

    assert simulate(2, body) == [[4.0, 4.0]] * 2


@pytest.mark.parametrize("bad", ["ints", "strided"])
def test_buckets_that_cannot_be_reduced_raise_on_all_ranks(bad: str) -> None:
    class Bad(Reduction):
        name = "bad"

        def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
            if bucket.buffer.is_meta or ctx.rank == 0:
                yield AllReduce(torch.zeros(4, device=bucket.device))
            else:
                yield AllReduce(torch.zeros(4, dtype=torch.int64) if bad == "ints" else torch.zeros(8)[::2])

    def body(rank: SimulatedRank) -> BaseException | None:
        return step(rank.engine(Bad()), buckets(rank.rank))

    first, second = simulate(2, body)
    assert isinstance(first, RemoteHookError)
    assert isinstance(second, TypeError if bad == "ints" else ValueError)


def test_an_exception_inside_the_transport_is_typed_and_final() -> None:
    def body(rank: SimulatedRank) -> tuple[str, str]:
        engine = rank.engine(Plain())
        rank.transport.all_reduce = lambda tensor, op: 1 / 0  # type: ignore[method-assign,assignment]
        found = []
        for _ in range(2):
            with pytest.raises(TransportError) as caught:
                step(engine, buckets(rank.rank))
            found.append(str(caught.value))
        return found[0], found[1]

    first, again = simulate(1, body)[0]
    assert "ZeroDivisionError" in first
    assert first == again


def test_scratch_is_made_once() -> None:
    def body(rank: SimulatedRank) -> int:
        engine = rank.engine(WireCast(TwoStage(), "bf16"))
        step(engine, buckets(rank.rank))
        before = {key: t.data_ptr() for key, t in engine.messenger.scratch._tensors.items()}
        step(engine, buckets(rank.rank))
        after = {key: t.data_ptr() for key, t in engine.messenger.scratch._tensors.items()}
        assert before == after
        return len(after)

    assert simulate(2, body)[0] > 3


# -- errors on one rank while its peers are in the collectives of the step


class BadResidual(Reduction):
    """Keeps a residual whose shape differs from the gradient's. Only telemetry reads it."""

    name, lossy = "bad_residual", True
    fields: ClassVar[dict[str, Literal["local", "shared"]]] = {"residual": "local"}

    def run(self, bucket: Bucket, ctx: Any) -> Iterator[Any]:
        ctx.write("w", "residual", (3,), device=bucket.device).fill_(1.0)
        yield AllReduce(bucket.buffer)


def steps_of(engine: Engine, count: int) -> list[str]:
    """Return the type of each step's error, over two buckets."""
    seen = []
    for _ in range(count):
        for index in range(2):
            engine.submit(
                Bucket.from_tensors({f"w{index}" if index else "w": torch.ones(4)}, index=index, is_last=index == 1)
            )
        seen.append(type(engine.finish()).__name__)
    return seen


def test_an_error_inside_of_sampling_ends_telemetry_and_not_the_step() -> None:
    def body(rank: SimulatedRank) -> tuple[list[str], bool]:
        engine = rank.engine(BadResidual())
        if rank.rank == 0:
            engine.sampler.add(Recording(1, lambda step, figures: None))
        return steps_of(engine, 3), bool(engine.sampler.recordings)

    assert simulate(2, body) == [(["NoneType"] * 3, False)] * 2


def test_a_writer_that_raises_ends_its_own_recorder_alone() -> None:
    def body(rank: SimulatedRank) -> tuple[list[str], list[int], list[int]]:
        engine, first, second = rank.engine(Plain()), [], []

        def fails(step: int, figures: Any) -> None:
            first.append(step)
            raise OSError("the disk is full")

        engine.sampler.add(Recording(1, fails))
        engine.sampler.add(Recording(2, lambda step, figures: second.append(step)))
        return steps_of(engine, 4), first, second

    assert simulate(2, body) == [(["NoneType"] * 4, [0], [0, 2])] * 2


def interrupted(*args: Any) -> Any:
    raise KeyboardInterrupt


def arm_writer(engine: Engine) -> None:
    engine.sampler.add(Recording(1, interrupted))


def arm_loss_scale(engine: Engine) -> None:
    engine.set_loss_scale(interrupted)


def arm_on_reduced(engine: Engine) -> None:
    engine.set_on_reduced(interrupted)


@pytest.mark.parametrize("arm", [arm_writer, arm_loss_scale, arm_on_reduced])
def test_ctrl_c_inside_of_a_callback_is_raised_at_the_end_of_the_step_on_all_ranks(arm: Any) -> None:
    def body(rank: SimulatedRank) -> list[str]:
        engine = rank.engine(Sums())
        seen = steps_of(engine, 1)
        if rank.rank == 1:
            arm(engine)
        return seen + steps_of(engine, 2)

    ours, theirs = simulate(2, body)
    assert "KeyboardInterrupt" in theirs, theirs
    assert ours[theirs.index("KeyboardInterrupt")] == "RemoteHookError"


class Sums(Reduction):
    """Keeps a residual, so that the engine asks for the loss scale."""

    name, lossy = "sums", True
    fields: ClassVar[dict[str, Literal["local", "shared"]]] = {"residual": "local"}

    def run(self, bucket: Bucket, ctx: Any) -> Iterator[Any]:
        yield AllReduce(bucket.buffer)


@pytest.mark.parametrize("narrow", [False, True])
def test_on_sent_that_raises_on_one_rank_fails_the_step_on_all(narrow: bool) -> None:
    class Tells(Reduction):
        name, lossy = "tells", True

        def run(self, bucket: Bucket, ctx: Any) -> Iterator[Any]:
            def on_sent() -> None:
                if ctx.rank == 1 and ctx.step == 1:
                    raise ArithmeticError("on_sent")

            yield AllReduce(bucket.buffer, wire=Wire(torch.bfloat16) if narrow else None, on_sent=on_sent)

    assert simulate(2, lambda rank: steps_of(rank.engine(Tells()), 3)) == [
        ["NoneType", "RemoteHookError", "RemoteHookError"],
        ["NoneType", "ArithmeticError", "ArithmeticError"],
    ]


def test_an_error_without_a_text_and_a_log_that_raises_hang_no_peer() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    class Fails(Reduction):
        name = "fails"

        def run(self, bucket: Bucket, ctx: Any) -> Iterator[Any]:
            yield AllReduce(bucket.buffer)
            if ctx.rank == 1 and not bucket.buffer.is_meta:
                raise Mute

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("no log")

    def body(rank: SimulatedRank) -> list[str]:
        engine = rank.engine(Fails())
        engine.submit(Bucket.from_tensors({"w": torch.ones(4)}, is_last=True))
        error = engine.finish()
        return [type(error).__name__, str(error) if rank.rank == 0 else ""]

    handler = Handler()
    logging.getLogger("commhooks").addHandler(handler)
    try:
        (kind, text), (own, _) = simulate(2, body)
    finally:
        logging.getLogger("commhooks").removeHandler(handler)
    assert (kind, own) == ("RemoteHookError", "Mute")
    assert "Mute" in text


def test_a_bucket_that_runs_twice_in_a_step_continues_from_its_first_residual() -> None:
    def two_steps(rank: Any) -> tuple[float, bool]:
        engine = rank.engine(ErrorFeedback(WireCast(Plain(), "bf16")))
        applied = 0.0
        for _ in range(2):
            for part in (1.001, 2.003, 0.007):
                bucket = Bucket.from_tensors({"w": torch.tensor([part])})
                engine.run(bucket)
                applied += bucket.buffer.item()
            assert engine.finish() is None
            engine.resolve_step()
        kept = engine.state.read("w", "residual").clone()
        engine.run(Bucket.from_tensors({"w": torch.tensor([3.0])}))
        engine.run(Bucket.from_tensors({"w": torch.tensor([4.001])}))
        engine.abandon()
        unchanged = torch.equal(engine.state.read("w", "residual"), kept)
        return applied + kept.item(), unchanged and engine.state.step == 2

    for total, unchanged in simulate(2, two_steps):
        assert total == pytest.approx(2 * 3.011, abs=1e-6)
        assert unchanged


class Rounded(Reduction):
    """Sends integers, whose sums are exact."""

    name, lossy, reports_sent = "rounded", True, True

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        bucket.buffer.round_()
        if ctx.sent is not None:
            ctx.sent.buffer.copy_(bucket.buffer)
        yield AllReduce(bucket.buffer)


@pytest.mark.parametrize("absent", range(3))
def test_a_bucket_that_runs_twice_keeps_its_residual_if_one_run_has_no_gradient(absent: int) -> None:
    """Rank 0 has no gradient in one of the runs of a step, and then has only an error to keep."""

    def one_step(rank: SimulatedRank) -> tuple[float, float]:
        engine = rank.engine(ErrorFeedback(Rounded()))
        applied = 0.0
        for step in range(2):
            for number, part in enumerate((1.25, 2.375, 0.4375)):
                unused = step == 1 and number == absent and rank.rank == 0
                bucket = Bucket.from_tensors({"w": torch.tensor([0.0 if unused else part])})
                bucket.unused = frozenset({"w"} if unused else ())
                engine.run(bucket)
                applied += bucket.buffer.item()
            assert engine.finish() is None
            engine.resolve_step()
        residual = engine.state.read("w", "residual")
        assert residual is not None
        return applied, residual.item()

    ranks = simulate(2, one_step)
    wanted = 2 * 4.0625 - (1.25, 2.375, 0.4375)[absent] / 2
    assert ranks[0][0] + (ranks[0][1] + ranks[1][1]) / 2 == pytest.approx(wanted, abs=1e-6)


def test_a_transport_lost_between_steps_keeps_the_finished_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: SimulatedRank) -> tuple[int, float]:
        engine = rank.engine(TwoStage())
        assert step(engine, buckets(0)) is None

        def lost(mine: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("connection closed by peer")

        monkeypatch.setattr(engine.messenger, "gather", lost)
        with pytest.raises(TransportError, match="connection closed"):
            engine.gather(torch.zeros(1))
        engine.move(SimulatedTransport(SimulatedGroup(1), 0))
        last = engine.state.read("w0", "last")
        assert last is not None, "the finished step's entries were dropped"
        return engine.state.step, float(last.sum())

    assert simulate(1, body) == [(1, 3.0)]


def test_on_sent_that_raises_without_a_step_raises_at_once() -> None:
    class Tells(Reduction):
        name = "tells"

        def run(self, bucket: Bucket, ctx: Any) -> Iterator[Any]:
            def on_sent() -> None:
                raise ArithmeticError("on_sent")

            yield AllReduce(bucket.buffer, on_sent=on_sent)

    def body(rank: SimulatedRank) -> None:
        with pytest.raises(ArithmeticError, match="on_sent"):
            StatelessEngine().run(Tells(), Bucket.from_tensors({"w": torch.ones(4)}), rank.transport)

    simulate(2, body)


def test_an_error_between_steps_keeps_the_step_before() -> None:
    def body(rank: SimulatedRank) -> list[int]:
        engine = rank.engine(Plain())
        engine.submit(Bucket.from_tensors({"w": torch.ones(2)}))
        assert engine.finish() is None
        assert engine.finish(outside=ValueError("bad batch")) is not None
        engine.resolve_step()
        return [engine.state.step]

    assert simulate(2, body) == [[1], [1]]
