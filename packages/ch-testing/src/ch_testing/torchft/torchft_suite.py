"""Runs torchft's own tests on our classes, in a separate process."""

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
DDP = ("--pyargs", "torchft.ddp_test")
INTEGRATION = (  # healthy, recovery with both kinds of quorum, no initial sync, two ranks a group
    "--pyargs",
    "torchft.manager_integ_test",
    "-k",
    "(test_ddp_healthy or test_ddp_recovery or test_ddp_skip_init_sync) and not torchcomms",
)


def run(*arguments: str, seconds: int = 100) -> dict[str, str]:
    """Run tests. Return test name -> ``"passed"``, or the failure.

    Args:
        arguments: arguments of pytest.
        seconds: time limit.
    """
    environment = {**os.environ, "RUST_LOG": "error", "OMP_NUM_THREADS": "1"}
    environment["COLUMNS"] = "300"  # in a narrow terminal pytest omits the reasons
    options = ["-rA", "-q", "--no-header", "--noconftest", "-c", os.devnull, "--import-mode=importlib"]
    command = [sys.executable, "-m", "pytest", "-p", "ch_testing.torchft.torchft_plugin", *options, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, cwd=HERE)
    if done.returncode not in (0, 1):  # 1: a test failed
        said = done.stdout[-3000:] + done.stderr[-1000:]
        raise RuntimeError(f"pytest {' '.join(arguments)} ended with {done.returncode}: {said}")
    found = {}
    for verdict, name, why in re.findall(r"^(PASSED|FAILED|ERROR) \S*::(\S+)(?: - (.*))?$", done.stdout, re.MULTILINE):
        found[name] = "passed" if verdict == "PASSED" else f"failed: {why or verdict}"
    return found
