"""Bytes, status, agreement and memory as the number of ranks grows, measured with few ranks."""

from pathlib import Path

import pytest

from ch_bench import record
from ch_bench.cost import ranks


def numbers(table: str) -> list[list[float]]:
    return [[float(cell) for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_bytes_of_a_rank_against_ranks() -> None:
    """All-reduces approach twice the payload. An all-gather grows with the ranks."""
    found = ranks.planned(["allreduce", "powersgd(rank=1)", "quantize_per_tensor"], (2, 4, 8), (2, 192, 96, 128))
    lines = found.splitlines()[2:]
    sent = {line.split("`")[1]: [float(cell) for cell in line.split("|")[2:5]] for line in lines}
    assert sent["allreduce"][2] / sent["allreduce"][0] == pytest.approx(2 * 7 / 8, rel=0.02)
    assert sent["powersgd(rank=1)"][0] < sent["allreduce"][0] / 20
    assert sent["quantize_per_tensor"][2] / sent["quantize_per_tensor"][0] == pytest.approx(7, rel=0.02)


def test_the_status_is_one_number_a_rank() -> None:
    for world, payload, sent, texts in numbers(ranks.status((2, 4))):
        assert payload == 4 * (world + 1)
        assert sent == round(2 * payload * (world - 1) / world)
        assert texts == 512 * world


def test_ranks_that_agree_read_one_digest_each() -> None:
    """This holds for any number of ranks. Rank 0 reads the digests of all ranks."""
    found = numbers(ranks.agreeing((2, 4, 8), ranks.SMALL))
    calls, bytes_ = [row[2] for row in found], [row[4] for row in found]
    assert len(set(calls)) == len(set(bytes_)) == 1
    first, _, third = (row[5] for row in found)
    assert third < 8 * first
    assert all(row[6] > row[5] for row in found)


@pytest.mark.full
def test_all_of_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "measured", lambda: tmp_path)
    ranks.main(["--small", "--record"])
    text = (tmp_path / "scale.md").read_text()
    assert text.count("### ") == 4
    assert "python -m ch_bench.cost.ranks --small" in text
