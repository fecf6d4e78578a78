"""Ranks end with the process that started them, also if it is killed and cannot notify them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SLEEPER = """
import os, sys, time
from pathlib import Path

def sleep(rank, world, *rest):
    Path(rest[-1], f"pid{rank}").write_text(str(os.getpid()))
    time.sleep(100)

if __name__ == "__main__":
    from ch_testing import spawn
    spawn(sleep, 2, sys.argv[1])
"""
LAUNCHED = SLEEPER.replace("from ch_testing import spawn", "from ch_bench import launch")
LAUNCHED = LAUNCHED.replace("spawn(sleep, 2, sys.argv[1])", "launch.launch(sleep, 2, sys.argv[1])")


def alive(pid: int) -> bool:
    """True if a process runs. A process that has ended but was not reaped does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def until(holds, seconds: float = 40.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(holds())


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("program", [SLEEPER, pytest.param(LAUNCHED, marks=pytest.mark.full)], ids=["spawn", "launch"])
def test_ranks_end_with_a_parent_that_was_killed(program: str, tmp_path: Path) -> None:
    script = tmp_path / "sleeper.py"
    script.write_text(program)
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path)])
    pids: list[int] = []
    try:
        assert until(lambda: len([p for p in tmp_path.glob("pid*") if p.read_text()]) == 2)
        pids = [int(p.read_text()) for p in tmp_path.glob("pid*")]
        assert all(map(alive, pids))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert until(lambda: not any(map(alive, pids)), 10)
    finally:
        parent.kill()
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
