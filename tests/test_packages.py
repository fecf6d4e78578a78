"""Packages depend one way, through each other's faces, and the files of ch-core have no circle of imports."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from .test_repo import IMPORTS, PROJECTS, ROOT, requirements

FACES = {package: name for name, package in IMPORTS.items()}
"""Distribution by import name."""


def imports(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the module and the name of each import of this repository in a file, lazy imports included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            found = [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        else:
            continue
        yield from ((node.lineno, module, name) for module, name in found if module.split(".")[0] in FACES)


@pytest.mark.parametrize("project", PROJECTS)
def test_a_package_imports_its_dependencies_by_their_faces(project: str) -> None:
    allowed, wrong = requirements(project), []
    for path in sorted((PROJECTS[project] / "src").rglob("*.py")):
        for line, module, _ in imports(path):
            face, *inside = module.split(".")
            if FACES[face] != project and (inside or FACES[face] not in allowed):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_files_of_the_core_have_no_circle_of_imports() -> None:
    source = PROJECTS["ch-core"] / "src"
    files = {".".join(path.relative_to(source).with_suffix("").parts): path for path in source.rglob("*.py")}
    needs: dict[str, set[str]] = {}
    for module, path in files.items():
        found = {inner for _, one, name in imports(path) for inner in (one, f"{one}.{name}")}
        needs[module] = (found & files.keys()) - {module}
    while free := [module for module, needed in needs.items() if not needed & needs.keys()]:
        for module in free:
            del needs[module]
    assert needs == {}


@pytest.mark.parametrize("face", FACES)
def test_no_name_of_a_face_is_a_module(face: str) -> None:
    """An import of the module would replace the name."""
    folder = PROJECTS[FACES[face]] / "src" / face
    stub = folder / "__init__.pyi"
    names = {name for _, _, name in imports(stub)} if stub.exists() else set()
    assert names & {path.stem for path in folder.iterdir()} == set()


@pytest.mark.parametrize("face", FACES)
def test_every_name_of_a_face_can_be_imported(face: str) -> None:
    module = importlib.import_module(face)
    assert all(hasattr(module, name) for name in getattr(module, "__all__", []))
