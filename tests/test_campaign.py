"""Three minutes of the random campaign with a fixed seed find every planted fault and no other."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def campaign(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.campaign", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


@pytest.mark.full
@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("plant", "kind", "found"),
    [
        ("scaled", "ddp", "same bits on all ranks"),
        ("wrong", "ddp", "near the average"),
        ("wrong", "simulated", "near the average"),
        ("forgetful", "ddp", r"applied \+ owed = sum of averages"),
        ("forgetful", "simulated", r"applied \+ owed = sum of averages"),
        (
            "dying",
            "ddp",
            "exit code|TransportError",
        ),  # of the dead rank or its peer
        ("orphaning", "ddp", "a process outlived its case"),
    ],
)
def test_a_planted_defect_is_found(plant: str, kind: str, found: str, tmp_path: Path) -> None:
    record = tmp_path / "record"
    number = {"ddp": "0", "simulated": "4"}[kind]  # fp32 with two ranks leaves no rounding that could hide an error
    arguments = ["--seed", "plants", "--case", number, "--kinds", kind, "--hook", f"planted:{plant}"]
    run = campaign(*arguments, "--record", str(record), timeout=95)
    assert run.returncode == 1, run.stdout[-3000:]
    row = json.loads(record.read_text())
    assert re.search(found, row["what"]), row
    assert f"--seed plants --case {number}" in run.stdout


@pytest.mark.full
@pytest.mark.timeout(150)
def test_a_hang_is_found_and_does_not_stop_the_campaign(tmp_path: Path) -> None:
    record = tmp_path / "record"
    arguments = ["--seed", "plants", "--case", "0", "--case", "3", "--kinds", "ddp", "--deadline", "40"]
    run = campaign(*arguments, "--hook", "planted:hanging", "--record", str(record), timeout=145)
    assert run.returncode == 1, run.stdout[-3000:]
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert len(rows) == 2, rows
    assert all(row["status"] in {"hang", "error"} for row in rows), rows
    assert "time.sleep" in rows[0]["detail"] or "HookTimeoutError" in rows[0]["what"], rows[0]


def test_a_case_is_the_same_for_ever() -> None:
    from tests.campaign.draw import draw

    first = [draw("7", number) for number in range(50)]
    assert first == [draw("7", number) for number in range(50)]
    assert first != [draw("8", number) for number in range(50)]


def test_every_expression_of_two_levels_and_of_gathers_can_be_built() -> None:
    import commhooks
    from tests.campaign.draw import draw

    cases = [draw("expressions", number, ("levels", "levels_simulated", "outer", "gather")) for number in range(2000)]
    gathers = {case.gather_expr for case in cases if case.gather}
    for start in ("quant", "two_level("):
        assert any(expr.startswith(start) for expr in gathers), start
    reduced = {case.expr for case in cases if case.kind != "gather"}
    for expr in reduced | {case.handed_expr for case in cases if case.handed} | gathers:
        assert commhooks.create(expr).reduction is not None, expr


@pytest.mark.campaign
@pytest.mark.timeout(420)
def test_three_minutes_with_a_fixed_seed() -> None:
    # At most as many cases as were tried. The number in three minutes depends on the machine.
    run = campaign("--seed", "2026-11-22", "--minutes", "3", "--cases", "400", timeout=410)
    assert run.returncode == 0, run.stdout[-20000:]
