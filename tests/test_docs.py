"""The documentation is true: its Python blocks run, its plugin is installed and tested, its comparison is complete.

A page's blocks run in one namespace, in order, in a process of its own; a page that starts a process group does so on one
gloo rank. Pages that need what a test machine lacks are listed in `ELSEWHERE` with the test that runs them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^```\{code-block\} \w+\n:caption: (\S+)\n\n(.*?)^```", re.MULTILINE | re.DOTALL)
ELSEWHERE = {
    "docs/packages/fsdp.md": "needs a device mesh: packages/ch-fsdp/tests/test_example.py",
    "packages/ch-fsdp/README.md": "needs a device mesh: packages/ch-fsdp/tests/test_example.py",
    "docs/packages/ft.md": "needs a lighthouse: the tests of ch-ft",
    "packages/ch-ft/README.md": "needs a lighthouse: the tests of ch-ft",
    "plugins/ch-quant/README.md": "an excerpt of docs/packages/quant.md",
}
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [
        *DOCS.glob("*.md"),
        *DOCS.glob("packages/*.md"),
        *ROOT.glob("p*/*/README.md"),
        *ROOT.glob("plugins/*.md"),
    ]
    if FENCE.search(path.read_text())
)
pytestmark = pytest.mark.timeout(120)


def python(*arguments: object, cwd: Path, path: Path | None = None, timeout: float = 110) -> str:
    """Run the interpreter in a folder; its output, or the failure with all it printed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(path)} if path else {})
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=env)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE])
def test_the_blocks_of_a_page_run(page, tmp_path):
    text = (ROOT / page).read_text()
    source = ["\n"] * (text.count("\n") + 1)  # each block on its own lines, so that a traceback names the page's line
    for block in FENCE.finditer(text):
        first = text[: block.start(1)].count("\n")
        lines = block[1].splitlines(keepends=True)
        source[first : first + len(lines)] = lines
    script = tmp_path / Path(page).with_suffix(".py").name
    script.write_text("".join(source))
    python("-W", "ignore", script, cwd=tmp_path)


def test_the_pages_run_elsewhere_exist():
    assert all((ROOT / page).exists() for page in ELSEWHERE)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> tuple[Path, Path]:
    """The package of `docs/writing.md`: its sources as written there, and where pip installed it."""
    folder = tmp_path_factory.mktemp("writing")
    files = FILE.findall((DOCS / "writing.md").read_text())
    assert len(files) == 5
    for name, content in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    site = folder / "site"
    options = ["-q", "--no-deps", "--no-index", "--no-build-isolation", "--target", site]
    python("-m", "pip", "install", *options, folder / "acme-slices", cwd=folder)
    return folder, site


@pytest.mark.packaging
def test_the_plugin_of_the_page_is_found(plugin):
    folder, site = plugin
    assert "slices" in python("-m", "commhooks", "list", cwd=folder, path=site)
    assert "parts" in python("-m", "commhooks", "describe", "slices", cwd=folder, path=site)


@pytest.mark.packaging
@pytest.mark.timeout(240)
def test_the_plugin_of_the_page_passes_its_tests(plugin):
    folder, site = plugin
    config = folder / "pytest.ini"
    config.write_text("[pytest]\n")
    tests = folder / "acme-slices" / "tests"
    out = python("-m", "pytest", "-q", "-c", config, tests, cwd=folder, path=site, timeout=220)
    assert " passed" in out


def test_every_public_name_has_its_row():
    code = "import run; missing = run.missing_rows(); assert not missing, missing; print(run.torch.__version__)"
    assert python("-W", "ignore", "-c", code, cwd=DOCS / "compare")


def test_the_comparison_is_the_page_of_its_measurement():
    measured = sorted((DOCS / "measured").glob("compare-*.json"))[-1]
    code = (
        "import json, pathlib, run\n"
        f"data = json.loads(pathlib.Path({str(measured)!r}).read_text())\n"
        f"assert run.page(data, {measured.name!r}) == pathlib.Path({str(DOCS / 'compare.md')!r}).read_text()\n"
        "worse = [r['name'] for r in data['rows'] if r['ours'] and r['our_outcome']['outcome'] not in ('works', 'not run')]\n"
        "assert not worse, worse"
    )
    python("-W", "ignore", "-c", code, cwd=DOCS / "compare")
