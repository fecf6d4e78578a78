"""Figures of exchanges over time."""

import copy
import csv
from collections.abc import Mapping
from pathlib import Path

import pytest

from ch_core import SimulatedRank, simulate
from ch_outer import FixedRanks, OuterOptimizer, Schedule

from .outer_kit import adam, alone, make, train


def test_each_exchange_is_recorded_on_one_rank(tmp_path: Path) -> None:
    path = tmp_path / "rounds.csv"

    def body(rank: SimulatedRank) -> tuple[list[float], float]:
        model = make()
        optimizer = OuterOptimizer(
            adam(model), model, Schedule(every=2, fragments=2), ranks=FixedRanks(transport=rank.transport)
        )
        with optimizer.record(path):
            train(model, optimizer, rank.rank, range(4))
        train(model, optimizer, rank.rank, range(4, 6))
        report = optimizer.report()
        return report["apart"], optimizer.stats()["payload_bytes"] * 4 / 6

    apart, sent = simulate(2, body)[0]
    rows = list(csv.DictReader(path.open()))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [float(row["inner_steps"]) for row in rows] == [1, 2, 3, 4]  # a fragment takes its turn in every step
    assert [float(row["apart"]) for row in rows] == apart[:4]
    assert sum(float(row["payload_bytes"]) for row in rows) == pytest.approx(sent)
    assert all(0 < float(row["exchange_seconds"]) < 60 for row in rows)


def test_steps_that_no_other_rank_has_are_those_of_the_loaded_run() -> None:
    model = make()
    optimizer = OuterOptimizer(adam(model), model, Schedule(every=4), ranks=FixedRanks(transport=alone()))
    train(model, optimizer, 0, range(5))
    assert optimizer.report()["steps_alone"] == 1
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 0, range(5, 15))
    assert optimizer.report()["steps_alone"] == 3
    optimizer.load_state_dict(saved)
    assert optimizer.report()["steps_alone"] == 1
    train(model, optimizer, 0, range(5, 7))
    optimizer.finish()
    resumed = make()
    later = OuterOptimizer(adam(resumed), resumed, Schedule(every=4), ranks=FixedRanks(transport=alone()))
    later.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.report()["steps_alone"] == later.report()["steps_alone"] == 0


def test_a_writer_that_raises_ends_the_recording_and_not_the_training(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def write(number: int, figures: Mapping[str, float]) -> None:
        calls.append(number)
        if number == 3:
            raise OSError("the disk is full")

    def body(rank: SimulatedRank) -> int:
        model = make()
        optimizer = OuterOptimizer(adam(model), model, Schedule(every=1), ranks=FixedRanks(transport=rank.transport))
        recorder = optimizer.record(write, every=2)
        train(model, optimizer, rank.rank, range(7))
        recorder.close()
        return optimizer.landed

    assert simulate(2, body) == [7, 7]
    assert calls == [1, 3] and "its writer raised" in caplog.text
    with pytest.raises(ValueError, match="at least 1"):
        simulate(1, lambda rank: _record_never(rank))


def _record_never(rank: SimulatedRank) -> None:
    model = make()
    OuterOptimizer(adam(model), model, Schedule(every=1), ranks=FixedRanks(transport=rank.transport)).record(
        print, every=0
    )
