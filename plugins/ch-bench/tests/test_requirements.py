"""The programs run without the tools of tests, which are no dependency of this package."""

import subprocess
import sys

CODE = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pytest", "_pytest", "pytest_timeout", "hypothesis"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
import ch_bench

names = [found.name for found in pkgutil.walk_packages(ch_bench.__path__, "ch_bench.")]
for name in names:
    importlib.import_module(name)
from ch_testing import Ranks, SimulatedRanks, WorkerError, spawn
print(len(names))
"""


def test_every_module_imports_without_pytest() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and int(done.stdout) > 20, done.stderr
