"""The programs that make the cost table and the scale tables, with tiny shapes."""

from pathlib import Path

import pytest

from ch_bench.cost import scale, table


@pytest.mark.gloo
@pytest.mark.timeout(240)
def test_the_cost_table_takes_a_step_apart(tmp_path: Path) -> None:
    table.main(["powersgd(rank=4)", "--small", "--out", str(tmp_path / "table.md")])
    lines = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("|")][2:]
    ours, theirs = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    assert ours[0] == "`powersgd(rank=4)`"
    assert theirs[0] == "PyTorch's powersgd(rank=4)"
    assert all(float(cell) > 0 for cell in ours[1:4])  # before, waiting, after
    assert theirs[1:4] == ["", "", ""]
    assert int(ours[5]) > 100
    assert int(theirs[5]) > 0


def test_bytes_of_a_rank_against_ranks() -> None:
    """All-reduces approach twice the payload, an all-gather grows with the ranks."""
    lines = scale.planned(["allreduce", "powersgd(rank=1)", "quantize_per_tensor"], (2, 4, 8), scale.GPTS[1])[2:]
    sent = {line.split("`")[1]: [float(cell) for cell in line.split("|")[2:5]] for line in lines}
    assert sent["allreduce"][2] / sent["allreduce"][0] == pytest.approx(2 * 7 / 8, rel=0.02)
    assert sent["powersgd(rank=1)"][0] < sent["allreduce"][0] / 20
    assert sent["quantize_per_tensor"][2] / sent["quantize_per_tensor"][0] == pytest.approx(7, rel=0.02)


def test_own_work_and_views_are_told() -> None:
    [line] = scale.own_work(["quant8"], (2, 8), 1 << 12)[2:]
    assert all(float(cell) > 0 for cell in line.split("|")[2:4])
    assert "bytes of Python objects per parameter" in scale.views(scale.GPTS[1], 4)[0]
