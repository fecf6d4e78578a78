"""The example and the benchmark of this package run, and PowerSGD between nodes reaches the loss of plain averaging."""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run(script: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / script), *words], capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(120)
def test_table_and_plot_of_the_accumulation_error(tmp_path: Path) -> None:
    out = run("benchmarks/fsdp_accumulation.py", "--worlds", "2", "8", "--numel", "1024", "--out", str(tmp_path))
    rows = [line for line in out.splitlines() if re.search(r"\de-\d\d", line)]
    growth = {line.rsplit(None, 3)[0].strip(): float(line.split()[-1]) for line in rows}
    assert growth["bf16, fp32 accumulation"] < 1 < growth["bf16"]
    assert (tmp_path / "fsdp_accumulation.png").stat().st_size > 5000
    assert "| bf16, fp32 accumulation |" in (tmp_path / "fsdp_accumulation.md").read_text()


@pytest.mark.soak
@pytest.mark.gloo
@pytest.mark.timeout(1600)
def test_powersgd_between_nodes_reaches_the_loss_of_plain_averaging(tmp_path: Path) -> None:
    """Within the spread of three seeds or 2 %, whichever is larger, on the demo's text."""
    hooks = ("allreduce", "powersgd(rank=4)", "bf16_compress(accumulate='fp32')")
    out = run("examples/fsdp2_hsdp.py", *hooks, "--json", str(tmp_path / "runs.json"))
    losses: dict[str, list[float]] = {}
    for one in json.loads((tmp_path / "runs.json").read_text()):
        losses.setdefault(one["hook"], []).append(one["loss"])
    plain = losses["allreduce"]
    limit = max(max(plain) - min(plain), 0.02 * statistics.mean(plain))
    for hook in hooks[1:]:
        assert len(losses[hook]) == 3
        assert statistics.mean(losses[hook]) - statistics.mean(plain) <= limit, hook
    assert re.search(r"powersgd\(rank=4\) +torch's own +[\d,]+ +[\d.]+ x less", out)
