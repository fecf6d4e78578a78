"""The part of the contract on two gloo processes: one world per class, each check a test of its own."""

from collections.abc import Callable
from typing import Any

import pytest

from commhooks.testing.contract_case import Case
from commhooks.testing.gloo_worker import CHECKS, Order, main
from commhooks.testing.spawn import spawn

_DONE: dict[str, Any] = {}  # class -> outcomes, or the exception that ended the world


@pytest.mark.timeout(120)
class Processes(Case):
    """Checks over ``DistributedDataParallel``, several buckets, real collectives."""

    def order(self) -> Order:
        reduction = self.handle.reduction
        return Order(
            self.expr,
            max(self.allowed(), 1e-6),
            self.steps if self.local_fields else 1,
            self.averages,
            self.mean,
            self.lossy and self.averages if self.compresses is None else self.compresses,
            reduction is None or reduction.granularity == "tensor",
            self.first_step,
        )

    @pytest.mark.parametrize("check", list(CHECKS))
    def test_gloo(self, check: str) -> None:
        if any(spec.provider == "local" for spec in self.specs):
            pytest.skip("registered in this process; the gloo processes see installed hooks only")
        outcome_of(self, main, self.order(), check, self.timeout)


def outcome_of(test: object, body: Callable[..., Any], order: object, check: str, timeout: float) -> None:
    """Fail if ``check`` failed on any rank of the test class's world, which runs ``body(rank, world, order)`` once.

    Args:
        test: of the class.
        body: returns, for each check, a traceback, empty if it passed.
        order: what the ranks are told.
        check: name of the check.
        timeout: seconds for the whole world.
    """
    key = f"{type(test).__module__}.{type(test).__qualname__}"
    if key not in _DONE:
        try:
            _DONE[key] = spawn(body, 2, order, timeout=timeout, group_timeout=20.0)
        except Exception as error:  # every check of this world is told
            _DONE[key] = error
    if isinstance(_DONE[key], Exception):
        raise _DONE[key]
    for rank, outcomes in enumerate(_DONE[key]):
        assert not outcomes[check], f"rank {rank}:\n{outcomes[check]}"
