"""Rows of the fault table that every change must keep, one of each kind, with this project's hooks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from . import run

HERE = Path(__file__).parent

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(420)]

# row -> (allowed outcomes, text in the error of every surviving rank)
CHOSEN = {
    "B1.3": ("typed error", ["RemoteHookError", "ValueError"]),  # raises on one rank, and the next step is right
    "B3.1": ("typed error", ["HookResultError"]),  # None
    "B3.13": ("right", ["gradient right"]),  # a strided result
    "B4.2": ("typed error", ["RankMismatchError"]),  # fp16 against bf16
    "B5.2": ("right", ["right: recovers at the next step"]),  # NaN
    "B6.1": ("typed error", ["TransportError"]),  # SIGKILL
    "B6.2": ("typed error", ["HookTimeoutError"]),  # SIGSTOP
    "B11.2": ("typed error", ["StateError"]),  # one state, two models
}


QUICK = ("B4.2", "B6.1")


@pytest.mark.full
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.full) for n in CHOSEN if n not in QUICK)])
def test_a_fault_ends_as_promised(name: str) -> None:
    result = run.run_case(name, "ours")
    outcome, texts = CHOSEN[name]
    assert result["outcome"] == outcome, result
    said = sorted(rank["text"] for rank in result["ranks"].values())
    assert [any(text.startswith(t) for t in texts) for text in said] == [True] * len(said), said
    if name == "B1.3":
        assert all("afterwards: works" in rank["seen"] for rank in result["ranks"].values())
    if name == "B6.1":  # at once, not after the group's timeout
        assert all(rank["seconds"] < 8.0 * result["slowness"] for rank in result["ranks"].values())


@pytest.mark.full
@pytest.mark.parametrize("name", ["B4.4", "B5.2", "B6.3", "B11.1"])
def test_a_fault_of_the_quantized_exchange_ends_as_promised(name: str) -> None:
    result = run.run_case(name, "ours", "quant4")
    assert result["outcome"] == ("right" if name == "B5.2" else "typed error"), result


def test_the_record_has_enough_rows_and_ours_keep_the_promise() -> None:
    """Table and page in docs/ come from the record of a whole run."""
    results = json.loads(run.RECORD.read_text())
    rows = {result["row"] for result in results}
    assert len(rows) >= 30
    assert {(r, s) for r in rows for s in ("torch", "ours")} == {(r["row"], r["side"]) for r in results}
    assert [r["row"] for r in results if r["side"] == "ours" and r["outcome"] not in ("right", "typed error")] == []
    assert run.TABLE.read_text() == run.table(results)
    assert run.PAGE.read_text() == run.page(results)
    names = subprocess.run([sys.executable, HERE / "run.py", "--help"], capture_output=True, text=True, timeout=60)
    assert "--row" in names.stdout
    assert not [r["row"] for r in results if any("/" + home in json.dumps(r) for home in ("home/", "root/"))]
