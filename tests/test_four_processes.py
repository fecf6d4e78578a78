"""Every hook by name on four gloo processes with several buckets. The checks are the core of the contract, which runs
on two.
"""

from typing import Any

import pytest

from ch_testing import spawn
from ch_testing.contract_processes import (
    Order,
    accumulated,
    attached,
    backward,
    detached,
    not_finite,
    run_checks,
    wrapped,
)

from .test_contract import HOOKS, PAIRS, contract

CHECKS = {check.__name__: check for check in (attached, accumulated, not_finite, detached)}


def body(rank: int, world: int, orders: list[Order]) -> tuple[int, dict[str, dict[str, str]]]:
    """Return the number of buckets of a model, and the traceback of every check by hook (empty after success)."""
    outcomes = {str(order.expr): run_checks(CHECKS, order) for order in orders}
    model: Any = wrapped()
    for step in range(2):  # DDP rebuilds its buckets after the first backward
        backward(model, step)
    return len(model.reducer._get_zeros_like_grad_buckets()), outcomes


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.timeout(300)
def test_every_hook_by_name_on_four_processes() -> None:
    orders = [contract("TestHook", expr, {})().order() for expr in [*HOOKS, *sorted(PAIRS)]]
    assert len(orders) > 20
    for rank, (buckets, outcomes) in enumerate(spawn(body, 4, orders, timeout=280, group_timeout=60.0)):
        assert buckets >= 3
        assert len(outcomes) == len(orders)
        failed = [f"{e}, {c}\n{text}" for e, checks in outcomes.items() for c, text in checks.items() if text]
        assert not failed, f"rank {rank}: " + "\n".join(failed)
