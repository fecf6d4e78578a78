"""``commhooks run`` survives failures of its own writes. The script ends as without it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .kit import run

HOOK = "powersgd(rank=2)"
WARNS = "powersgd(rank=64)"  # never compresses the model below, so attach logs a warning in the first forward
pytestmark = [pytest.mark.gloo, pytest.mark.timeout(300)]

CATCH = "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a test in the background inherits "ignore"

LOOP = """
import sys, os, signal, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
BEFORE
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    BETWEEN
dist.destroy_process_group()
AFTER
"""


def script(folder: Path, before: str = "", between: str = "", after: str = "") -> Path:
    path = folder / "script.py"
    path.write_text(LOOP.replace("BEFORE", before).replace("BETWEEN", between or "pass").replace("AFTER", after))
    return path


def status(path: Path, *options: str, stderr: int | None = subprocess.DEVNULL, hook: str = HOOK) -> int:
    """Return the exit status under ``commhooks run``, or of the script alone if ``hook`` is empty."""
    words = ["-m", "commhooks", "run", "--single-process", "--hook", hook, *options] if hook else []
    command = [sys.executable, "-W", "ignore", *words, str(path)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=path.parent, env=environ, stderr=stderr, timeout=200).returncode


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "hook"),
    [
        ("sys.stderr.close()", HOOK),
        ("sys.stderr.close()", WARNS),
        ("sys.stderr = None", WARNS),
        ("import logging; logging.basicConfig()\nos.close(2)", WARNS),
    ],
)
def test_a_script_that_closes_standard_error_ends_well(tmp_path: Path, before: str, hook: str) -> None:
    path = script(tmp_path, before)
    assert status(path, "--report", "report.json", hook=hook) == status(path, hook="")
    assert (tmp_path / "report.json").exists()


@pytest.mark.full
@pytest.mark.parametrize("hook", [HOOK, WARNS], ids=["quiet", "warns"])
def test_a_full_disk_behind_standard_error_changes_no_status(tmp_path: Path, hook: str) -> None:
    with open("/dev/full", "w") as full:
        assert status(script(tmp_path), "--report", "report.json", hook=hook, stderr=full.fileno()) == 0
    assert (tmp_path / "report.json").exists()


@pytest.mark.full
def test_a_full_disk_keeps_the_status_of_a_script_that_writes_to_it(tmp_path: Path) -> None:
    path = script(tmp_path, after="sys.stderr.write('no line feed')")
    with open("/dev/full", "w") as full:
        assert status(path, stderr=full.fileno()) == status(path, stderr=full.fileno(), hook="") != 0


@pytest.mark.full
def test_a_reader_that_is_gone_changes_no_status(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        assert status(script(tmp_path), "--report", "report.json", stderr=write) == 0
    finally:
        os.close(write)
    assert (tmp_path / "report.json").exists()


@pytest.mark.full
@pytest.mark.parametrize("report", ["late/report.json", "/dev/full"])
def test_a_report_that_cannot_be_written_is_printed(tmp_path: Path, report: str) -> None:
    """The folder of the report becomes a file while the script trains."""
    script(tmp_path, after="open('late', 'w').close()")
    command = [sys.executable, "-m", "commhooks", "run", "--single-process", "--hook", HOOK, "--report", report]
    ended = subprocess.run([*command, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert f"--report {report} cannot be written" in ended.stderr and '"compressed_steps": 3' in ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["late", "script.py"]


@pytest.mark.full
def test_a_trace_that_cannot_be_written_is_not_reported_as_written(tmp_path: Path) -> None:
    text = script(tmp_path, after="open('traces', 'w').close()").read_text()
    done = run(tmp_path, text, ranks=0, hook=HOOK, single_process=True, trace="traces")
    assert done.report["models"][0]["trace"]["file"] is None
    assert "the trace could not be written" in done.err and "trace written to" not in done.err


@pytest.mark.parametrize(
    ("option", "path", "limit"),
    [
        ("--report", "file/report.json", "unlimited"),
        ("--report", "folder", "unlimited"),
        ("--state", "file", "unlimited"),
        ("--trace", "file/traces", "unlimited"),
        ("--trace", "traces", "4"),  # the smallest files only, as on a full disk
        ("--state", "state", "4"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_the_script(
    tmp_path: Path, option: str, path: str, limit: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "script.py").write_text("print('begun')")
    words = [sys.executable, "-B", "-m", "commhooks", "run", "--hook", HOOK, option, path, "script.py"]
    shell = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash", *words]
    ended = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert f"HookConfigError: {option} {path} cannot be written" in " ".join(ended.stderr.split())
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder", "script.py"]


@pytest.mark.full
def test_a_path_of_a_variable_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(tmp_path, "ddp_loop", door=True, hook=HOOK, trace="file/traces", check=False)
    assert done.code != 0 and "HookConfigError: --trace file/traces cannot be written" in done.err


@pytest.mark.full
def test_a_state_that_cannot_be_written_does_not_end_training(tmp_path: Path) -> None:
    """The folder becomes a file after the second step, as if its disk were lost. The script also saves later."""
    breaks = "import shutil; step == 1 and (shutil.rmtree('state'), open('state', 'w')); torch.save(model.state_dict(), 'saved')"
    text = script(tmp_path, between=breaks).read_text()
    done = run(tmp_path, text, ranks=0, hook=HOOK, single_process=True, state="state")
    assert done.stats["compressed_steps"] == 3
    assert done.err.count("the state after step 3 cannot be written") == 1


@pytest.mark.full
def test_a_state_that_can_never_be_written_is_logged_once(tmp_path: Path) -> None:
    full = "def save(*args, **kwargs):\n    raise OSError('the disk is full')\ntorch.save = save"
    done = run(tmp_path, script(tmp_path, full).read_text(), ranks=0, hook=HOOK, single_process=True, state="state")
    assert done.stats["compressed_steps"] == 3
    assert done.err.count("cannot be written") == done.err.count("the state after step 0 cannot be written") == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        (f"{CATCH}os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("sys.exit('a text')", 1),
        ("sys.exit(None)", 0),
        ("sys.exit(255)", 255),
        ("os._exit(3)", 3),
        ("raise BrokenPipeError", 1),
        ("from commhooks import HookConfigError\nraise HookConfigError", 1),
        ("class Own(BaseException): pass\nraise Own", 1),
    ],
)
def test_the_end_of_the_script_is_passed_on(tmp_path: Path, after: str, expected: int) -> None:
    path = script(tmp_path, after=after)
    assert status(path) == expected == status(path, hook="")


@pytest.mark.full
def test_a_forked_process_neither_reports_nor_cleans_up(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import os, sys\nif os.fork() == 0:\n    sys.exit(0)\nos.wait()\n")
    ended = subprocess.run(
        [sys.executable, "-m", "commhooks", "run", "--single-process", "--hook", HOOK, str(path)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0 and ended.stderr.count("commhooks run:") == 1, ended.stderr
