"""The tables of `programs.links.far` say what was measured, and one short run measures."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs.links import far, predicted

from ch_bench.links import netns
from ch_bench.links.link import Link

NEAR, FAR, OTHER = (Link.parse(words) for words in ("200mbit,0.4ms", "200mbit,80.4ms", "50mbit,80.4ms"))
REASON = netns.why_not(NEAR)


def test_round_trips_are_differences_between_links_of_one_rate() -> None:
    cell = (1, "quant4")
    found = {NEAR: {cell: [0.05, 0.07]}, FAR: {cell: [0.29, 0.31]}, OTHER: {cell: [9.0, 9.0]}}
    lines = far.trips_table(found).splitlines()
    assert lines[0] == "| hook | buckets | 200mbit,80.4ms against 200mbit,0.4ms |"
    assert lines[2] == "| `quant4` | 1 | 3.0 |"
    assert far.trips_table({FAR: found[FAR], OTHER: found[OTHER]}) == ""


def test_a_slower_cell_is_marked_and_compared_with_the_earlier_installation() -> None:
    now = {(1, "quant4"): [0.3, 0.3], (1, far.BASE): [0.2, 0.2]}
    before = {(1, "quant4"): [0.6, 0.6], (1, far.BASE): [0.2, 0.2]}
    lines = far.times_table([before, now]).splitlines()
    assert lines[2].startswith("| `quant4` | 1 | 300 (300–300) | **1.50 (1.50–1.50)** | 600 (600–600) | 0.500")
    assert lines[3].startswith("| `torch fp16` | 1 | 200 (200–200) | 1.00 (1.00–1.00) |")


def run(program: str, *words: str, codes: tuple[int, ...] = (0,)) -> str:
    words = (sys.executable, "-m", f"programs.links.{program}", *words)
    folder = Path(far.__file__).parents[2]
    done = subprocess.run(words, capture_output=True, text=True, timeout=140, cwd=folder)
    assert done.returncode in codes, done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.timeout(150)
@pytest.mark.skipif(bool(REASON), reason=REASON or "runs")
def test_two_installations_take_turns_over_a_link() -> None:
    words = [
        "--buckets",
        "4",
        "--link",
        "100mbit,10ms",
        "--blocks",
        "2",
        "--hooks",
        "quant4",
        "--before",
        sys.executable,
    ]
    shown = run("far", *words)
    assert "| `quant4` | 4 |" in shown or "not measured" in shown  # on a machine too busy for the line


@pytest.mark.full
@pytest.mark.timeout(150)
@pytest.mark.skipif(bool(REASON), reason=REASON or "runs")
def test_round_trips_are_counted_in_a_trace() -> None:
    """An average in one stage takes half a round trip, and PowerSGD's two stages take one."""
    shown = run("far", "--buckets", "4", "--link", "100mbit,80ms", "--count", "--hooks", "quant4", "powersgd(rank=4)")
    assert "| `quant4` | 4 | 0.5 |\n| `powersgd(rank=4)` | 4 | 1.0 |" in shown, shown


@pytest.mark.full
@pytest.mark.timeout(150)
@pytest.mark.skipif(bool(REASON), reason=REASON or "runs")
def test_predictions_stand_beside_steps_of_the_same_link() -> None:
    words = ["--link", "100mbit,10ms", "--steps", "2", "--seconds", "3"]
    shown = run("predicted", *words, codes=(0, 1))  # 1: predictions are far off, as on a busy machine
    rows = [line for line in shown.splitlines() if line.startswith("| 100mbit,10ms |")]
    assert len(rows) == len(predicted.CELLS)
    assert all(re.search(r"\| \d+ \| \d+ \(\d+–\d+\) \|", row) for row in rows), shown
