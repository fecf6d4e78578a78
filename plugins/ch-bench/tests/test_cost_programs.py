"""The programs that make the cost table and the scale tables, with tiny shapes."""

from pathlib import Path

import pytest
import torch

import commhooks
from ch_bench.cost import passes, scale, status, table
from ch_bench.gpu_kit.models import PYTORCHS


@pytest.mark.gloo
@pytest.mark.timeout(240)
def test_the_cost_table_takes_a_step_apart(tmp_path: Path) -> None:
    table.main(["powersgd(rank=4)", "quant8", "--small", "--out", str(tmp_path / "table.md")])
    lines = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("|")][2:]
    ours, alone = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    assert ours[0] == "`powersgd(rank=4)`"
    assert all(float(cell) > 0 for cell in ours[1:4])  # before, waiting, after
    assert "…" in ours[6]
    assert int(ours[7]) > 100
    assert int(ours[8]) > 0
    assert alone[0] == "`quant8`"
    assert alone[5:7] == ["", ""]  # PyTorch has none on a CPU


def test_the_cost_table_has_every_registered_hook() -> None:
    found = table.hooks()
    for kind in ("reduction", "wrapper"):
        assert {spec.example or spec.name for spec in commhooks.list_hooks(kind=kind)} <= {*found}
    assert {*PYTORCHS} <= {*found}


@pytest.mark.gloo
@pytest.mark.timeout(240)
def test_the_cost_of_the_status_is_told_beside_pytorchs_hook(tmp_path: Path) -> None:
    status.main(["--small", "--out", str(tmp_path / "status.md")])
    lines = [line for line in (tmp_path / "status.md").read_text().splitlines() if line.startswith("| `allreduce`")]
    assert len(lines) == 4  # costs and phases, for one bucket and three
    assert all("…" in line for line in lines[:2])
    assert all(int(line.split("|")[3]) > 0 for line in lines[2:])  # submit


def test_own_work_and_planning_are_told() -> None:
    for [line] in (
        scale.own_work(["quant8"], (2, 8), 1 << 12)[2:],
        scale.planning(["quant8"], (2, 8), scale.GPTS[1])[2:],
    ):
        assert all(float(cell) > 0 for cell in line.split("|")[2:4])


@pytest.mark.gloo
@pytest.mark.timeout(120)
def test_powersgds_passes_are_timed_way_by_way(tmp_path: Path) -> None:
    passes.main(["--small", "--out", str(tmp_path / "passes.md")])
    lines = [line for line in (tmp_path / "passes.md").read_text().splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + 2 * len(passes.BLOCKS)
    assert all(len(line.split("|")) == 2 + 2 + len(passes.WAYS) + len(passes.SUMS) for line in lines)
    assert all(float(cell) > 0 for line in lines[1:] for cell in line.split("|")[3:-1])


def test_the_ways_of_powersgds_passes_are_the_same_step() -> None:
    one = passes.Passes([(256, 192)], 4, 1 << 14)
    g, old, kept = (torch.cat(part[0]).clone() for part in (one.g, one.e, one.kept))
    p, q = one.p[0].clone(), one.q[0]
    one.project()
    torch.testing.assert_close(one.p[0], q @ (g + old).mT)
    one.back()
    torch.testing.assert_close(one.made[0], one.p[0] @ (g + old), rtol=1e-4, atol=1e-6)
    new = one.p[0].clone()
    one.decode()
    torch.testing.assert_close(torch.cat(one.kept[0]), g + old - new.mT @ q)
    torch.testing.assert_close(torch.cat(one.g[0]), new.mT @ q)

    other = passes.Passes([(256, 192)], 4, 1 << 14)
    for part, value in ((other.g, g), (other.kept, kept)):
        for block, rows in zip(part[0], value.split([len(b) for b in part[0]]), strict=True):
            block.copy_(rows)
    other.p[0].copy_(p)
    other.q[0].copy_(q)
    other.carried_project()
    torch.testing.assert_close(torch.cat(other.e[0]), g + kept - p.mT @ q)
