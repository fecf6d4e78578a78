"""Outcomes of steps: the status message, late errors, and commit or rollback of pending steps."""

import itertools
import math
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import pytest
import torch

from ch_core import (
    AllGather,
    AllReduce,
    Bucket,
    HookState,
    Plain,
    Reduction,
    RemoteHookError,
    SimulatedRank,
    StateError,
    StepContext,
    simulate,
)
from ch_core.engine.messages import Batch
from ch_core.engine.outcome import Progress, finiteness
from ch_wrappers import WireCast
from commhooks import load_state_dict, state_dict

# -- state of tentative steps


def test_an_entry_of_another_shape_reads_as_none() -> None:
    state = HookState()
    ctx = StepContext(draft=state.draft)
    assert ctx.read("w", "q", (2, 3)) is None
    ctx.write("w", "q", (2, 3)).fill_(1.0)
    state.versions.commit()
    kept = ctx.read("w", "q")
    assert kept is not None
    assert ctx.read("w", "q", (2, 3)) is kept
    assert ctx.read("w", "q", [2, 3]) is kept
    assert ctx.read("w", "q", (1, 3)) is None


def write(state: HookState, value: float) -> None:
    state.draft.write(("w", "residual"), (2,)).tensor.fill_(value)


def held(state: HookState) -> float | None:
    found = state.read("w", "residual")
    return None if found is None else float(found[0])


@pytest.mark.parametrize("used", [True, False])
def test_tentative_steps_are_kept_or_undone_together(used: bool) -> None:
    state = HookState()
    write(state, 1.0)
    state.versions.commit()
    for value in (2.0, 3.0, 4.0):
        write(state, value)
        state.versions.commit(tentative=True)
        assert held(state) == value
        assert (state.versions.certain.step, [float(t[0]) for _, _, t in state.entries()]) == (1, [1.0])
    assert (state.versions.tentative, state.step) == (True, 4)
    state.versions.rescale(8.0)
    assert held(state) == 32.0
    state.versions.resolve_tentative(used)
    assert (state.versions.tentative, state.step, held(state)) == (False, 4 if used else 1, 32.0 if used else 8.0)
    kept = state.read("w", "residual")
    for value in (5.0, 6.0):  # the buffers alternate again, and none of them holds the current residual
        write(state, value)
        assert state.read("w", "residual") is kept
        state.versions.rollback()
    buffers = [*state.versions.committed.values(), *state.draft.spare.values()]
    assert {id(entry.tensor) for entry in buffers} > {id(kept)}
    assert len(buffers) == 2


def test_new_entries_of_a_tentative_step_vanish_when_it_is_undone() -> None:
    state = HookState()
    write(state, 1.0)
    state.versions.commit(tentative=True)
    assert held(pickle.loads(pickle.dumps(state))) is None
    state.versions.resolve_tentative(False)
    assert (held(state), state.step) == (None, 0)


def test_a_field_declares_how_it_follows_the_loss_scale() -> None:
    class Momenta(Reduction):
        name = "momenta"
        fields: ClassVar[dict[str, Literal["local", "shared"]]] = {
            "residual": "local",
            "owed": "local",
            "square": "shared",
            "count": "shared",
        }
        scaled_fields: ClassVar[dict[str, int]] = {"owed": 1, "square": 2}

        def run(self, bucket: Bucket, ctx: Any) -> Iterator[Any]:
            for p, gradient in bucket.views():
                for field, power in (("owed", 1), ("square", 2), ("count", 0)):
                    target = ctx.write(p.name, field, p.shape, device=bucket.device).copy_(gradient.pow(power))
                    before = ctx.read(p.name, field)
                    if before is not None:
                        target.add_(before)
            yield AllReduce(bucket.buffer)

    def body(rank: SimulatedRank) -> dict[str, float]:
        engine = rank.engine(Momenta())
        for scale in (1.0, 4.0, 2.0):
            engine.set_loss_scale(lambda scale=scale: scale)
            engine.submit(Bucket.from_tensors({"w": torch.full((2,), 3.0 * scale)}))
            assert engine.finish() is None
        engine.resolve_step()
        return {field: float(tensor[0]) for _, field, tensor in engine.state.entries()}

    assert simulate(2, body) == [{"owed": 9.0, "square": 27.0, "count": 3.0}] * 2


# -- the engine


class Counts(Reduction):
    """Counts its steps, and uses other collectives after the third committed one."""

    name, lossy = "counts", True
    fields: ClassVar[dict[str, Literal["local", "shared"]]] = {"sum": "shared"}

    def phase(self, step: int) -> bool:
        return step >= 3

    def run(self, bucket: Bucket, ctx: Any) -> Iterator[Any]:
        before = ctx.read("w", "sum")
        target = ctx.write("w", "sum", (1,), device=bucket.device)
        if before is None:
            target.fill_(1.0)
        else:
            torch.add(before, 1.0, out=target)
        yield AllReduce(bucket.buffer)
        if ctx.step >= 3:
            yield AllReduce(ctx.scratch("more", (5,), device=bucket.device).zero_())


class Says:
    """A step judge that gives a preset answer."""

    def __init__(self) -> None:
        self.answer: bool | None = True
        self.steps = 0
        self.error: StateError | None = None

    def begin_period(self) -> None:
        pass

    def finish_step(self) -> None:
        pass

    def used(self) -> bool | None:
        return self.answer

    def doubt(self) -> StateError | None:
        return self.error

    def clock(self) -> int:
        return self.steps

    def set_clock(self, clock: int) -> None:
        self.steps = clock


def one_step(engine: Any, *, joined: bool = False) -> BaseException | None:
    engine.set_participating(not joined)
    engine.submit(Bucket.from_tensors({"w": torch.zeros(4) if joined else torch.ones(4)}))
    error: BaseException | None = engine.finish()
    return error


def total(engine: Any) -> float:
    found = engine.state.read("w", "sum")
    return 0.0 if found is None else float(found)


def test_steps_that_wait_are_used_or_undone_together() -> None:
    def body(rank: SimulatedRank) -> list[tuple[int, float, int]]:
        engine, says, seen = rank.engine(Counts()), Says(), []
        engine.set_judge(says)
        for answer in (True, None, None, True, None, False, True):
            assert one_step(engine) is None
            says.answer = answer
            assert engine.resolve_step() is answer
            if answer is None:
                assert state_dict(engine.state)["step"] == engine.state.versions.certain.step
            seen.append((engine.state.step, total(engine), engine.state.versions.certain.step))
        return seen

    expected = [(1, 1.0, 1), (1, 1.0, 1), (2, 2.0, 1), (4, 4.0, 4), (4, 4.0, 4), (4, 4.0, 4), (5, 5.0, 5)]
    assert simulate(2, body) == [expected, expected]


def test_a_rollback_undoes_all_that_waits() -> None:
    def body(rank: SimulatedRank) -> tuple[int, float]:
        engine, says = rank.engine(Counts()), Says()
        engine.set_judge(says)
        says.answer = None
        for _ in range(3):
            assert one_step(engine) is None
        engine.rollback()
        assert engine.resolve_step() is False
        assert not engine.state.versions.tentative
        return engine.state.step, total(engine)

    assert simulate(2, body) == [(0, 0.0)] * 2


@pytest.mark.parametrize("doubting", [(0, 1), (1,)])
def test_a_doubt_is_raised_on_all_ranks(doubting: tuple[int, ...]) -> None:
    def body(rank: SimulatedRank) -> list[str]:
        engine, says, seen = rank.engine(Counts()), Says(), []
        engine.set_judge(says)
        for bad in (False, True, False):
            if bad and rank.rank in doubting:
                says.answer, says.error = False, StateError("who knows")
            error = one_step(engine)
            says.answer, says.error = True, None
            seen.append(type(error).__name__)
        return seen

    ours, theirs = simulate(2, body)
    # If only one rank was in doubt, the other rank has committed a step that this one has not.
    after = "NoneType" if len(doubting) == 2 else "RankMismatchError"
    assert ours == ["NoneType", "StateError" if 0 in doubting else "RemoteHookError", after]
    assert theirs == ["NoneType", "StateError", after]


@pytest.mark.parametrize("answers", [(True, True, True), (True, False, True), (False, False, True), (None, None, True)])
def test_a_joined_rank_follows_the_outcome_of_the_others(answers: tuple[bool | None, ...]) -> None:
    """The rank also follows if the count of committed steps decides the collectives, and when it participates again."""

    def body(rank: SimulatedRank) -> tuple[list[tuple[int, float]], int]:
        engine, says, seen = rank.engine(Counts()), Says(), []
        engine.set_judge(says)
        for epoch in range(2):
            for number, answer in enumerate((True, *answers)):
                joined = rank.rank == 1 and number > 0
                assert one_step(engine, joined=joined) is None, (epoch, number)
                if not joined:
                    says.answer = answer
                    says.steps += answer is True
                seen.append((engine.state.step, total(engine)))
        assert one_step(engine) is None
        return seen, says.steps

    ours, theirs = simulate(2, body)
    assert ours == theirs


def test_a_joined_rank_saves_a_presumed_step_and_takes_it_back_if_it_was_skipped() -> None:
    def body(rank: SimulatedRank) -> list[int]:
        engine, says = rank.engine(Counts()), Says()
        engine.set_judge(says)
        saved = []
        for used in (True, False, True):
            joined = rank.rank == 1
            assert one_step(engine, joined=joined) is None
            says.answer = used if not joined else None
            says.steps += used and not joined
            saved.append(state_dict(engine.state)["step"])
        assert one_step(engine) is None
        return [*saved, engine.state.step, says.steps]

    assert simulate(2, body) == [[1, 1, 2, 2, 2], [1, 2, 2, 2, 2]]


class Eager(Reduction):
    """Its ``run`` is no generator function. It raises before a generator exists."""

    name, lossy = "eager", True

    def run(self, bucket: Bucket, ctx: Any) -> Iterator[Any]:
        if ctx.rank == 1 and ctx.step == 1 and not bucket.buffer.is_meta:
            raise ArithmeticError("at once")
        return self.rest(bucket)

    def rest(self, bucket: Bucket) -> Iterator[Any]:
        yield AllReduce(bucket.buffer)


def test_a_reduction_that_raises_before_it_is_a_generator_is_heard_of() -> None:
    def body(rank: SimulatedRank) -> list[str]:
        engine, seen = rank.engine(Eager()), []
        for _ in range(2):
            for i in range(2):
                engine.submit(Bucket.from_tensors({f"w{i}": torch.ones(4)}, index=i, is_last=i == 1))
            seen.append(type(engine.finish()).__name__)
        return seen

    assert simulate(2, body) == [["NoneType", "RemoteHookError"], ["NoneType", "ArithmeticError"]]


@pytest.mark.parametrize("ends", [True, False])
def test_an_outcome_has_one_life(ends: bool) -> None:
    def body(rank: SimulatedRank) -> tuple[list[Progress], list[bool], int]:
        engine, says = rank.engine(Counts()), Says()
        engine.set_judge(says)
        says.answer = None
        engine.submit(Bucket.from_tensors({"w": torch.ones(4)}))
        outcome = engine.outcome
        life = [outcome.progress]
        engine.set_on_reduced(lambda bucket: life.append(outcome.progress))
        assert engine.finish() is None
        life.append(outcome.progress)
        assert engine.resolve_step() is None, "its gradients wait"
        life.append(outcome.progress)
        one_step(engine)  # a second step while the first is pending
        life.append(outcome.progress)
        tentative = [engine.state.versions.tentative]
        says.answer = ends
        assert engine.resolve_step() is ends
        tentative.append(engine.state.versions.tentative)
        return [*life, outcome.progress, engine.outcome.progress], tentative, engine.state.step

    life = [Progress.OPEN] * 2 + [Progress.DECIDED] * 2 + [Progress.RESOLVED] * 4
    assert simulate(2, body)[1] == (life, [True, False], 2 if ends else 0)


def test_a_step_that_never_finishes_was_never() -> None:
    def body(rank: SimulatedRank) -> tuple[Progress, bool, int]:
        engine = rank.engine(Counts())
        engine.submit(Bucket.from_tensors({"w": torch.ones(4)}))
        outcome = engine.outcome
        engine.abandon()
        assert one_step(engine) is None
        engine.resolve_step()
        return outcome.progress, engine.in_step, engine.state.step

    assert simulate(2, body) == [(Progress.RESOLVED, False, 1)] * 2


@pytest.mark.parametrize("reduction", [Counts, Plain])
def test_ranks_with_other_buckets_get_an_error_though_their_messages_have_equal_sizes(
    reduction: type[Reduction],
) -> None:
    shapes = {0: [(2, 3), (4,)], 1: [(2, 3), (2,), (2,)]}

    def body(rank: SimulatedRank) -> tuple[list[str], int]:
        engine, seen = rank.engine(reduction()), []
        for mine in (shapes[0], shapes[rank.rank % 2], shapes[1], [(6,), (4,)] if rank.rank else [(3, 2), (4,)]):
            engine.submit(Bucket.from_tensors({str(i): torch.ones(shape) for i, shape in enumerate(mine)}))
            seen.append(type(engine.finish()).__name__)
        engine.resolve_step()
        return seen, engine.state.step

    assert simulate(3, body) == [(["NoneType", "RankMismatchError", "NoneType", "RankMismatchError"], 2)] * 3


def test_ranks_may_give_parameters_other_names() -> None:
    def body(rank: SimulatedRank) -> BaseException | None:
        engine = rank.engine(Plain())
        engine.submit(Bucket.from_tensors({f"w{rank.rank}": torch.ones(4)}))
        return engine.finish()

    assert simulate(2, body) == [None, None]


def test_ranks_that_judge_a_step_differently_get_an_error() -> None:
    """Their optimizers have made equally many steps, but their states differ."""

    def body(rank: SimulatedRank) -> list[str]:
        engine, says, seen = rank.engine(Counts()), Says(), []
        engine.set_judge(says)
        for number in range(3):
            seen.append(type(one_step(engine)).__name__)
            says.answer = number != 0 or rank.rank == 0
            says.steps += 1
        return seen

    assert simulate(2, body) == [["NoneType", "RankMismatchError", "RankMismatchError"]] * 2


@pytest.mark.parametrize("before", [0, 1])
def test_a_step_that_is_open_when_another_state_is_loaded_is_no_part_of_it(before: int) -> None:
    def body(rank: SimulatedRank) -> tuple[int, float]:
        engine, says = rank.engine(Counts()), Says()
        engine.set_judge(says)
        for _ in range(2):
            assert one_step(engine) is None
        saved = state_dict(engine.state)
        says.answer = None
        for _ in range(before + 1):
            assert one_step(engine) is None
        load_state_dict(engine.state, saved)
        says.answer = True
        assert one_step(engine) is None
        engine.resolve_step()
        return engine.state.step, total(engine)

    assert simulate(2, body) == [(3, 3.0)] * 2


def test_a_loss_scale_that_is_no_number_is_raised_at_the_end_of_the_step_on_all_ranks() -> None:
    def body(rank: SimulatedRank) -> list[str]:
        engine, seen = rank.engine(Counts()), []
        for number in range(3):
            scale = float("inf") if number == 1 and rank.rank == 0 else 2.0
            engine.set_loss_scale(lambda scale=scale: scale)
            seen.append(type(one_step(engine)).__name__)
        engine.resolve_step()
        return [*seen, str(engine.state.step)]

    assert simulate(2, body) == [["NoneType", kind, "NoneType", "2"] for kind in ("ValueError", "RemoteHookError")]


@pytest.mark.parametrize("method", ["begin_period", "finish_step", "used", "doubt", "clock"])
def test_a_judge_that_raises_on_one_rank_fails_the_step_on_all(method: str) -> None:
    class Raises(Says):
        armed = False

        def __getattribute__(self, name: str) -> Any:
            if name == method and object.__getattribute__(self, "armed"):
                raise ArithmeticError("the judge")
            return object.__getattribute__(self, name)

    def body(rank: SimulatedRank) -> list[str]:
        engine, judge, seen = rank.engine(Counts()), Raises(), []
        engine.set_judge(judge)
        for number in range(5):
            judge.armed = rank.rank == 1 and number == 2
            seen.append(type(one_step(engine)).__name__)
        return seen

    ours, theirs = simulate(2, body)
    bad = [number for number, kind in enumerate(theirs) if kind == "ArithmeticError"]
    assert bad == [3 if method == "finish_step" else 2], theirs
    assert ours[bad[0]] == "RemoteHookError", ours
    assert ours[:2] == theirs[:2] == ["NoneType"] * 2


@pytest.mark.parametrize("method", ["used", "clock"])
def test_a_judge_that_raises_while_a_joined_rank_asks_reaches_it(method: str) -> None:
    class Raises(Says):
        armed = False

        def used(self) -> bool | None:
            if self.armed and method == "used":
                raise ArithmeticError("the judge")
            return super().used()

        def clock(self) -> int:
            if self.armed and method == "clock":
                raise ArithmeticError("the judge")
            return super().clock()

    def body(rank: SimulatedRank) -> list[str]:
        engine, judge, seen = rank.engine(Counts()), Raises(), []
        engine.set_judge(judge)
        for number in range(3):
            judge.armed = rank.rank == 0 and number == 2
            seen.append(type(one_step(engine, joined=rank.rank == 1 and number == 1)).__name__)
        return seen

    assert simulate(2, body) == [
        ["NoneType", "NoneType", "ArithmeticError"],
        ["NoneType", "NoneType", "RemoteHookError"],
    ]


# -- the status message

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finiteness_is_right_although_the_sum_overflows(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    for numbers in ([], [1.0, -2.0], [largest] * 9, [-largest] * 9, [largest, -largest] * 3):
        assert finiteness(torch.tensor(numbers, dtype=dtype)) == 0, numbers
    for numbers in ([1.0, INF], [-INF, INF], [-INF] * 3, [NAN, 1.0], [largest] * 9 + [NAN], [INF, *[-largest] * 3]):
        assert math.isnan(finiteness(torch.tensor(numbers, dtype=dtype))), numbers


class TwoRounds(Reduction):
    """Sends a second round so small that it waits for the drain."""

    name, lossy = "two_rounds", True

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        yield AllReduce(bucket.buffer)
        yield AllReduce(ctx.scratch("later", (2,), device=bucket.device).zero_())


class AsManyRounds(TwoRounds):
    """Sends as many rounds as the name of the bucket's first parameter says."""

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
    """Return the messages that rank 0 starts, by elements, and its waits, for one step of some buckets. The status has
    three elements.
    """
    log: dict[int, list[str]] = {0: [], 1: []}
    starting, waiting = Batch.start, Batch.wait

    def start(self: Batch) -> None:
        log[self._messenger.transport.rank].append(f"start {sum(r.tensor.numel() for r in self._requests)}")
        starting(self)

    def wait(self: Batch, timeout: float | None) -> None:
        if self._messages:
            log[self._messenger.transport.rank].append("wait")
        waiting(self, timeout)

    monkeypatch.setattr(Batch, "start", start)
    monkeypatch.setattr(Batch, "wait", wait)

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


def test_the_status_travels_with_the_last_messages_if_no_code_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    for reduction in (Plain(), WireCast(Plain(), "bf16")):
        assert events(reduction, False, monkeypatch) == ["start 64", "start 128", "start 3", "wait", "wait", "wait"]


def test_the_status_follows_the_drain_if_code_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    late = ["start 192", "wait", "start 2", "start 2", "wait", "wait", "start 3", "wait"]
    assert events(TwoRounds(), False, monkeypatch) == late
    assert events(TwoRounds(), True, monkeypatch) == late
    # A callback may fail, and the other ranks must learn of it. The engine therefore ends the first bucket at once.
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
        return engine.finish(), engine.resolve_before_next_step()

    def early(self: Plain, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        if ctx.rank == 1 and bucket.index == 1 and not bucket.buffer.is_meta:
            raise ArithmeticError("early")
        yield AllReduce(bucket.buffer)

    for reduction in (Further(), Plain()):  # a subclass may fail after its average, so its status follows the drain
        if type(reduction) is Plain:
            monkeypatch.setattr(Plain, "run", early)
        (others, kept), (own, own_kept) = simulate(2, body)
        assert isinstance(others, RemoteHookError)
        assert isinstance(own, ArithmeticError)
        assert not kept
        assert not own_kept


class Quiet(Reduction):
    """Sends no request, and fails on rank 1."""

    name, lossy = "quiet", True

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        if ctx.rank == 1 and not bucket.buffer.is_meta:
            raise ArithmeticError("alone")
        yield from ()


def test_a_rank_that_fails_in_a_step_without_messages_sends_none() -> None:
    def body(rank: SimulatedRank) -> BaseException | None:
        engine = rank.engine(Quiet())
        engine.submit(Bucket.from_tensors({"w": torch.ones(4)}))
        return engine.finish()

    others, own = simulate(2, body)
    assert others is None
    assert isinstance(own, ArithmeticError)


class Halves(Reduction):
    """Gathers bytes, and fails on rank 1 at the chosen point."""

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
def test_a_late_failure_leaves_nan_on_every_rank(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, a scaler must skip the step on all ranks or on none. Gathered bytes alone show no failure."""
    monkeypatch.setattr("ch_core.engine.outcome.is_asynchronous", lambda device: True)
    monkeypatch.setattr("ch_core.engine.engine.is_asynchronous", lambda device: True)

    def body(rank: SimulatedRank) -> tuple[BaseException | None, list[bool], list[float]]:
        engine, found = rank.engine(Halves(where)), []
        for i in range(2):
            numbers = {f"w{i}": torch.full((2, 2), -0.0), f"v{i}": torch.full((3,), 2.0)}
            found.append(Bucket.from_tensors(numbers, index=i, is_last=i == 1))
            engine.submit(found[-1])
        error = engine.finish()
        assert not engine.step.submitted
        spoilt = [bool(bucket.view(p).isnan().any()) for bucket in found for p in bucket.params]
        return error, spoilt, torch.cat([bucket.buffer for bucket in found]).tolist()

    for error, spoilt, numbers in simulate(2, body):
        assert error is None, "it is told when the next step begins"
        assert spoilt == [where != "nowhere"] * 4
        if where == "nowhere":
            assert list(map(str, numbers)) == ["-0.0"] * 4 + ["2.0"] * 3 + ["-0.0"] * 4 + ["2.0"] * 3, "to the bit"
