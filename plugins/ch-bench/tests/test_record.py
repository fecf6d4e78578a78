"""Records: command lines, sections of a page, and finished runs."""

from pathlib import Path

import pytest

from ch_bench import record
from ch_bench.record import FinishedRuns, command


def test_a_command_line_can_be_pasted_and_names_no_folder() -> None:
    words = ["--hooks", "quant4(rotation='hadamard')", "--out", "somewhere"]
    assert command("ch_bench.x", words) == "python -m ch_bench.x --hooks 'quant4(rotation='\"'\"'hadamard'\"'\"')'"


def test_a_record_is_one_section_of_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "measured", lambda: tmp_path)
    page = tmp_path / "costs.md"
    page.write_text("# Costs\n\n## First\n\nold\n\n### Inside\n\nold, too\n\n## Second\n\nkept\n")
    record.write("costs", "First", "python -m ch_bench.x", "new")
    record.write("costs", "Third", "python -m ch_bench.y", "added")
    text = page.read_text()
    assert "old" not in text
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# Costs",
        "## First",
        "## Second",
        "## Third",
    ]
    assert text.index("    python -m ch_bench.x") < text.index("new") < text.index("kept") < text.index("added")
    assert text.count("- date: ") == 2
    record.write("costs", "Costs", "python -m ch_bench.z", "introduction")
    assert page.read_text().startswith("# Costs\n\n    python -m ch_bench.z\n")


def test_finished_runs_are_read_again(tmp_path: Path) -> None:
    runs = FinishedRuns(tmp_path / "out" / "runs.json")
    runs.put("a", {"loss": 1.0})
    runs.put("b", {"loss": 2.0})
    assert FinishedRuns(runs.path).runs == {"a": {"loss": 1.0}, "b": {"loss": 2.0}}
    assert len(runs.path.read_text().splitlines()) == 4  # one run per line
