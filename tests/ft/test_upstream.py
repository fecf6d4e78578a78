"""torchft's own DDP tests and the DDP part of its manager-integration tests pass on our classes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchft")
pytest.importorskip("parameterized")

HERE = Path(__file__).parent
INTEGRATION = "test_ddp_healthy or test_ddp_recovery or test_ddp_skip_init_sync"


def run(*arguments: str, seconds: int) -> str:
    environment = {**os.environ, "PYTHONPATH": str(HERE), "RUST_LOG": "error", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "upstream", "-q", "--no-header", "-c", os.devnull, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, cwd=HERE)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.timeout(110)
def test_their_ddp_tests_pass() -> None:
    assert int(re.search(r"(\d+) passed", run("--pyargs", "torchft.ddp_test", seconds=100))[1]) >= 2


@pytest.mark.timeout(110)
def test_their_manager_integration_tests_pass() -> None:
    """Healthy, recovery with both kinds of quorum, no initial sync, two ranks a group; those of torchcomms skip."""
    out = run("--pyargs", "torchft.manager_integ_test", "-k", f"({INTEGRATION}) and not torchcomms", seconds=100)
    assert int(re.search(r"(\d+) passed", out)[1]) >= 5
