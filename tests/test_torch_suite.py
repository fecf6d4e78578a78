"""PyTorch's own tests of hooks and averagers, from the installed wheel, pass with our names in the place of PyTorch's."""

import pytest

pytest.importorskip("expecttest")

from tests.compatibility import torch_suite


@pytest.mark.full
@pytest.mark.timeout(600)
def test_pytorchs_own_tests_pass_with_our_names() -> None:
    found = torch_suite.run("ours")
    assert len(found) >= 15
    failed = {test: outcome for test, outcome in found.items() if outcome != "passed"}
    assert failed.keys() <= torch_suite.DIFFERENT.keys(), failed
