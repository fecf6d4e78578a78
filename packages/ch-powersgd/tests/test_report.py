"""``handle.report()`` on two gloo ranks. Its rows add up to the counters, and it warns of a hook
that never compresses.
"""

import json
import logging
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_testing import LogLines, spawn

pytestmark = pytest.mark.timeout(120)

HOOKS = (
    "allreduce",
    "bf16_compress",
    "powersgd(rank=2)",
    "bf16_wrapper(powersgd(rank=2))",
    "policy({'*bias': allreduce, '*': error_feedback(bf16_compress)})",
    "noop",
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 3))


def trained(expr: str, steps: int = 3) -> commhooks.CommHook:
    model = DistributedDataParallel(net(), bucket_cap_mb=0.001)
    handle = commhooks.attach(model, expr)
    for _ in range(steps):
        model(torch.randn(8, 40)).square().mean().backward()
    return handle


def body(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    for expr in HOOKS:
        handle = trained(expr)
        report, stats = handle.report(), handle.stats()
        assert report.rank == rank
        assert [name for row in report.rows for name in row.names].sort() == [p.name for p in handle.plan()].sort()
        assert report.total.payload_bytes == handle.payload_per_step() == stats["payload_bytes"] / stats["steps"], expr
        assert report.total.gradient_bytes == 4 * sum(p.numel() for p in net().parameters())
        status = 0 if expr == "noop" else 4 * (world + 1)  # fp32 numbers, all-reduced after each step
        assert report.total.wire_bytes == stats["wire_bytes"] / stats["steps"] - status, expr
        all_reduced = stats["payload_bytes"] / stats["steps"]  # all of these hooks all-reduce, like plain averaging
        assert (report.total.ratio is None) == (expr == "noop")
        assert report.total.ratio is None or math.isclose(
            report.total.ratio, report.total.gradient_bytes / all_reduced
        ), expr
        detail = handle.stats(detail=True)
        norms = [value for key, value in detail.items() if key.startswith("residual_norm/")]
        if norms:
            assert report.total.residual_norm is not None
            assert math.isclose(report.total.residual_norm, math.hypot(*norms), rel_tol=1e-9)
        for row in report.rows:
            if row.residual_norm is not None and len(row.names) == 1:
                assert math.isclose(row.relative_error or 0.0, detail[f"relative_error/{row.names[0]}"], rel_tol=1e-9)
        assert not report.warnings
        again = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert again["hook"] == handle.expr
        assert max(map(len, str(report).splitlines())) <= 80
        for row in report.rows:
            assert row.treatment in str(report)
            assert row.treatment in report._repr_html_()
        for legend in ("sent: bytes that this rank sends", "ratio: bytes sent with plain averaging") * (expr != "noop"):
            assert legend in str(report)
            assert legend in report._repr_html_()


def test_the_rows_add_up_to_the_counters() -> None:
    spawn(body, 2, timeout=110)


def body_warned(rank: int, world: int) -> list[Any]:
    lines = LogLines()
    logging.getLogger("commhooks").setLevel(logging.WARNING)
    never = trained("powersgd(rank=300)")
    [warning] = never.report().warnings
    assert "never compresses" in warning
    assert "averages every parameter plainly" in warning
    assert lines.lines == [warning]  # attach also logged it
    assert "never compresses" in " ".join(str(never.report()).split())
    late = trained("powersgd(rank=2, start_iter=100)")
    [warning] = late.report().warnings
    assert "warm-up" in warning
    assert all(row.why for row in late.report().rows)
    fresh = trained("powersgd(rank=2)", steps=0)
    [warning] = fresh.report().warnings
    assert "no step yet" in warning
    assert len(lines.lines) == 1
    foreign = commhooks.attach(DistributedDataParallel(net()), _foreign)
    assert foreign.report().total.payload_bytes is None
    assert "foreign" in str(foreign.report())
    return lines.lines


def _foreign(state: Any, bucket: commhooks.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_a_hook_that_never_compresses_is_warned_of() -> None:
    spawn(body_warned, 2, timeout=110)
