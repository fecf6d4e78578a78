"""The programs about distant ranks resume, and their tables agree with the runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from programs.outer import race

from ch_bench.links import netns

pytestmark = [pytest.mark.full, pytest.mark.timeout(110)]
TINY = ["--width", "32", "--layers", "1", "--batch", "2", "--context", "16"]


def finished(label: str, arrived: bool, *rows: tuple[float, ...]) -> dict[str, Any]:
    settings = {"link": "50mbit", "seed": 0, "verified_bits": 48e6, "goal": 2.0, "local_step_seconds": 0.01}
    return settings | {"label": label, "arrived": arrived, "rows": list(rows)}


def test_a_run_that_does_not_arrive_gives_a_lower_bound() -> None:
    found = [
        finished("torch allreduce", True, (100, 20.0, 1e8, 2.0)),
        finished("quick", True, (200, 4.0, 1e6, 1.9)),
        finished("slow", False, (300, 30.0, 1e6, 2.5)),
    ]
    lines = race.tables(found).splitlines()
    assert "floor 1.0 s" in lines[0]
    assert lines[4] == "| quick | 1 | 4.0 | 4.00 | 5.00 × | 200 | 1.0 | 50 % |"
    assert lines[5].startswith("| torch allreduce | 1 | 20.0 | 20.00 | 1.00 × |")
    assert lines[6].startswith("| slow | 1 | > 30.0 | > 30.00 | < 0.67 × | > 300 |")


@pytest.mark.soak  # three runs of two processes between namespaces
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(netns.why_not()), reason=f"no network namespaces: {netns.why_not()}")
def test_the_race_is_run_over_a_shaped_link_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["--link", "200mbit", "--steps", "12", "--evaluate", "4", "--limit", "20", *TINY, "--out", str(tmp_path)]
    words += ["--only", "torch fp16"]
    assert race.main(words) == 0
    out = capsys.readouterr().out
    assert "| torch fp16 |" in out
    records = json.loads((tmp_path / "race.json").read_text())
    reference, half = records.values()
    assert half["rows"][-1][2] / half["rows"][-1][0] < 0.75 * reference["rows"][-1][2] / reference["rows"][-1][0]
    assert 0 < half["local_step_seconds"] < 1
    assert (tmp_path / "race-200mbit.png").exists()
    assert race.main(words) == 0
    assert "s a step alone\n" not in capsys.readouterr().out
