"""The contract of every hook, as a test class to inherit from."""

from typing import Any

import pytest

from ch_testing.contract_average import Averaging
from ch_testing.contract_case import applies
from ch_testing.contract_description import Describing
from ch_testing.contract_feedback import Feeding
from ch_testing.contract_processes import Processes
from ch_testing.contract_shards import Scattering
from ch_testing.contract_state import Surviving


@pytest.mark.timeout(120)
class HookContract(Describing, Averaging, Feeding, Scattering, Surviving, Processes):
    """Proves a hook in five lines, in a file that pytest collects::

        from ch_testing.contract import HookContract

        class TestMine(HookContract):
            expr = "mine(k=3)"
            tolerance = 0.1

    A reduction is tested on simulated ranks and on gloo processes, a foreign ``(state, bucket)`` hook on gloo processes
    only. The declarations of the hook decide which checks are collected: ``lossy``, ``fields``, ``granularity``,
    capabilities. See :class:`~ch_testing.contract_case.Case` for the attributes.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls, "expr"):
            return
        case = cls()
        for name in dir(HookContract):
            check = getattr(HookContract, name)
            if not name.startswith("test_") or not hasattr(check, "conditions"):
                continue
            if name in cls.__dict__ or getattr(cls, name) not in (check, None):  # the user's own
                continue
            try:
                collected = applies(case, check)
            except Exception:  # the hook is not registered yet, or is broken: the checks will tell
                collected = True
            setattr(cls, name, check if collected else None)

    @pytest.fixture(autouse=True)
    def _one_cause_once(self, request: pytest.FixtureRequest) -> None:
        """Let a hook that cannot do one step fail one check, not all of them."""
        if self.first_failure and request.function.__name__ != "test_one_step":
            pytest.skip("the hook cannot do one step: see test_one_step")

    def test_one_step(self) -> None:
        assert not self.first_failure, self.first_failure
