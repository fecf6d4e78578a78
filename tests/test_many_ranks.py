"""Every reduction and wrapper over up to 64 simulated ranks in one process, against float64 averages."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import commhooks
from commhooks.testing import SimulatedRanks
from commhooks.testing.data import all_ranks, average, distance, same_bits

EXPRESSIONS = list(
    dict.fromkeys(spec.example for kind in ("reduction", "wrapper") for spec in commhooks.list_hooks(kind=kind))
)
BITS16 = 4e-2
"""Relative error of a sum whose terms and partial sums are rounded to bf16, 64 of them."""


def like(rows: int, columns: int, odd: int) -> dict[str, torch.Tensor]:
    """A matrix worth compressing, a vector, a scalar and an empty tensor."""
    shapes = {"m.weight": (rows, columns), "v.bias": (odd,), "scale": (), "empty": (0, 4)}
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def held_back(ranks: SimulatedRanks, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The mean over the ranks of what each still owes, in float64; zero where a hook owes nothing."""
    mean = {name: torch.zeros(t.shape, dtype=torch.float64) for name, t in wanted.items()}
    for saved in ranks.save():
        for name, row in saved["entries"].items():
            if "residual" in row:
                mean[name] += row["residual"].double().view_as(mean[name]) / ranks.world_size
    return mean


@pytest.mark.timeout(120)
@pytest.mark.parametrize("expr", EXPRESSIONS)
@settings(max_examples=3)
@given(
    world=st.integers(2, 12),
    rows=st.integers(16, 24),
    columns=st.integers(16, 24),
    odd=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
@example(world=64, rows=20, columns=17, odd=5, seed=0)
def test_what_arrives_and_what_is_owed_make_the_average(
    expr: str, world: int, rows: int, columns: int, odd: int, seed: int
) -> None:
    """Summed over two steps: the exact average is what arrived plus what is held back, on every rank alike."""
    shapes = like(rows, columns, odd)
    ranks = SimulatedRanks(lambda: commhooks.create(expr), world, shapes)
    exact = {name: torch.zeros(t.shape, dtype=torch.float64) for name, t in shapes.items()}
    arrived = {name: t.clone() for name, t in exact.items()}
    for step in (seed, seed + 1):
        every = all_ranks(shapes, world, step)
        result = ranks.step(every)
        assert not any(result.errors)
        if expr == "noop":
            assert all(same_bits(a, b) == [] for a, b in zip(result.gradients, every, strict=True))
            continue
        assert all(same_bits(result.gradients[0], other) == [] for other in result.gradients[1:])
        for name, mean in average(every).items():
            exact[name] += mean
            arrived[name] += result.gradients[0][name].double()
    if expr == "noop":
        return
    ranks.settle()
    owed = held_back(ranks, shapes)
    outermost = commhooks.spec(ranks.handles[0].config["hook"])
    error = distance({name: arrived[name] + owed[name] for name in exact}, exact)
    assert error < (BITS16 if "lossy" in outermost.capabilities or ranks.handles[0].reduction.lossy else 1e-6), error
