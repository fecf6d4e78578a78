"""``commhooks.Reducer`` over a manager averages tensors between a quorum and its vote."""

from typing import Any

import pytest
import torch

import commhooks
from ch_testing import SimulatedCluster, SimulatedDeath, SimulatedManager
from commhooks import AttachError, HookConfigError, RankMismatchError, Reducer

from .stages import TwoStage

pytestmark = pytest.mark.timeout(60)


def mine(manager: SimulatedManager, turn: int = 0) -> dict[str, torch.Tensor]:
    number = ord(manager.name) - ord("a") + 0.25 + turn
    return {"w": torch.full((3, 2), number), "b": torch.full((4,), 2 * number, dtype=torch.float64)}


def entries(reducer: Reducer) -> dict[tuple[str, str], list[float]]:
    return {(name, field): t.flatten().tolist() for name, field, t in reducer.handle.state.entries()}


def test_the_average_is_over_the_members_and_the_state_follows_the_vote() -> None:
    def body(manager: SimulatedManager) -> Any:
        reducer, kept = Reducer(TwoStage(), mine(manager), manager=manager), []
        for turn in range(3):
            manager.start_quorum()
            exchange = reducer.start(mine(manager, turn))
            exchange.advance()
            mean = exchange.wait()
            assert mean["w"].shape == (3, 2)
            assert mean["b"].dtype == torch.float64
            if turn == 1:
                manager.report_error(RuntimeError("not used"))
            kept.append((manager.should_commit(), mean["w"][0, 0].item(), entries(reducer)))
        return kept, reducer.stats()["steps"], reducer.world_size

    with SimulatedCluster() as cluster:
        found = cluster.run(dict.fromkeys("ab", body))
    for rows, steps, members in found.values():
        assert [committed for committed, _, _ in rows] == [True, False, True]
        assert [mean for _, mean, _ in rows] == [0.5, 1.5, 2.5]
        assert rows[0][2] == rows[1][2] != rows[2][2]
        assert steps == 3
        assert members == 2
    assert found["a"][0][2][2]["w", "seen"] == found["b"][0][2][2]["w", "seen"]


@pytest.mark.parametrize("number", range(5))
def test_a_lost_peer_raises_nothing_and_the_round_is_dropped(number: int) -> None:
    """The peer leaves before any of the collectives: agreement, then two stages of two buckets with the status."""

    def dies(manager: SimulatedManager, n: int) -> None:
        if manager.name == "b" and manager.current_step() == 1 and n == number:
            manager.die()

    def body(manager: SimulatedManager) -> Any:
        reducer, votes = Reducer(TwoStage(), mine(manager), manager=manager), []
        while manager.current_step() < 3:
            manager.start_quorum()
            before = entries(reducer)
            reducer.average(mine(manager, manager.current_step()))
            votes.append(manager.should_commit())
            assert votes[-1] or entries(reducer) == before
        return votes, reducer.tensors["w"][0, 0].item(), entries(reducer)["w", "seen"]

    with SimulatedCluster() as cluster:
        cluster.on_collective = dies
        found = cluster.run(dict.fromkeys("abc", body))
    assert found["b"] is None
    assert found["a"][0] == found["c"][0] == [True, False, True, True]
    assert found["a"][1:] == found["c"][1:]


def test_a_newcomer_receives_the_shared_state() -> None:
    def leaves(manager: SimulatedManager, n: int) -> None:
        if manager.name == "b" and manager.current_step() == 2 and n == 0 and not back:
            back.append(True)
            manager.die(return_at=4)

    back: list[bool] = []

    def lives(manager: SimulatedManager) -> Any:
        try:
            return rounds(manager)
        except SimulatedDeath:
            return rounds(manager.cluster.join("b"))

    def rounds(manager: SimulatedManager) -> Any:
        reducer, states = Reducer(TwoStage(), mine(manager), manager=manager), {}
        while manager.current_step() < 6:
            manager.start_quorum()
            reducer.average(mine(manager, manager.current_step()))
            if manager.should_commit():
                states[manager.current_step()] = entries(reducer)
        return states

    with SimulatedCluster() as cluster:
        cluster.on_collective = leaves
        found = cluster.run(dict.fromkeys("ab", lives))
    assert min(found["b"]) == 5
    for step, state in found["b"].items():
        assert state["w", "seen"] == found["a"][step]["w", "seen"]


def test_a_member_that_differs_gets_an_error_and_continues() -> None:
    def body(manager: SimulatedManager) -> Any:
        names = {"w": torch.ones(2)}
        odd = Reducer("allreduce", names, manager=manager, facts={"turn": [manager.name]})
        manager.start_quorum()
        with pytest.raises(RankMismatchError, match="turn"):
            odd.average(names)
        assert not manager.should_commit()
        odd.close()
        manager.start_quorum()
        mean = Reducer("allreduce", names, manager=manager).average(names)["w"].tolist()
        return mean, manager.should_commit()

    with SimulatedCluster() as cluster:
        assert list(cluster.run(dict.fromkeys("ab", body)).values()) == [([1.0, 1.0], True)] * 2


def test_a_reducer_s_own_rounds_are_its_steps() -> None:
    """Two reducers alternate. Each counts its own rounds for its warm-up."""

    def body(manager: SimulatedManager) -> list[list[int]]:
        seen: list[list[int]] = [[], []]

        class Notes(TwoStage):
            turn = 0

            def run(self, bucket: Any, ctx: Any) -> Any:
                if not bucket.buffer.is_meta:
                    seen[self.turn].append(ctx.step)
                yield from super().run(bucket, ctx)

        reducers = []
        for turn in range(2):
            notes = Notes()
            notes.turn = turn
            tensors = {f"w{turn}": torch.ones(2)}
            rounds = (lambda step: (step + 1) // 2, lambda step: step // 2)[turn]
            reducers.append(Reducer(notes, tensors, manager=manager, rounds=rounds))
        for step in range(6):
            manager.start_quorum()
            reducers[step % 2].average()
            assert manager.should_commit()
        return seen

    with SimulatedCluster() as cluster:
        assert cluster.run(dict.fromkeys("ab", body))["a"] == [[0, 1, 2], [0, 1, 2]]


def test_refusals() -> None:
    with SimulatedCluster() as cluster:
        manager, tensors = cluster.join("a"), {"w": torch.ones(2)}
        with pytest.raises(HookConfigError, match="exclude each other"):
            Reducer("allreduce", tensors, manager=manager, transport=object())  # type: ignore[arg-type]
        with pytest.raises(HookConfigError, match="its own time-outs"):
            Reducer("allreduce", tensors, manager=manager, timeout=1.0)
        with pytest.raises(AttachError, match="expected a manager"):
            Reducer("allreduce", tensors, manager=object())
        reducer = Reducer("allreduce", tensors, manager=manager)
        with pytest.raises(HookConfigError, match="no move"):
            reducer.move(None)  # type: ignore[arg-type]
        with pytest.raises(AttachError, match="no quorum"):
            reducer.average(tensors)
        manager.start_quorum()
        assert reducer.average(tensors)["w"].tolist() == [1.0, 1.0]
        assert manager.should_commit()
        handle = reducer.handle
        reducer.close()
        assert not handle.attached
        assert isinstance(handle, commhooks.CommHook)
