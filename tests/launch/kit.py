"""Runs a training script as its user would: with torchrun, or alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

SCRIPTS = Path(__file__).parent / "scripts"


class Done(NamedTuple):
    """What became of a run."""

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
        folder: where it runs, and where the report is.
        script: name of a script, or text of one.
        words: its arguments.
        ranks: processes; 0: no torchrun.
        door: by environment variables instead of ``commhooks run``.
        check: fail unless it ends well.
        options: of ``commhooks run``; without ``hook`` the script runs as it is.
    """
    path = SCRIPTS / f"{script}.py"
    if "\n" in script:
        path = folder / "script.py"
        path.write_text(script)
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    given = {**options, "report": report} if "hook" in options else {}
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-W", "ignore"]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    if given and door:
        environ |= {f"COMMHOOKS_{name.upper()}": str(value) for name, value in given.items()}
    elif given:
        flags = [part for name, value in given.items() for part in _flag(name, value)]
        command += ["-m", "commhooks", "run", *flags]
    command += [str(path), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=folder, env=environ)
    assert done.returncode == 0 or not check, done.stderr
    return Done(done.returncode, done.stderr, json.loads(report.read_text()) if report.exists() else {})


def _flag(name: str, value: object) -> list[str]:
    flag = "--" + name.replace("_", "-")
    return [flag] if value is True else [flag, str(value)]
