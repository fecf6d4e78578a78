"""Run the documentation's Python blocks, page by page, in an environment with the packages that the pages install.

A page's blocks run in order in one namespace and one process, which is forked from a process that has imported torch. A
page that starts a process group uses one gloo rank. This module needs the standard library and our packages. `python
tests/tools/pages.py` runs the pages without pytest, for `nox -s docs-install`. `tests/test_docs.py` runs them under pytest, and
forbids imports of packages that the pages do not install.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
ELSEWHERE = {
    "docs/frameworks.md": "needs the frameworks and two processes: tests/frameworks/test_recipes.py",
    "docs/packages/fsdp.md": "needs a device mesh: tests/programs/test_fsdp_examples.py",
    "packages/ch-fsdp/README.md": "needs a device mesh: tests/programs/test_fsdp_examples.py",
    "docs/packages/ft.md": "needs a lighthouse: the tests of ch-ft",
    "packages/ch-ft/README.md": "needs a lighthouse: the tests of ch-ft",
    "plugins/ch-outer/README.md": "an excerpt of docs/packages/outer.md",
    "plugins/ch-quant/README.md": "an excerpt of docs/packages/quant.md",
    "plugins/ch-sparse/README.md": "an excerpt of docs/packages/sparse.md",
}
TESTING = ["docs/testing_hooks.md"]
"""Pages that say themselves that they need ch-testing."""

NOT_INSTALLED = ("numpy", "pytest", "_pytest", "hypothesis", "lightning", "accelerate", "matplotlib", "nox")
"""What the documented install does not bring, and the tests' environment does."""

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

_FORBID = """
import runpy, sys

class Hiding:
    # Finds all that ``finder`` finds but the hidden: torch asks with find_spec, which must not raise.

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {names!r} else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""

_SERVE = """
import json, os, signal, time
import commhooks.api.attach
import torch._dynamo  # DDP imports it in its constructor

for line in sys.stdin:
    path, folder, output, limit = json.loads(line)
    page = os.fork()
    if page == 0:
        os.setpgid(0, 0)
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(2, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        sys.argv = [path]
        runpy.run_path(path, run_name="__main__")
        sys.exit()
    end = time.monotonic() + limit
    while not (ended := os.waitpid(page, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.02)
    if not ended[0]:
        os.killpg(page, signal.SIGKILL)
        ended = os.waitpid(page, 0)
    print(os.waitstatus_to_exitcode(ended[1]), flush=True)
"""


def script(page: str) -> str:
    """Return the blocks of a page, each on its own lines, so that a traceback names the page's line."""
    text = (ROOT / page).read_text()
    source = ["\n"] * (text.count("\n") + 1)
    for block in FENCE.finditer(text):
        first = text[: block.start(1)].count("\n")
        lines = block[1].splitlines(keepends=True)
        source[first : first + len(lines)] = lines
    return "".join(source)


class Runner:
    """Runs pages without the modules in ``forbidden``. A process that has imported torch forks for every page.

    Imports take longer than most pages.
    """

    def __init__(self, forbidden: tuple[str, ...] = ()) -> None:
        code = _FORBID.format(names=set(forbidden) or {""}) + _SERVE
        command = [sys.executable, "-W", "ignore", "-c", code]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def run(self, page: str, folder: Path, limit: float = 110) -> str:
        """Run a page's blocks in ``folder`` for at most ``limit`` seconds; return its output if it failed."""
        path, output = folder / Path(page).with_suffix(".py").name, folder / "output.txt"
        path.write_text(script(page))
        self._process.stdin.write(json.dumps([str(path), str(folder), str(output), limit]) + "\n")
        self._process.stdin.flush()
        code = self._process.stdout.readline().strip()
        return "" if code == "0" else f"exit status {code}\n{output.read_text()}"

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def documented_install(page: str = "docs/tutorial.md") -> list[str]:
    """Return the commands of a page's first shell block."""
    block = SHELL.search((ROOT / page).read_text())
    if block is None:
        raise SystemExit(f"{page} has no block of shell commands")
    return [line for line in block[1].replace("\\\n", "").splitlines() if line]


def main() -> int:
    """Run the pages given as arguments, or all pages that need only the documented install."""
    there = [name for name in NOT_INSTALLED if name != "nox" and find_spec(name) is not None]
    if there:
        raise SystemExit(f"the pages do not install these packages of this environment: {', '.join(there)}")
    failed = []
    with Runner() as runner:
        for page in sys.argv[1:] or [page for page in PAGES if page not in ELSEWHERE and page not in TESTING]:
            with tempfile.TemporaryDirectory() as folder:
                told = runner.run(page, Path(folder), 400)
            print(f"{'failed' if told else 'passed'}  {page}", told, sep="\n" if told else "", flush=True)
            failed += [page] if told else []
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
