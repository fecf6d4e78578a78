"""Every hook by name on four gloo processes with several buckets: what the contract proves on two, at its core."""

import time
import traceback
from typing import Any

import pytest

from commhooks.testing import spawn
from commhooks.testing.worker import Order, accumulated, attached, backward, detached, not_finite, wrapped

from .test_contract import contract, expressions

CHECKS = (attached, accumulated, not_finite, detached)


def body(rank: int, world: int, orders: list[Order]) -> tuple[int, dict[str, str]]:
    """How many buckets a model has, and the traceback of every check that failed, by hook and check."""
    failed: dict[str, str] = {}
    for order in orders:
        for check in CHECKS:
            begun = time.monotonic()
            try:
                check(order)
            except Exception:
                failed[f"{order.expr}, {check.__name__}, {time.monotonic() - begun:.1f} s"] = traceback.format_exc()
    model: Any = wrapped()
    for step in range(2):  # DDP lays its buckets anew after the first
        backward(model, step)
    return len(model.reducer._get_zeros_like_grad_buckets()), failed


@pytest.mark.gloo
@pytest.mark.timeout(300)
def test_every_hook_by_name_on_four_processes() -> None:
    orders = [contract(expr)().order() for expr in expressions()]
    assert len(orders) > 20
    for rank, (buckets, failed) in enumerate(spawn(body, 4, orders, timeout=280, group_timeout=60.0)):
        assert buckets >= 3
        assert not failed, f"rank {rank}: " + "\n".join(f"{where}\n{text}" for where, text in failed.items())
