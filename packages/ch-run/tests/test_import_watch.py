"""With a variable set, every `import torch` runs code of plugins. A broken plugin must not end it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ch_run.settings import Settings
from commhooks.cli.env import unknown_variables

PLUGIN = """
import pluggy
hookimpl = pluggy.HookimplMarker("commhooks")

@hookimpl
def commhooks_wraps():
    return ANSWER
"""


def python(folder: Path, *words: str, hook: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(folder), "COMMHOOKS_HOOK": hook}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=200, env=environ)


@pytest.mark.full
@pytest.mark.parametrize(
    ("answer", "said"),
    [("None", "commhooks_wraps() returned None"), ("['collections:OrderedDict']", "collections:OrderedDict")],
)
def test_a_plugin_with_a_bad_wrapper_breaks_no_import_of_torch(tmp_path: Path, answer: str, said: str) -> None:
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[commhooks]\nx = acme_wraps\n")
    (tmp_path / "acme_wraps.py").write_text(PLUGIN.replace("ANSWER", answer))
    done = python(
        tmp_path,
        "-c",
        "import torch; print(torch.nn.parallel.DistributedDataParallel._commhooks_reports)",
        hook="allreduce",
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr
    assert said in done.stderr


def test_env_reports_a_variable_that_ends_every_import_of_torch(tmp_path: Path) -> None:
    done = python(tmp_path, "-m", "commhooks", "env", hook="no_such_hook")
    assert done.returncode == 1 and "SystemExit: COMMHOOKS_HOOK: UnknownHookError" in done.stdout, done.stderr


def test_commhooks_knows_every_variable_of_run() -> None:
    assert unknown_variables(dict.fromkeys(Settings.variables(), "")) == []
