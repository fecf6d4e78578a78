"""torchft's own DDP tests and the DDP part of its manager-integration tests pass with our classes."""

import pytest

pytest.importorskip("torchft")
pytest.importorskip("parameterized")

from ch_testing.torchft import torchft_suite


@pytest.mark.full
@pytest.mark.timeout(110)
@pytest.mark.parametrize(
    ("tests", "at_least"), [(torchft_suite.DDP, 2), (torchft_suite.INTEGRATION, 5)], ids=["ddp", "integration"]
)
def test_their_tests_pass_on_our_classes(tests: tuple[str, ...], at_least: int) -> None:
    outcome = torchft_suite.run(*tests)
    assert set(outcome.values()) == {"passed"}, outcome
    assert len(outcome) >= at_least
