"""Two minutes of the random campaign find nothing, and its checks find planted defects."""

import subprocess
import sys
from pathlib import Path

import pytest

import commhooks
from tests.campaign.draw import draw
from tests.campaign.run import run_case

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.full
@pytest.mark.parametrize(
    ("plant", "kind", "check"),
    [
        ("scaled", "ddp", "same bits on all ranks"),
        ("wrong", "ddp", "near the average"),
        ("wrong", "simulated", "near the average"),
        ("forgetful", "ddp", "applied + owed = sum of averages"),
        ("forgetful", "simulated", "applied + owed = sum of averages"),
    ],
)
def test_a_planted_defect_is_found(plant: str, kind: str, check: str) -> None:
    number = 13  # fp32 with two ranks leaves no rounding that could hide an error
    outcome = run_case(draw("plants", number, (kind,), f"planted:{plant}"))
    assert (outcome.status, outcome.what) == ("wrong", check), outcome


def test_a_case_is_the_same_for_ever() -> None:
    first = [draw("7", number) for number in range(50)]
    assert first == [draw("7", number) for number in range(50)]
    assert first != [draw("8", number) for number in range(50)]


def test_every_expression_of_two_levels_and_of_gathers_can_be_built() -> None:
    cases = [draw("expressions", number, ("levels", "levels_simulated", "outer", "gather")) for number in range(2000)]
    gathers = {case.gather_expr for case in cases if case.gather}
    for start in ("quant", "two_level("):
        assert any(expr.startswith(start) for expr in gathers), start
    reduced = {case.expr for case in cases if case.kind != "gather"}
    for expr in reduced | {case.handed_expr for case in cases if case.handed} | gathers:
        assert commhooks.create(expr).reduction is not None, expr


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_two_minutes_with_a_fixed_seed() -> None:
    # At most as many cases as were tried. The number in two minutes depends on the machine.
    command = [sys.executable, "-m", "tests.campaign", "--seed", "2026-11-28", "--minutes", "2", "--cases", "250"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290)
    assert run.returncode == 0, run.stdout[-20000:]
