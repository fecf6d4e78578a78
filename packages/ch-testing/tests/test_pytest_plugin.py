"""The pytest plugin of the test kit loads quickly, and tests a foreign hook in five lines."""

import subprocess
import sys

import pytest

import commhooks

pytest_plugins = ["pytester"]

LIGHT = """
import sys
import ch_testing.pytest_plugin
heavy = {"torch", "hypothesis", "numpy"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""


def test_loading_the_plugin_imports_no_torch_and_no_hypothesis():
    run = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_the_plugin_is_declared():
    from importlib.metadata import distribution

    points = {(e.group, e.name): e.value for e in distribution("ch-testing").entry_points}
    assert points["pytest11", "commhooks"] == "ch_testing.pytest_plugin"


def test_isolated_registry(isolated_registry):
    assert commhooks.list_hooks("powersgd") == []
    commhooks.register(commhooks.HookSpec("mine", "ddp", "math:fsum", "an example"))
    assert [spec.name for spec in commhooks.list_hooks("mine")] == ["mine"]


def test_isolation_ends_with_the_test():
    assert commhooks.list_hooks("mine") == []
    assert commhooks.list_hooks("powersgd") != []


WRONG = '''
import commhooks, torch
from ch_testing import HookContract

def {name}(bucket, ctx, k=3):
    """A hook with a fault."""
    {body}

commhooks.register(commhooks.HookSpec("{name}", "reduction", "nowhere:{name}", "an example",
    options={{"k": commhooks.Option(3, "numbers")}}), {name})

class TestMine(HookContract):
    expr = "{name}(k=3)"
    tolerance = 0.01
'''
FAULTS = {
    "forgets_to_divide": ("yield commhooks.AllReduce(bucket.buffer, op='sum')", "test_equals_the_average"),
    "keeps_its_own": ("yield commhooks.AllReduce(bucket.buffer.clone())", "test_all_ranks_get_the_same_bits"),
    "hides_nan": (
        "bucket.buffer.nan_to_num_(0.0, 0.0, 0.0); yield commhooks.AllReduce(bucket.buffer)",
        "test_non_finite_passes",
    ),
    "needs_the_bucket": (
        "bucket.buffer.mul_(1 + 1e-3 * bucket.buffer.numel() / 1e5); yield commhooks.AllReduce(bucket.buffer)",
        "test_bucket_size_changes_nothing",
    ),
}


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", FAULTS)
def test_the_contract_finds_the_fault(pytester, name):
    body, test = FAULTS[name]
    pytester.makepyfile(WRONG.format(name=name, body=body))
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", "-k", test, timeout=150)
    result.assert_outcomes(failed=1)
