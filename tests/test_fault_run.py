"""1 000 steps with random faults. Undone steps leave no trace, to the bit.

Two runs over simulated ranks. One meets faults: a NaN on one rank, a skipped step, an exception on one rank at any
stage, new buckets, a new wrapper, a save and a resume on 2, 3 or 4 ranks. The other runs only the committed steps, with
the same changes of world size.
"""

import io
import random
from typing import Any

import pytest
import torch

import commhooks
from ch_testing import Faulty, SimulatedRanks
from ch_testing.faulty import WHERE
from commhooks import CommHook

pytestmark = pytest.mark.full

LIKE = {
    "a.weight": torch.zeros(24, 16),
    "a.bias": torch.zeros(24),
    "b.weight": torch.zeros(12, 24).t(),
    "scale": torch.zeros(()),
    "c.weight": torch.zeros(16, 24),
}


def gradients(world: int, step: int) -> list[dict[str, torch.Tensor]]:
    made = []
    for rank in range(world):
        generator = torch.Generator().manual_seed(step * 8 + rank)
        made.append({n: torch.empty_like(t).copy_(torch.randn(t.shape, generator=generator)) for n, t in LIKE.items()})
    return made


class Run:
    """Ranks that are created again after each interruption of the run."""

    def __init__(self, expr: str) -> None:
        self.expr = expr
        self.ranks = self.fresh(2)

    def fresh(self, world: int, buckets: int = 2) -> SimulatedRanks:
        def make() -> CommHook:
            handle = commhooks.create(self.expr)
            assert handle.reduction is not None
            handle.built = Faulty(handle.reduction)
            return handle

        return SimulatedRanks(make, world, LIKE, buckets=buckets)

    def resume(self, world: int, buckets: int = 2) -> None:
        """Save to a file, discard all ranks, load."""
        file = io.BytesIO()
        torch.save(self.ranks.save(), file)
        file.seek(0)
        self.ranks = self.fresh(world, buckets)
        self.ranks.load(torch.load(file, weights_only=True))

    def step(self, step: int) -> dict[str, torch.Tensor]:
        result = self.ranks.step(gradients(self.ranks.world_size, step))
        assert result.errors == [None] * self.ranks.world_size
        return result.gradients[0]


def bad_step(run: Run, kind: str, rng: random.Random) -> None:
    """Run a step that must leave no trace."""
    world = run.ranks.world_size
    wrong = gradients(world, rng.randrange(10**6, 2 * 10**6))
    victim = rng.randrange(world)
    if kind == "nan":
        name = rng.choice(["a.weight", "b.weight", "c.weight", "scale"])
        wrong[victim][name].as_strided((1,), (1,))[0] = rng.choice([float("nan"), float("inf")])
        result = run.ranks.step(wrong)
        assert all(not bool(found[name].isfinite().all()) for found in result.gradients)
    elif kind == "skip":
        run.ranks.step(wrong)
        run.ranks.rollback()
    else:
        faulty = run.ranks.handles[victim].reduction
        assert isinstance(faulty, Faulty)
        faulty.arm(rng.choice(WHERE))
        errors = run.ranks.step(wrong).errors
        assert all(error is not None for error in errors)


def same(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> None:
    for one, two in zip(a, b, strict=True):
        assert one["step"] == two["step"]
        assert one["entries"].keys() == two["entries"].keys()
        for name, row in one["entries"].items():
            for field, tensor in row.items():
                assert torch.equal(tensor, two["entries"][name][field]), (name, field)


@pytest.mark.timeout(500)  # 25 s on an idle machine
@pytest.mark.parametrize(
    ("expr", "steps"), [("powersgd(rank=2, min_compression_rate=1)", 1000), ("error_feedback(bf16_compress)", 400)]
)
def test_undone_steps_leave_no_trace(expr: str, steps: int) -> None:
    rng = random.Random(2026)
    faulty, clean = Run(expr), Run(expr)
    counts = dict.fromkeys(("nan", "skip", "raise", "rewrap", "world"), 0)
    done, taken = 0, 0
    while taken < steps:
        event = rng.choices(["good", "nan", "skip", "raise", "rewrap", "world"], [60, 12, 12, 12, 3, 2])[0]
        if event == "good":
            a, b = faulty.step(done), clean.step(done)
            assert all(torch.equal(a[name], b[name]) for name in LIKE), f"step {done}"
            done += 1
        elif event == "rewrap":
            faulty.resume(faulty.ranks.world_size, buckets=rng.randint(1, 5))
        elif event == "world":
            world = rng.choice([2, 3, 4])
            faulty.resume(world, buckets=rng.randint(1, 5))
            if world != clean.ranks.world_size:
                clean.resume(world)
        else:
            bad_step(faulty, event, rng)
        taken += event in ("good", "nan", "skip", "raise")
        if event != "good":
            counts[event] += 1
    same(faulty.ranks.save(), clean.ranks.save())
    assert faulty.ranks.save()[0]["step"] == done
    assert min(counts.values()) >= 5, counts
