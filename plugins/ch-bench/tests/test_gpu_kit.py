"""The GPU kit on CPU tensors. Every part runs as on a GPU, with tiny shapes, so that it is ready for one."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ch_bench.gpu_kit.__main__ import main
from ch_bench.gpu_kit.findings import Dead, Findings, Skipped, append, latest, write_record
from ch_bench.gpu_kit.part_list import PARTS

ROOT = Path(__file__).resolve().parents[3]
ONLY_THERE = {  # parts that CPU tensors or a single rank cannot run
    "environment/device",
    "environment/driver",
    "order/control: a side stream that does not wait",
    "order/control: a collective that is not waited for",
    "waits/control: an .item() is reported",
    "graphs/plain",
    "graphs/allreduce",
    "graphs/bf16_compress",
    "graphs/powersgd(rank=4)",
    "codec/quant8",
    "codec/quant4",
    "codec/quant4(error_feedback=True)",
}


@pytest.mark.full
@pytest.mark.timeout(600)  # on a loaded machine. A free core needs 40 s
@pytest.mark.gloo
def test_every_part_has_its_findings(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "ch_bench.gpu_kit",
        "--device",
        "cpu",
        "--tiny",
        "--out",
        str(tmp_path),
        "--minutes",
        "8",
        "--patience",
        "4",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=490)
    rows = latest(tmp_path / "rows.jsonl")
    wrong = {name: row.get("error") for name, row in rows.items() if row["verdict"] not in ("ok", "skipped")}
    assert (done.returncode, wrong) == (0, {}), done.stdout + done.stderr + (tmp_path / "log.txt").read_text()[-4000:]
    skipped = {name for name, row in rows.items() if row["verdict"] == "skipped" and "FSDP" not in name}
    assert {name for name in skipped if "ch-ft" not in name} == ONLY_THERE
    assert {row["part"] for row in rows.values()} == {part.name for part in PARTS}
    said = (tmp_path / "record.md").read_text()
    assert all(f"## {part.title}" in said for part in PARTS)
    assert len(json.loads((tmp_path / "record.json").read_text())["rows"]) == len(rows)
    again = subprocess.run(words, capture_output=True, text=True, timeout=100)  # no part remains
    assert again.returncode == 0
    assert len(again.stdout.splitlines()) == 1, again.stdout


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install 'ch-quant[triton]'")
@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.gloo
def test_the_kernels_are_compared_in_the_interpreter(tmp_path: Path) -> None:
    words = ["-m", "ch_bench.gpu_kit", "--device", "cpu", "--tiny", "--parts", "codec", "--out", str(tmp_path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=190)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "log.txt").read_text()[-4000:]
    found = {name: row for name, row in latest(tmp_path / "rows.jsonl").items() if name != "codec/(end)"}
    assert len(found) == 3
    for row in found.values():
        assert row["values"]["faster"] == ("triton" if row["values"]["triton / torch"] < 1 else "torch")


@pytest.fixture
def rows(tmp_path: Path) -> Findings:
    return Findings(tmp_path / "rows.jsonl", "costs", 1)


def verdict(rows: Findings, name: str) -> Any:
    return latest(rows.path)[f"costs/{name}"]["verdict"]


def fail(error: Exception) -> Any:
    raise error


def test_known_findings_are_not_repeated_and_failed_ones_are(rows: Findings) -> None:
    asked = []
    for run in (1, 1, 2):
        again = Findings(rows.path, "costs", run)
        again.row("known", lambda run=run: asked.append(("known", run)) or {"x": 1})
        again.row("broken", lambda run=run: asked.append(("broken", run)) or fail(ValueError("no")))
        again.row("nowhere", fail, Skipped("not here"))
    assert asked == [("known", 1), ("broken", 1), ("broken", 2)]
    assert [verdict(rows, name) for name in ("known", "broken", "nowhere")] == ["ok", "failed", "skipped"]


def test_a_row_that_ends_its_process_is_tried_twice_and_then_left(rows: Findings) -> None:
    for tries in (1, 2):
        append(rows.path, {"part": "costs", "name": "hangs", "verdict": "begun", "run": 1, "tries": tries})
    rows.row("hangs", lambda: {"x": 1})
    assert verdict(rows, "hangs") == "failed"


def test_a_cuda_error_ends_the_process(rows: Findings) -> None:
    with pytest.raises(Dead):
        rows.row("dies", fail, RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert verdict(rows, "dies") == "failed"


def test_a_cut_run_has_a_record(rows: Findings, tmp_path: Path) -> None:
    rows.row("first", lambda: {"ms": 1.25})
    append(rows.path, {"part": "costs", "name": "second", "verdict": "begun", "run": 1, "tries": 1})
    with rows.path.open("a") as file:
        file.write('{"part": "costs", "na')  # cut in the middle of a line
    write_record(tmp_path, rows.path)
    said = (tmp_path / "record.md").read_text()
    assert "| first | 1.25 |" in said
    assert "**second**: did not end" in said
    assert said.count("Has not run.") == len(PARTS) - 1


def test_a_part_that_hangs_is_ended_and_the_others_run(tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--tiny", "--out", str(tmp_path), "--parts", "environment", "--minutes", "0"]) == 1
    assert "no time was left" in (tmp_path / "record.md").read_text()


@pytest.mark.full
@pytest.mark.packaging
@pytest.mark.timeout(300)
def test_the_folder_of_wheels_runs_without_rich_and_without_pip(tmp_path: Path) -> None:
    kit, hidden = tmp_path / "kit", tmp_path / "hidden"
    sources = [path.parent for path in ROOT.glob("p*/ch-*/pyproject.toml")]
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", kit, *sources]
    subprocess.run([str(word) for word in pip], check=True, timeout=200)
    (kit / "run.py").write_text((ROOT / "plugins/ch-bench/src/ch_bench/gpu_kit/run.py").read_text())
    for name in ("rich", "matplotlib", "hypothesis", "lightning"):
        (hidden / name).mkdir(parents=True)
        (hidden / name / "__init__.py").write_text("raise ImportError('not on that machine')")
    words = [
        sys.executable,
        "run.py",
        "--device",
        "cpu",
        "--tiny",
        "--parts",
        "environment,waits",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        words, cwd=kit, env={"PYTHONPATH": str(hidden), "PATH": ""}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "out" / "log.txt").read_text()[-3000:]
    found = latest(tmp_path / "out" / "rows.jsonl")
    assert "powersgd" in found["environment/hooks"]["values"]["hooks"]
