"""The exchange of an outer optimizer on two levels, two nodes of two ranks."""

import pytest

from ch_outer import OuterOptimizer, Schedule, nesterov
from ch_testing import spawn

from .outer_kit import adam, make, train, values

pytestmark = [pytest.mark.timeout(240), pytest.mark.full]


def body(rank: int, world: int, exchange: str) -> tuple[list[list[float]], float]:
    model = make()
    optimizer = OuterOptimizer(adam(model), model, Schedule(every=4), exchange=exchange, outer=nesterov(0.7))
    train(model, optimizer, rank, range(12))
    stats = optimizer.stats()
    return [p.flatten().tolist() for p in values(model)], stats.get("between_bytes", -1.0)


@pytest.mark.parametrize("hook", ["allreduce", "quant4(error_feedback=True)", "powersgd(rank=1)"])
def test_all_ranks_move_to_the_same_start(hook: str) -> None:
    found = spawn(body, 4, f"two_level({hook}, nodes=2)", timeout=200.0, group_timeout=120.0)
    assert all(model == found[0][0] for model, _ in found)
    assert all(between > 0 for _, between in found)


def test_exact_averages_are_those_of_a_flat_exchange() -> None:
    flat, two = (spawn(body, 4, expr, timeout=200.0)[0][0] for expr in ("allreduce", "two_level(allreduce, nodes=2)"))
    assert all(a == pytest.approx(b, abs=1e-5) for a, b in zip(flat, two, strict=True))
