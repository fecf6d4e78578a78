"""The documentation is true. Its Python blocks run, its plugin installs and passes tests, and its comparison is
complete.

The blocks run as in an environment with the documented install alone. Other packages cannot be imported.
`pages.ELSEWHERE` lists pages that need more than a test machine has, with the test that runs them.
"""

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from .tools import pages

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FILE = re.compile(r"^`(acme-hooks/\S+)`:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
pytestmark = pytest.mark.timeout(120)


def python(*arguments: object, cwd: Path, path: Path | None = None, timeout: float = 110) -> str:
    """Run the interpreter in a folder. Return its output, or raise with the whole output."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(path)} if path else {})
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=env)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def runner():
    """Return the runner of pages about testing (True) or of the others, whose documented install is smaller."""
    with ExitStack() as stack:
        yield cache(lambda testing: stack.enter_context(pages.Runner(() if testing else pages.NOT_INSTALLED)))


FIRST = {"README.md", "docs/tutorial.md", "docs/packages/core.md"}  # in the quick set
LONG = {"docs/run.md"}  # starts torchrun several times


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, marks=[] if page in FIRST else [pytest.mark.full, pytest.mark.timeout(420 if page in LONG else 120)]
        )
        for page in pages.PAGES
        if page not in pages.ELSEWHERE
    ],
)
def test_the_blocks_of_a_page_run(page, tmp_path, runner):
    told = runner(page in pages.TESTING).run(page, tmp_path, 400 if page in LONG else 110)
    assert not told, told


@pytest.mark.full
def test_other_packages_cannot_be_imported(tmp_path, runner):
    page = tmp_path / "page.md"
    for name in ("numpy", "pytest", "hypothesis"):
        page.write_text(f"```python\nimport {name}\n```\n")
        assert f"No module named '{name}'" in runner(False).run(str(page), tmp_path)
        assert not runner(True).run(str(page), tmp_path)


def test_the_pages_named_exist():
    assert all((ROOT / page).exists() for page in (*pages.ELSEWHERE, *pages.TESTING))


def test_the_tutorial_begins_with_its_install():
    first, *others = pages.documented_install()
    assert first.startswith("pip install -c constraints/cpu.txt ./packages/")
    assert others == ["python -m commhooks list"]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> tuple[Path, Path]:
    """Return the sources of the package of `docs/author_api.md`, over that of `docs/extension.md`, and its installed
    folder.
    """
    return installed(tmp_path_factory.mktemp("author_api"), "extension.md", "author_api.md")


@pytest.fixture(scope="module")
def ten_minutes(tmp_path_factory) -> tuple[Path, Path]:
    """Return the sources of the package of `docs/extension.md` alone, and its installed folder."""
    return installed(tmp_path_factory.mktemp("extension"), "extension.md")


def installed(folder: Path, *pages_: str) -> tuple[Path, Path]:
    """Write the files that pages name in their captions, with later pages over earlier ones, and install them."""
    for page in pages_:
        files = FILE.findall((DOCS / page).read_text())
        assert len(files) == {"extension.md": 4, "author_api.md": 10}[page]
        for name, content in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
    site = folder / "site"
    options = ["-q", "--no-deps", "--no-index", "--no-build-isolation", "--target", site]
    python("-m", "pip", "install", *options, folder / "acme-hooks", cwd=folder)
    return folder, site


@pytest.mark.full
@pytest.mark.packaging
def test_the_hook_of_ten_minutes_is_found(ten_minutes):
    folder, site = ten_minutes
    described = python("-m", "commhooks", "describe", "rounded", cwd=folder, path=site)
    assert "rounded (reduction): Average bf16 copies of the gradients." in described
    assert "options   none" in described
    assert "Average bf16 copies of the gradients" in python("-m", "commhooks", "list", "rounded", cwd=folder, path=site)


@pytest.mark.packaging
def test_the_hook_of_ten_minutes_trains_a_script(ten_minutes):
    """Step 4, with a hook that declares no options: its module imports torch, which imports the watch."""
    folder, site = ten_minutes
    (folder / "train.py").write_text(
        "import torch\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))\n"
        "model(torch.ones(4, 3)).sum().backward()\n"
        "dist.destroy_process_group()\n"
    )
    words = ("--standalone", "--nproc-per-node", 2, "-m", "commhooks", "run", "--hook", "rounded")
    said = python("-m", "torch.distributed.run", *words, "--report", "report.json", "train.py", cwd=folder, path=site)
    report = json.loads((folder / "report.json").read_text())
    assert [(model["hook"], model["stats"]["steps"]) for model in report["models"]] == [("rounded", 1)], said


@pytest.mark.full
@pytest.mark.packaging
def test_a_variable_names_the_hook_of_ten_minutes(ten_minutes, monkeypatch):
    folder, site = ten_minutes
    monkeypatch.setenv("COMMHOOKS_HOOK", "rounded")
    assert "Linear" in python("-c", "import torch; print(torch.nn.Linear)", cwd=folder, path=site)


@pytest.mark.full
@pytest.mark.packaging
def test_the_plugin_of_the_page_is_found(plugin):
    folder, site = plugin
    listed = python("-m", "commhooks", "list", cwd=folder, path=site)
    assert all(name in listed for name in ("rounded", "largest", "clamped"))
    assert "fraction of entries sent" in python("-m", "commhooks", "describe", "largest", cwd=folder, path=site)


@pytest.mark.full
@pytest.mark.packaging
def test_the_command_of_the_page_runs(plugin):
    folder, site = plugin
    assert "payload" in python("-m", "commhooks", "--help", cwd=folder, path=site)
    words = ("payload", "largest(rate=0.01)", 1024, 1024, "--ranks", 4)
    said = python("-m", "commhooks", *words, cwd=folder, path=site)
    assert int(said) == 4 * int(0.01 * 1024 * 1024) * 8  # a value and an index of every rank


@pytest.mark.full
@pytest.mark.packaging
@pytest.mark.timeout(600)
def test_the_plugin_of_the_page_passes_its_tests(plugin):
    folder, site = plugin
    config = folder / "pytest.ini"
    config.write_text("[pytest]\n")
    tests = folder / "acme-hooks" / "tests"
    out = python("-m", "pytest", "-q", "-c", config, tests, cwd=folder, path=site, timeout=570)
    assert " passed" in out


@pytest.mark.full  # it reads Lightning's modules
def test_every_public_name_has_its_row():
    code = "import run; missing = run.missing_rows(); assert not missing, missing; print(run.torch.__version__)"
    assert python("-W", "ignore", "-c", code, cwd=ROOT / "tests" / "compatibility")


def test_the_picture_of_all_hooks_finds_its_records():
    code = (
        "import pictures; rows = pictures.measured().values()\n"
        "assert (len(rows), sum(row.limited is not None for row in rows)) == (9, 6)"
    )
    python("-c", code, cwd=DOCS)


def test_the_comparison_is_the_page_of_its_measurement():
    code = (
        "import json, pathlib\n"
        "import run\n"
        f"data = json.loads(pathlib.Path({str(DOCS / 'measured' / 'compare.json')!r}).read_text())\n"
        f"assert run.page(data) == pathlib.Path({str(DOCS / 'compare.md')!r}).read_text()\n"
        "worse = [r['name'] for r in data['rows'] if r['ours'] and r['our_outcome']['outcome'] not in ('works', 'not run')]\n"
        "assert not worse, worse"
    )
    python("-W", "ignore", "-c", code, cwd=ROOT / "tests" / "compatibility")


def test_the_cluster_tables_are_those_of_their_program():
    from programs import cluster_page

    for page in cluster_page.FILES:
        text = page.read_text()
        assert cluster_page.TABLE.search(text)
        assert cluster_page.written(text) == text, (
            f"{page.name}: run python -m programs.cluster_page in plugins/ch-bench"
        )


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_records_name_programs_that_exist():
    """A record may instead name the commit that has the program."""
    lost = []
    for path in (DOCS / "measured").glob("*.md"):
        text = path.read_text()
        for module in set(re.findall(r"python -m (ch_bench[\w.]*)", text)):
            source = f"plugins/ch-bench/src/{module.replace('.', '/')}"
            places = (source, source.replace("/src/ch_bench", "/programs"))
            here = any((ROOT / f"{it}.py").exists() or (ROOT / it / "__init__.py").exists() for it in places)
            if not here and f":{source}.py` prints it" not in text:
                lost.append(f"{path.name}: {module}")
    assert not lost, lost


def test_every_record_has_its_line():
    said = (DOCS / "records.md").read_text()
    pictures = {".png"}
    kept = {path.name for path in (DOCS / "measured").iterdir() if path.suffix not in pictures}
    unlisted = {name for name in kept if name not in said and name.replace(".json", ".md") not in said}
    assert not unlisted, f"give each a line in docs/records.md: {sorted(unlisted)}"
    assert all((DOCS / target).exists() for target in re.findall(r"\]\((\S+?)\)", said))


def test_the_fault_table_and_page_are_those_of_their_record():
    code = (
        "import json, run; results = json.loads(run.RECORD.read_text())\n"
        "assert run.table(results) == run.TABLE.read_text() and run.page(results) == run.PAGE.read_text()\n"
        "assert '\\x1b' not in run.TABLE.read_text()"
    )
    python("-c", code, cwd=ROOT / "tests" / "faults")
