"""Outer rounds over a manager. Members vote on each round, die in one, return, and start from the others' model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ch_testing
from ch_core import SimulatedRank, checksum, simulate
from ch_outer import FixedRanks, Members, OuterOptimizer, Schedule
from ch_outer.members import MemberRounds
from commhooks import AllReduce, HookConfigError, HookNotSupportedError, RankMismatchError, Reduction, StateError

from .outer_kit import adam, by_options, make, same, train, values

ch_ft = pytest.importorskip("ch_ft")
pytestmark = pytest.mark.timeout(60)
QUANT = "quant4(block=16, error_feedback=True, exempt=False)"
CASES = {
    "DiLoCo": {"every": 4, "exchange": "allreduce"},
    "four bits": {"every": 4, "exchange": QUANT},
    "PowerSGD in fragments": {
        "every": 4,
        "fragments": 2,
        "exchange": "powersgd(rank=1, min_compression_rate=1, start_iter=0)",
    },
    "overlap": {"every": 6, "fragments": 3, "overlap": 2, "mix": 0.5, "exchange": QUANT},
    "carried": {"every": 6, "fragments": 3, "overlap": 2, "mix": "carry", "exchange": QUANT},
}


class WithStatistics(nn.Sequential):
    """A model with floating-point buffers."""


def net(seed: int = 0) -> nn.Module:
    model = make(seed)
    return WithStatistics(model[0], nn.BatchNorm1d(8), *model[1:])


def shared(optimizer: OuterOptimizer) -> list[str]:
    """Return the values that all members share between two rounds: digests of start, momentum and shared state."""
    starts = [s for fragment in optimizer.rounds.shared.fragments for s in fragment.starts.values()]
    momentum = [one["momentum_buffer"] for one in optimizer.outer.state.values()]
    for fragment in optimizer.rounds.shared.fragments:
        fragment.reducer.commit()  # over fixed ranks, the last round is resolved when the next begins
    kept = [one for fragment in optimizer.rounds.shared.fragments for one in fragment.reducer.handle.state.entries()]
    q = [tensor for _, field, tensor in kept if field == "q"]
    whole = optimizer.landed % len(optimizer.rounds.shared.fragments) == 0
    buffers = list(optimizer.rounds.shared.buffers.live().values()) if whole else []  # averaged with the last fragment
    return [str((optimizer.count, optimizer.landed)), *map(checksum, [*starts, *momentum, *q, *buffers])]


def run(
    body: Callable[[Any], Any], names: str, dies: Callable[[Any, int], None] | None = None, **options: Any
) -> dict[str, Any]:
    with ch_testing.SimulatedCluster(**options) as cluster:
        cluster.on_collective = dies
        return cluster.run(dict.fromkeys(names, body))


def letter(manager: Any) -> int:
    return "abcd".index(manager.name)


@pytest.mark.parametrize("names", ["ab", pytest.param("abcd", marks=pytest.mark.full)])
@pytest.mark.parametrize("case", CASES)
def test_without_failures_it_equals_training_over_fixed_ranks(case: str, names: str) -> None:
    """Both agree to the bit, also in each rank's private values (parameters between two rounds, residuals)."""
    options = CASES[case]

    def managed(manager: Any) -> Any:
        model = net()
        optimizer = by_options(adam(model), model, ranks=Members(manager), **options)
        train(model, optimizer, letter(manager), range(15))
        found = values(model)
        optimizer.finish()
        return found, shared(optimizer)

    def fixed(rank: SimulatedRank) -> Any:
        model = net()
        optimizer = by_options(adam(model), model, ranks=FixedRanks(transport=rank.transport), **options)
        train(model, optimizer, rank.rank, range(15))
        found = values(model)
        optimizer.finish()
        return found, shared(optimizer)

    wanted = simulate(len(names), fixed)
    found = run(managed, names)
    for name, (parameters, state) in zip(names, wanted, strict=True):
        assert same(found[name][0], parameters)
        assert found[name][1] == state


def test_alone_at_rate_1_it_stays_near_the_inner_optimizer() -> None:
    """It does not agree to the bit, because start - (start - p) is not p in floating point."""

    def body(manager: Any) -> float:
        plain, model = make(), make()
        inner = adam(plain)
        outer = OuterOptimizer(
            adam(model), model, Schedule(every=2), outer=lambda p: torch.optim.SGD(p, lr=1.0), ranks=Members(manager)
        )
        train(plain, inner, 0, range(6))
        train(model, outer, 0, range(6))
        return max((a - b).abs().max().item() for a, b in zip(values(plain), values(model), strict=True))

    assert run(body, "a")["a"] < 1e-6


class Log:
    """Records the state of each member after each round."""

    def __init__(self) -> None:
        self.rounds: dict[str, dict[int, list[str]]] = {}
        self.dropped: dict[str, int] = {}

    def train(self, manager: Any, until: int, seed: int = 0, **options: Any) -> None:
        """Train until a number of rounds have landed."""
        model = net(seed)
        optimizer = by_options(adam(model), model, ranks=Members(manager), **options)
        mine = self.rounds.setdefault(manager.name, {})
        while optimizer.landed < until:
            before, attempts = optimizer.landed, optimizer.under_way
            train(model, optimizer, letter(manager), range(optimizer.count, optimizer.count + 1))
            if optimizer.landed > before:
                mine[optimizer.landed] = shared(optimizer)[1:]
                limit = options["every"] * options.get("fragments", 1)  # the exchange of another fragment may be lost
                assert 0 <= optimizer.report()["steps_alone"] < limit, "also of a start that a peer sent"
            elif attempts and not optimizer.under_way:
                self.dropped[manager.name] = self.dropped.get(manager.name, 0) + 1

    def agree(self, names: str, since: int, until: int) -> None:
        for landed in range(since, until + 1):
            held = [self.rounds[name][landed] for name in names]
            assert all(one == held[0] for one in held), landed


@pytest.mark.parametrize("async_quorum", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("case", "names", "number"),
    [
        ("DiLoCo", "ab", 1),
        ("DiLoCo", "abc", 0),
        ("four bits", "abc", 2),
        ("PowerSGD in fragments", "abc", 2),
        ("overlap", "abcd", 3),
    ],
)
def test_a_death_in_a_round_costs_that_round_and_the_one_that_comes_back_begins_at_the_start(
    case: str, names: str, number: int, async_quorum: bool
) -> None:
    log, options = Log(), CASES[case]
    returned: list[int] = []

    def dies(manager: Any, n: int) -> None:
        if manager.name == "b" and manager.current_step() == 3 and n == number and not returned:
            returned.append(manager.current_step())
            manager.die(return_at=6)

    def lives(manager: Any) -> None:
        try:
            log.train(manager, 9, **options)
        except ch_testing.SimulatedDeath:
            again = manager.cluster.join(manager.name)
            log.rounds["b"] = {}
            log.train(again, 9, seed=5, **options)

    with ch_testing.SimulatedCluster(async_quorum=async_quorum) as cluster:
        cluster.on_collective = dies
        cluster.run(dict.fromkeys(names, lives))
        history = cluster.history
    survivors = names.replace("b", "")
    log.agree(survivors, 1, 9)
    assert list(log.rounds["a"]) == list(range(1, 10))
    assert sum(step == 3 for step, _ in history) == 2  # exactly one round ran again
    assert all(sum(step == other for step, _ in history) == 1 for other in range(10) if other != 3)
    first = min(log.rounds["b"])
    assert first == 6, "it holds what the others do after the round in which it came"
    log.agree(names, first, 9)
    back = next(members for step, members in history if step == 6)
    assert ("b" in back) is not async_quorum, "it has nothing to contribute; only a synchronous quorum counts it"


def test_a_lost_round_leaves_everything_as_it_was() -> None:
    """Start, momentum and residuals stay. Inner steps continue, and the next round exchanges those of both rounds."""
    starts: dict[str, list[Any]] = {"a": [], "c": []}

    def dies(manager: Any, n: int) -> None:
        if manager.name == "b" and manager.current_step() == 3 and n == 3:
            manager.die()

    def body(manager: Any) -> None:
        model = make()
        optimizer = OuterOptimizer(adam(model), model, Schedule(every=3), exchange=QUANT, ranks=Members(manager))
        fragment = optimizer.rounds.shared.fragments[0]

        def residual() -> list[torch.Tensor]:
            return [tensor.clone() for _, _, tensor in fragment.reducer.handle.state.entries()]

        for _ in range(4):
            before = shared(optimizer)[1:], residual()
            train(model, optimizer, letter(manager), range(optimizer.count, optimizer.count + 3))
            if optimizer.count == 9:
                after = shared(optimizer)[1:], residual()
                assert before[0] == after[0]
                assert same(before[1], after[1])
                assert residual()
                delta = [s - p for s, p in zip(fragment.starts.values(), values(model), strict=True)]
                assert max(d.abs().max().item() for d in delta) > 0.02, "three steps of rate 0.01 have moved it"
        starts[manager.name] = [optimizer.landed, *shared(optimizer)]

    run(body, "abc", dies)
    assert starts["a"][0] == 3
    assert starts["a"] == starts["c"]


def test_an_error_of_one_member_is_raised_there_and_the_round_counts_nowhere() -> None:
    class Breaks(Reduction):
        name = "breaks"

        def run(self, bucket: Any, ctx: Any) -> Any:
            if ctx.rank == 1 and ctx.step == 1 and not bucket.buffer.is_meta:
                raise ValueError("of its own")
            yield AllReduce(bucket.buffer)

    def body(manager: Any) -> tuple[int, int, list[str]]:
        model = make()
        optimizer = OuterOptimizer(adam(model), model, Schedule(every=2), exchange=Breaks(), ranks=Members(manager))
        raised = 0
        for _ in range(6):
            try:
                train(model, optimizer, letter(manager), range(optimizer.count, optimizer.count + 1))
            except Exception as error:
                assert "of its own" in str(error)
                raised += 1
                if raised == 2:
                    break
        return raised, optimizer.landed, shared(optimizer)[1:]

    found = run(body, "ab")
    assert found["b"][0] == 2  # the round runs again, and raises again
    assert found["a"][1] == found["b"][1] == 1
    assert found["a"][2] == found["b"][2]


def test_members_that_differ_get_an_error() -> None:
    def body(manager: Any) -> str:
        model = make()
        optimizer = OuterOptimizer(
            adam(model),
            model,
            Schedule(every=2, mix=0.5 if manager.name == "b" else 0.0),
            exchange="allreduce",
            ranks=Members(manager),
        )
        with pytest.raises(RankMismatchError) as caught:
            train(model, optimizer, 0, range(2))
        return str(caught.value)

    assert all("outer step" in text for text in run(body, "ab").values())


def test_refusals() -> None:
    def body(manager: Any) -> None:
        model = make()
        with pytest.raises(HookConfigError, match="votes on one round after another"):
            OuterOptimizer(adam(model), model, Schedule(every=6, fragments=3, overlap=3), ranks=Members(manager))
        with pytest.raises(HookNotSupportedError, match="DDP"):
            OuterOptimizer(
                adam(model), model, Schedule(every=6), exchange=lambda state, bucket: bucket, ranks=Members(manager)
            )
        optimizer = OuterOptimizer(adam(model), model, Schedule(every=3, overlap=2), ranks=Members(manager))
        with pytest.raises(HookConfigError, match="no move"):
            optimizer.move(None)
        train(model, optimizer, 0, range(4))
        with pytest.raises(RuntimeError, match="under_way is 0"):
            optimizer.state_dict()
        train(model, optimizer, 0, range(4, 5))
        assert optimizer.state_dict()["landed"] == 1

    run(body, "a")


@pytest.mark.parametrize("stop", [4, 5, 8])
def test_all_members_resume_from_their_files_to_the_bit(stop: int) -> None:
    options: dict[str, Any] = {"every": 4, "fragments": 2, "exchange": QUANT}

    def through(manager: Any) -> Any:
        model = make()
        optimizer = by_options(adam(model), model, ranks=Members(manager), **options)
        train(model, optimizer, letter(manager), range(stop))
        disk = model.state_dict(), optimizer.state_dict(), manager.current_step()
        disk = copy.deepcopy(disk)
        train(model, optimizer, letter(manager), range(stop, 14))
        return disk, values(model), shared(optimizer)

    first = run(through, "ab")

    def resumed(manager: Any) -> Any:
        (weights, state, step), _, _ = first[manager.name]
        model = make(seed=3)
        optimizer = by_options(adam(model), model, ranks=Members(manager), **options)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        manager._step = step  # torchft: manager.load_state_dict()
        train(model, optimizer, letter(manager), range(stop, 14))
        return values(model), shared(optimizer)

    for name, (parameters, state) in run(resumed, "ab").items():
        assert same(parameters, first[name][1])
        assert state == first[name][2]


@pytest.mark.parametrize("async_quorum", [True, False])
@pytest.mark.parametrize("case", ["PowerSGD in fragments", "overlap"])
def test_all_end_after_the_same_round_with_the_same_parameters(case: str, async_quorum: bool) -> None:
    """This includes a member that dies in its `finish` and returns into the others' `finish`."""
    dead: list[str] = []
    last = 5 + (case == "overlap")  # committed rounds before the round of `finish`: the meeting, four, one in flight

    def dies(manager: Any, n: int) -> None:
        if manager.name == "b" and manager.current_step() == last and n == 1 and not dead:
            dead.append("b")
            manager.die(return_at=last + 1)

    def ends(manager: Any, until: int) -> list[Any]:
        model = net()
        optimizer = by_options(adam(model), model, ranks=Members(manager), **CASES[case])
        while optimizer.landed < until:
            train(model, optimizer, letter(manager), range(optimizer.count, optimizer.count + 1))
        optimizer.finish()
        return [optimizer.landed, *map(checksum, model.parameters())]

    def body(manager: Any) -> list[Any]:
        try:
            return ends(manager, 4)
        except ch_testing.SimulatedDeath:
            return ends(manager.cluster.join(manager.name), 0)

    found = run(body, "abc", dies, async_quorum=async_quorum)
    assert dead
    assert found["a"] == found["b"] == found["c"]


@pytest.mark.parametrize("landed", [0, 3], ids=["as far", "behind"])
@pytest.mark.parametrize("kind", ["buffers", "starts"])
def test_the_state_of_another_model_names_the_difference_and_changes_nothing(kind: str, landed: int) -> None:
    def body(manager: Any) -> None:
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        rounds = OuterOptimizer(adam(model), model, Schedule(every=2), ranks=Members(manager)).rounds
        assert isinstance(rounds, MemberRounds)
        given = {**rounds.hand_over(), "landed": landed, "goal": 7}
        name, where = ("1.running_mean", given["buffers"]) if kind == "buffers" else ("0.bias", given["starts"][0])
        for other in ({name: torch.ones(5)}, {name: torch.ones(1)}, {}):  # other shapes, one that broadcasts, and none
            where.pop(name)
            where |= other
            before = values(model)
            with pytest.raises(StateError, match=f"'{name}'"):
                rounds.take_over(given)
            assert same(values(model), before)
            assert rounds.hand_over()["goal"] is None

    run(body, "a")


def test_a_peer_with_another_schedule_is_refused() -> None:
    def body(manager: Any) -> None:
        model = make()
        rounds = OuterOptimizer(adam(model), model, Schedule(every=2), ranks=Members(manager)).rounds
        assert isinstance(rounds, MemberRounds)
        given = rounds.hand_over()
        with pytest.raises(StateError, match=r"the peers use every=3, .* has every=2, "):
            rounds.take_over({**given, "schedule": {**given["schedule"], "every": 3}})

    run(body, "a")
