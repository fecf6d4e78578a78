"""Runs a training script as its user would, with torchrun or alone."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

SCRIPTS = Path(__file__).parent / "scripts"


class Done(NamedTuple):
    """The result of a run."""

    code: int
    err: str
    report: dict[str, Any]

    @property
    def stats(self) -> dict[str, float]:
        [model] = self.report["models"]
        found: dict[str, float] = model["stats"]
        return found


def run(
    folder: Path, script: str, *words: object, ranks: int = 2, door: bool = False, check: bool = True, **options: object
) -> Done:
    """Run one of the scripts with a hook, in ``folder``.

    Args:
        folder: working directory, which also gets the report.
        script: name of a script, or text of one.
        words: arguments of the script.
        ranks: number of processes; 0 runs without torchrun.
        door: True to use environment variables instead of ``commhooks run``.
        check: True to fail unless it ends with status 0.
        options: options of ``commhooks run``; without ``hook`` and ``outer`` the script runs unchanged.
    """
    path = SCRIPTS / f"{script}.py"
    if "\n" in script:
        path = folder / "script.py"
        path.write_text(script)
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    given = {"report": report, **options} if {"hook", "outer"} & options.keys() else {}
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environ["STANDALONE_PORT"] = str(_port())  # a Lightning that starts its processes itself reads it
    command = [sys.executable, "-W", "ignore"]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    if given and door:
        environ |= {f"COMMHOOKS_{name.upper()}": str(value) for name, value in given.items()}
    elif given:
        flags = [part for name, value in given.items() for part in _flag(name, value)]
        command += ["-m", "commhooks", "run", *flags]
    command += [str(path), *map(str, words)]
    code, err = _ended(command, folder, environ)
    assert code == 0 or not check, err
    return Done(code, err, json.loads(report.read_text()) if report.exists() else {})


def _ended(command: list[str], folder: Path, environ: dict[str, str]) -> tuple[int, str]:
    """Return exit status and standard error after its processes are gone. A remaining process would
    hold the pipe open.
    """
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, cwd=folder, env=environ, process_group=0, **output)
    try:
        _, err = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        status = process.poll()
        os.killpg(process.pid, signal.SIGKILL)
        _, err = process.communicate()
        raise AssertionError(
            f"after 200 s ({'running' if status is None else f'ended with {status}'}):\n{err}"
        ) from None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, err


def _port() -> int:
    """Return a free port that the kernel gives no process. Lightning chooses a port seconds before it listens, and
    another test may take it.

    The port is below the range of `ip_local_port_range`, 32768 upwards. If the port is taken, Lightning's main process
    ends with EADDRINUSE, and its child waits half an hour for it.
    """
    while True:
        port = random.randrange(10_000, 32_768)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def _flag(name: str, value: object) -> list[str]:
    flag = "--" + name.replace("_", "-")
    return [flag] if value is True else [flag, str(value)]
