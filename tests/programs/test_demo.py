"""The main demo, smaller, as a newcomer runs it: a subprocess, real processes, real text."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
DEMO = EXAMPLES / "demo.py"
TINY = ["--steps", "6", "--batch", "2", "--context", "16", "--width", "32", "--layers", "1", "--bucket-cap-mb", "0.02"]


def python(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=100, cwd=cwd, env=env)


def check_results(out: Path, hooks: list[str]) -> None:
    results = json.loads((out / "results.json").read_text())
    assert [hook["hook"] for hook in results["hooks"]] == [*hooks, "noop"]
    by_name = {hook["hook"]: hook for hook in results["hooks"]}
    for name in hooks:
        hook = by_name[name]
        assert len(hook["train_loss"]) == len(hook["step_seconds"]) == 6
        assert hook["train_loss"][-1] < hook["train_loss"][0]
        assert hook["wire_bytes"] == sorted(hook["wire_bytes"])
    plain, half = by_name["allreduce"]["stats"], by_name["bf16_compress"]["stats"]
    assert plain["payload_bytes"] == 6 * 4 * results["parameters"]
    assert half["payload_bytes"] * 2 == plain["payload_bytes"]
    assert half["compressed_steps"] == 6
    assert plain["rounds"] > 6, "the demo is to use several buckets"
    assert by_name["noop"]["stats"]["payload_bytes"] == 0
    picture = (out / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000


@pytest.mark.full
@pytest.mark.timeout(120)
def test_demo_trains_each_hook_and_reports(tmp_path: Path) -> None:
    hooks = ["allreduce", "bf16_compress"]
    done = python(str(DEMO), *TINY, "--out", "here", "--hooks", *hooks, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check_results(tmp_path / "here", hooks)
    assert "1.0×" in done.stdout and "2.0×" in done.stdout
    said = " ".join(done.stdout.split())  # the caption of the table wraps
    for word in (*hooks, "loopback", "loss.png", "step 6 of 6: loss", "ratio: wire bytes"):
        assert word in said


@pytest.mark.full
@pytest.mark.timeout(120)
def test_demo_runs_under_torchrun(tmp_path: Path) -> None:
    hooks = ["allreduce", "bf16_compress"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = python(*torchrun, str(DEMO), *TINY, "--out", "here", "--hooks", *hooks, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check_results(tmp_path / "here", hooks)


@pytest.mark.full
@pytest.mark.timeout(120)
def test_powersgd_compresses_in_the_demo(tmp_path: Path) -> None:
    hooks = ["allreduce", "powersgd(rank=2)", "bf16_wrapper(powersgd(rank=2))"]
    done = python(str(DEMO), *TINY, "--out", "here", "--hooks", *hooks, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stats = {hook["hook"]: hook["stats"] for hook in json.loads((tmp_path / "here/results.json").read_text())["hooks"]}
    assert all(stats[hook]["compressed_steps"] == 6 for hook in hooks[1:])
    assert stats[hooks[2]]["payload_bytes"] < stats[hooks[1]]["payload_bytes"] < stats["allreduce"]["payload_bytes"]


@pytest.mark.full
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("hook", "says"), [("powersdg", "powersgd"), ("powersgd(rank=0)", "rank"), ("a(", "a(")])
def test_wrong_hook_ends_before_anything_starts(tmp_path: Path, hook: str, says: str) -> None:
    done = python(str(DEMO), *TINY, "--out", "here", "--hooks", "allreduce", hook, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert not (tmp_path / "here").exists()


@pytest.mark.full
@pytest.mark.timeout(60)
def test_hook_that_never_compresses_fails_the_demo(tmp_path: Path) -> None:
    done = python(str(DEMO), *TINY, "--out", "here", "--hooks", "powersgd(start_iter=1000)", cwd=tmp_path)
    assert done.returncode == 1
    assert "compressed none of its 6 steps" in done.stderr


FAILING = """
import sys
from ch_bench import launch
from ch_testing import WorkerError
import torch, torch.distributed as dist

def worker(rank, world, device):
    if rank == 1:
        raise ValueError("rank 1 has had enough")
    dist.all_reduce(torch.ones(1))

if __name__ == "__main__":
    try:
        launch.launch(worker, 3)
    except WorkerError as error:
        print(error)
"""


@pytest.mark.full
@pytest.mark.timeout(60)
def test_one_failing_rank_ends_the_others_and_its_error_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = python(str(script), cwd=tmp_path)
    # torch 2.10 prints gloo's connections
    said = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert said[0].startswith("rank 1 failed:"), done.stdout + done.stderr
    assert "ValueError: rank 1 has had enough" in done.stdout
