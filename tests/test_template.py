"""The template of a plugin makes a package that installs, lists its hooks, and passes its own tests and its CI."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import copier
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.packaging, pytest.mark.timeout(120)]


def render(folder: Path, **answers: str) -> Path:
    """Return a folder with a new plugin."""
    template, plugin = folder / "template", folder / "plugin"
    # A copy, because copier renders the newest tag of a repository, and not its files.
    shutil.copytree(ROOT / "plugins" / "template", template / "plugins" / "template")
    shutil.copy(ROOT / "copier.yml", template)
    copier.run_copy(str(template), plugin, data=answers, defaults=True, quiet=True)
    return plugin


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return the folder of a new plugin, and an environment in which it is installed."""
    folder = tmp_path_factory.mktemp("template")
    made, site = render(folder, distribution="commhooks-nine-lives"), folder / "site"
    options = ["-q", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(site)]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *options, str(made)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    return made, {**os.environ, "PYTHONPATH": str(site), "PATH": path, "OMP_NUM_THREADS": "1"}


def steps(plugin: Path) -> list[tuple[str, dict[str, str]]]:
    """Return the commands of the plugin's CI, with their variables, after those that install."""
    workflow = yaml.safe_load((plugin / ".github" / "workflows" / "ci.yml").read_text())
    found = [(step["run"], step.get("env", {})) for step in workflow["jobs"]["tests"]["steps"] if "run" in step]
    assert [command.split()[0] for command, _ in found[:3]] == ["git", "pip", "pip"]
    return found[3:]


def test_its_hooks_are_described(plugin: tuple[Path, dict[str, str]]) -> None:
    folder, env = plugin
    for name, words in (("half", "Average bf16 copies of the gradients."), ("clip", "largest magnitude")):
        command = [sys.executable, "-m", "commhooks", "describe", name]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
        assert words in done.stdout, done.stderr


def test_nothing_of_the_template_is_left(plugin: tuple[Path, dict[str, str]]) -> None:
    folder, _ = plugin
    for path in (each for each in folder.rglob("*") if each.is_file() and ".github" not in each.parts):
        assert path.suffix != ".jinja"
        assert "{{" not in path.read_text(), path
    assert "commhooks-nine-lives" in (folder / ".copier-answers.yml").read_text()


@pytest.mark.parametrize("name", ["ch-mine", "Mine", "mine_too"])
def test_a_name_of_the_project_or_of_another_form_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Use lower-case letters"):
        render(tmp_path, distribution=name)


def test_the_page_shows_its_ci(plugin: tuple[Path, dict[str, str]]) -> None:
    folder, _ = plugin
    assert (folder / ".github" / "workflows" / "ci.yml").read_text() in (ROOT / "docs" / "publishing.md").read_text()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_its_ci_passes(plugin: tuple[Path, dict[str, str]]) -> None:
    folder, env = plugin
    for command, variables in steps(folder):
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=env | variables, capture_output=True, text=True, timeout=550
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
