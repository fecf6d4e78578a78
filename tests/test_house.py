"""The source keeps the house rules. Each rule fails on a tree that breaks it."""

import ast
import importlib
import re
import shutil
from pathlib import Path

import pytest

from .tools.house import RULES, House

ROOT = Path(__file__).resolve().parents[1]
CORE = "packages/ch-core/src/commhooks"
PLANTED = {  # rule -> file, text to add to it, a word of the breach
    "against_the_order": (
        f"{CORE}/bucket.py",
        "def f():\n    from commhooks.engine import Engine\n",
        "takes commhooks.engine",
    ),
    "against_the_order, of packages": ("packages/ch-ddp/src/ch_ddp/hooks.py", "import ch_fsdp\n", "ch_fsdp"),
    "circles": (
        f"{CORE}/engine/schedule.py",
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from commhooks.engine.engine import Engine\n",
        "engine.schedule",
    ),
    "unexported": ("plugins/ch-quant/src/ch_quant/hooks.py", "from commhooks.engine.engine import Engine\n", "Engine"),
    "unexported, of another package": (
        "packages/ch-ft/src/ch_ft/ddp.py",
        "from ch_ddp.hooks import noop_hook\n",
        "noop",
    ),
    "default_factories": (f"{CORE}/scratch.py", "ROOM = torch.zeros(3, dtype=torch.int8)\n", "device="),
    "path_edits": ("tests/test_contract.py", "import sys\n\nsys.path." + "insert(0, 'docs')\n", "test_contract"),
}


@pytest.fixture(scope="module")
def house() -> House:
    return House(ROOT)


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_holds(house: House, rule: str) -> None:
    breaches = getattr(house, rule)()
    assert not breaches, "\n".join(breaches)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the sources, to plant breaches in."""
    for top in ("packages", "plugins", "tests", "docs"):
        for path in (ROOT / top).rglob("*.py"):
            target = tmp_path / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    return tmp_path


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "circles" else pytest.mark.full) for case in PLANTED]
)
def test_a_planted_breach_is_found(copy: Path, case: str) -> None:
    file, text, word = PLANTED[case]
    rule = case.split(",")[0]
    before = set(getattr(House(copy), rule)())
    (copy / file).write_text((copy / file).read_text() + "\n\n" + text)
    found = set(getattr(House(copy), rule)()) - before
    assert len(found) == 1, found
    assert word in found.pop()


def test_the_page_for_authors_of_adapters_explains_every_name(house: House) -> None:
    face = "commhooks.adapters"
    page = ast.get_docstring(ast.parse(house.files[face].read_text())) or ""
    unexplained = [name for name in sorted(house.listed(face)) if not re.search(rf"`~?{name}\b", page)]
    assert not unexplained, f"the docstring of {face} says nothing of {', '.join(unexplained)}"


def test_every_name_of_a_face_can_be_imported(house: House) -> None:
    for face in (name for name in house.files if house.is_face(name) and house.listed(name)):
        if face.startswith("ch_ft.testing"):
            continue  # needs torchft, which is optional
        module = importlib.import_module(face)
        assert all(hasattr(module, name) for name in house.listed(face)), face


def test_reading_checkpoints_is_the_one_exception(house: House) -> None:
    assert house.reads_checkpoints("commhooks.state", "commhooks.checkpoint.save_load")
    assert not house.reads_checkpoints("commhooks.bucket", "commhooks.checkpoint.save_load")
