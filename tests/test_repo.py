"""The rules of this repository."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [path.parent for path in sorted(ROOT.glob("p*/*/pyproject.toml"))]  # packages/ and plugins/
PROJECTS = {tomllib.loads((path / "pyproject.toml").read_text())["project"]["name"]: path for path in FOLDERS}
IMPORTS = {name: name.replace("-", "_") for name in PROJECTS}


def meta(name: str) -> dict:
    return tomllib.loads((PROJECTS[name] / "pyproject.toml").read_text())["project"]


def tracked() -> list[Path]:
    """Return the files that git tracks or would add. In an exported tree, return all files."""
    run = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    names = run.stdout.split("\n") if run.returncode == 0 else [str(p.relative_to(ROOT)) for p in ROOT.rglob("*.*")]
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def modules(*folders: str) -> list[Path]:
    return [p for p in tracked() if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in folders]


def test_versions_move_together():
    versions = {name: meta(name)["version"] for name, folder in PROJECTS.items() if folder.parent.name == "packages"}
    assert len(set(versions.values())) == 1, versions
    top = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert top is not None
    assert top[1] in set(versions.values())


@pytest.mark.parametrize("name", PROJECTS)
def test_every_package_is_complete(name):
    folder, project = PROJECTS[name], meta(name)
    package = folder / "src" / IMPORTS[name]
    for path in ("README.md", "LICENSE", f"src/{IMPORTS[name]}/__init__.py", f"src/{IMPORTS[name]}/py.typed"):
        assert (folder / path).is_file(), f"{name} lacks {path}"
    assert [p.name for p in (folder / "src").iterdir() if p.name != "__pycache__"] == [package.name]
    assert project["license"] == "BSD-3-Clause"
    assert project["requires-python"] == ">=3.11"
    for requirement in project["dependencies"]:
        if requirement.split(">")[0].strip() in PROJECTS:
            assert "==" not in requirement
            assert ">=0.1,<0.2" in requirement or folder.parent.name == "plugins"


def imported(path: Path) -> set[str]:
    """Return top-level names of every import in a module, also inside functions."""
    tops = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            tops |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            tops.add(node.module.split(".")[0])
    return tops


def requirements(name: str, extras: bool = False) -> set[str]:
    """Return the distributions that a project requires, and those of other projects that these require in turn."""
    project = meta(name)
    lines = [*project["dependencies"]]
    if extras:
        lines += [line for group in project.get("optional-dependencies", {}).values() for line in group]
    direct = {re.split(r"[\s<>=;\[!~]", line)[0] for line in lines}
    return direct.union(*(requirements(other) for other in direct & PROJECTS.keys()))


@pytest.mark.parametrize("name", PROJECTS)
def test_imports_are_declared(name):
    """`tests/test_packages.py` is stricter with imports of other packages of this repository."""
    declared = requirements(name, extras=True)
    legal = {IMPORTS.get(dist, dist.replace("-", "_")) for dist in declared} | {IMPORTS[name]} | sys.stdlib_module_names
    for path in (PROJECTS[name] / "src").rglob("*.py"):
        assert not imported(path) - legal, f"{path.relative_to(ROOT)} imports what {name} does not declare"


def test_plugins_use_the_public_api_only():
    for path in modules("plugins"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("commhooks."):
                assert not any(part.startswith("_") for part in node.module.split(".")), path


def test_hook_annotations_are_not_strings():
    """DDP refuses a hook with postponed annotations."""
    for path in modules("packages", "plugins"):
        assert "from __future__ import annotations" not in path.read_text(), path.relative_to(ROOT)


def test_the_library_does_not_print():
    for path in modules("packages", "plugins"):
        if "src" in path.parts and not {"cli", "ch_run", "ch_bench"} & {
            *path.parts
        }:  # the command and the programs may print
            calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
            assert not [n for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"], path.relative_to(
                ROOT
            )


def test_nothing_of_one_machine_is_written_down():
    """No file has a registry host, a path of one machine, or the address of an index."""
    pattern = re.compile(
        "|".join(
            [
                "/" + "work/",
                "/" + "home/",
                "/" + "root/",
                "index" + r"-url[ =]\S*://",
                r"find-links\s*=",
                "files.python" + "hosted",
            ]
        )
    )
    for path in tracked():
        if path.suffix in {".py", ".toml", ".md", ".txt", ".cfg", ".yml", ".yaml", ".json", ""}:
            found = pattern.search(path.read_text(errors="ignore"))
            assert found is None, f"{path.relative_to(ROOT)}: {found and found[0]}"


def test_the_table_of_packages_holds_what_they_register():
    from commhooks.registry import packages
    from commhooks.registry.registry import REGISTRY

    ours = set(PROJECTS)
    rows = [(spec.provider, name) for spec in REGISTRY.specs() for name in spec.names]
    assert {(dist, name) for dist, name in rows if dist in ours} == pairs(packages.HOOKS)
    rows = [(command.provider, command.name) for command in REGISTRY.commands()]
    assert {(dist, name) for dist, name in rows if dist in ours} == pairs(packages.COMMANDS)
    answers = REGISTRY.ask("commhooks_adapter")
    rows = [(plugin.partition(":")[0], cls) for plugin, served in answers for cls, _ in served]
    assert {(dist, cls) for dist, cls in rows if dist in ours} == pairs(packages.ADAPTERS)
    assert ours == set(packages.PACKAGES)


def pairs(table: dict[str, str]) -> set[tuple[str, str]]:
    return {(dist, name) for dist, names in table.items() for name in names.split()}


def test_every_entry_point_resolves():
    """Specs and targets of every first-party plugin import from the installed packages."""
    import commhooks
    from commhooks.registry.registry import REGISTRY

    assert not [failure for failure in commhooks.failures() if failure.dist in PROJECTS]
    ours = [spec for spec in commhooks.list_hooks() if spec.provider in PROJECTS]
    for spec in ours:
        REGISTRY.target(spec)
        for target in filter(None, (spec.hook, spec.state)):
            REGISTRY.load(target, spec)
        assert commhooks.describe(spec.id, spec.kind)
    for command in REGISTRY.commands():
        REGISTRY.command(command.id)


def test_the_trust_model_names_every_variable_that_imports_commhooks():
    from ch_run.import_watch import NAMED

    assert not [name for name in NAMED if f"`{name}`" not in (ROOT / "SECURITY.md").read_text()]


def test_ci_is_the_readme_command():
    text = (ROOT / ".ci" / "run").read_text()
    assert "for session in tests tests-full" in text and 'nox -s "$session"' in text
    assert "nox -s tests\n" in (ROOT / "README.md").read_text()
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
