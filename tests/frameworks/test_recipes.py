"""The recipes of docs/frameworks.md run unchanged, each as a script over two processes. A hook costs few lines."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from . import matrix

PAGE = (matrix.HERE.parents[1] / "docs" / "frameworks.md").read_text()
SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
YAML = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
RECIPES = {title: block[1] for title, text in SECTION.findall(PAGE) if (block := BLOCK.search(text))}
NEEDS = {
    "Lightning Trainer": "lightning",
    "Lightning Fabric": "lightning",
    "Accelerate": "accelerate",
    "Hugging Face Trainer": "transformers",
    "Your own loop: FSDP2": "torch",
    "Ray Train": "ray",
}
pytestmark = [pytest.mark.full, pytest.mark.gloo, pytest.mark.timeout(300)]


def launched(script: Path, *, ranks: int) -> str:
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command = (
        [*torchrun, f"--nproc-per-node={ranks}", script] if ranks > 1 else [sys.executable, "-W", "ignore", script]
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=280, cwd=script.parent, env=env, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_recipe_is_known() -> None:
    assert RECIPES.keys() == NEEDS.keys()


@pytest.mark.parametrize("title", NEEDS)
def test_the_recipe_runs(title: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(NEEDS[title]) is None:
        pytest.skip(f"{NEEDS[title]} is not installed")
    script = tmp_path / "script.py"
    script.write_text(RECIPES[title])
    printed = launched(script, ranks=1 if title == "Ray Train" else 2)  # Ray starts the workers itself
    if "report())" in RECIPES[title]:
        assert "powersgd" in printed


@pytest.mark.parametrize(("script", "package"), [("fabric", "lightning"), ("titanstyle", "torch")])
def test_a_script_is_killed_and_resumed_under_an_outer_optimizer(script: str, package: str) -> None:
    """`nox -s frameworks-outer` runs the other frameworks."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    program = [sys.executable, "-W", "ignore", str(matrix.HERE / "outer.py"), "--only", script]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0 and done.stdout.count(" yes ") == 5, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("framework", matrix.FRAMEWORKS, ids=lambda framework: framework.script)
def test_a_hook_costs_few_lines(framework: matrix.Framework) -> None:
    assert matrix.changed(framework.script) <= framework.lines


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_the_configuration_file_of_the_page(package: str, tmp_path: Path) -> None:
    for needed in (package.partition(".")[0], "jsonargparse"):
        pytest.importorskip(needed)
    block = YAML.search(PAGE)
    assert block is not None
    (tmp_path / "config.yaml").write_text(block[1])
    script = tmp_path / "script.py"
    script.write_text(
        f"from {package}.cli import LightningCLI\n"
        f"from {package}.demos.boring_classes import BoringModel\n"
        "cli = LightningCLI(BoringModel, args=['--config', 'config.yaml'], run=False)\n"
        "hook = next(each for each in cli.trainer.callbacks if type(each).__name__ == 'CommHookCallback').hook\n"
        "assert hook.what == 'powersgd(rank=4)', hook.what\n"
    )
    launched(script, ranks=1)
