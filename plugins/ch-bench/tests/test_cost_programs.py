"""The programs of the cost table and the scale tables, with tiny shapes."""

from pathlib import Path

import pytest

import commhooks
from ch_bench import record
from ch_bench.cost import scale, table
from ch_bench.pytorch_hooks import PYTORCH


@pytest.mark.gloo
@pytest.mark.timeout(240)
def test_the_cost_table_takes_a_step_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "measured", lambda: tmp_path)
    table.main(["powersgd(rank=4)", "quant8", "--small", "--record"])
    lines = [line for line in (tmp_path / "cost-table.md").read_text().splitlines() if line.startswith("|")][2:]
    ours, alone = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    assert ours[0] == "`powersgd(rank=4)`"
    assert all(float(cell) > 0 for cell in ours[1:4])  # before, waiting, after
    assert "…" in ours[6]
    assert int(ours[7]) > 100
    assert int(ours[8]) > 0
    assert alone[0] == "`quant8`"
    assert alone[5:7] == ["", ""]  # PyTorch has no such hook on a CPU


def test_the_cost_table_has_every_registered_hook() -> None:
    found = table.hooks()
    for kind in ("reduction", "wrapper"):
        assert {spec.example or spec.name for spec in commhooks.list_hooks(kind=kind)} <= {*found}
    assert {*PYTORCH} <= {*found}


def test_own_work_and_planning_are_told() -> None:
    for found in (
        scale.own_work(["quant8"], (2, 8), 1 << 12),
        scale.planning(["quant8"], (2, 8), scale.GPTS[1]),
    ):
        [line] = found.splitlines()[2:]
        assert all(float(cell) > 0 for cell in line.split("|")[2:4])
