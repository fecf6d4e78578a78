"""Contract, part 3: error feedback. A hook reports its contribution, and nothing is lost, only late."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ch_core import StagePlan
from ch_testing.conservation import Readings, flat, mean_residuals, unaccounted
from ch_testing.contract_average import run
from ch_testing.contract_case import Case, only_if
from ch_testing.gradients import all_ranks, average, distance, gradients, parameters, same_bits
from ch_testing.simulated_ranks import SimulatedRanks
from commhooks import Bucket, BucketLayout, Composite, Reduction, Stages, StepContext

Given = list[dict[str, torch.Tensor | None]]
"""The gradients of all ranks; ``None`` for a parameter that a rank does not use."""


class Reporting(Composite):
    """Asks ``inner`` for its report, as ``error_feedback`` does.

    Args:
        inner: a reduction that declares ``reports_sent``.

    Attributes:
        sent: parameter name -> this rank's contribution in the last step, NaN where nothing was reported.
    """

    name = "reporting"

    def __init__(self, inner: Reduction) -> None:
        super().__init__(inner)
        self.sent: dict[str, torch.Tensor] = {}

    def plan(self, layout: BucketLayout, ctx: StepContext) -> tuple[StagePlan, ...]:
        return self.inner.plan(layout, ctx)

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        storage = torch.full_like(bucket.storage, float("nan"))
        report = Bucket(bucket.layout, storage, bucket.index, bucket.is_last)
        yield from self.inner.start(bucket, ctx.child("inner", sent=report))
        self.sent.update({p.name: view for p, view in report.views()})


def used_by_all(every: Given, step: int) -> list[int]:
    """Every rank uses every parameter. Returns the joined ranks, of which there are none."""
    return []


def unused_by_some(every: Given, step: int) -> list[int]:
    """Ranks leave out parameters in turn; at least one rank uses each."""
    for rank, one in enumerate(every):
        for number, name in enumerate(one):
            if (number + rank + step) % len(every) == 0:
                one[name] = None
    return []


def unused_by_all(every: Given, step: int) -> list[int]:
    """In every second step no rank uses ``odd.weight`` and ``head.weight``."""
    for one in every if step % 2 else []:
        one["odd.weight"] = one["head.weight"] = None
    return []


def last_rank_joins(every: Given, step: int) -> list[int]:
    """The last rank runs out of data after two steps."""
    return [len(every) - 1] if step >= 2 else []


def shared_weights(every: Given, step: int) -> list[int]:
    """A module is used twice: its gradient is the sum of two, and on one rank of one."""
    for rank, one in enumerate(every):
        other = gradients({name: g for name, g in one.items() if g is not None}, rank, 1000 + step)
        for name in ("embed.weight", "head.weight"):
            gradient = one[name]
            if rank and gradient is not None:
                one[name] = gradient + other[name]
    return []


def accumulated(every: Given, step: int) -> list[int]:
    """Each rank adds up as many micro-batches as its number, before the step."""
    for rank, one in enumerate(every):
        for name, gradient in one.items():
            if gradient is not None:
                one[name] = gradient * (rank + 1)
    return []


SITUATIONS: Mapping[str, Callable[[Given, int], list[int]]] = {
    situation.__name__: situation
    for situation in (used_by_all, unused_by_some, unused_by_all, last_rank_joins, shared_weights, accumulated)
}


class Feeding(Case):
    """Checks of reports and residuals."""

    @property
    def reports(self) -> bool:
        """True if the hook reports its sent part, so that ``error_feedback`` can wrap it."""
        return self.simulates and self.reduction.reports_sent

    @only_if("reports")
    def test_reports_what_it_sent(self) -> None:
        """``ctx.sent`` is in the gradient's units in every dtype, and filling it changes nothing."""
        for dtype, world in self._dtypes_and_worlds():
            like = parameters(dtype)
            asked, unasked = self.ranks(world, like, wrap=Reporting), self.ranks(world, like)
            for step in range(2):
                (found,), (wanted,) = run(asked, like, 1, step), run(unasked, like, 1, step)
                other = same_bits(found.gradients[0], wanted.gradients[0])
                assert other == [], (
                    f"{dtype}, {world} ranks: {other} become other numbers when ctx.sent is filled. Does the report "
                    "share memory with what is sent? x.to(dtype) is x itself when x has that dtype"
                )
                if self.mean:
                    error, allowed = distance(average(_reports(asked)), found.gradients[0]), self.conserved(dtype)
                    assert error <= allowed, (
                        f"{dtype}, {world} ranks: the mean of what the ranks report in ctx.sent differs from the result "
                        f"by {error:.3g}, allowed {allowed:.3g}. A report is in the gradient's units, before the "
                        "division by W, after rounding. Correct it, or set `conservation` or `mean = False`"
                    )

    @only_if("owes")
    def test_input_is_sent_plus_residual(self, situation: str) -> None:
        """In every step, ``mean(gradient + old residual) = average + mean(new residual)``."""
        worlds = self._dtypes_and_worlds() if situation == "used_by_all" else [(torch.float32, self.world_sizes[-1])]
        for dtype, world in worlds:
            like = parameters(dtype)
            ranks, before = self.ranks(world, like), None
            for step in range(6 if dtype == torch.float32 else 2):
                given: Given = [dict(one) for one in all_ranks(like, world, step)]
                joined = SITUATIONS[situation](given, step)
                result = ranks.step(given, joined)
                assert not any(result.errors), result.errors
                after = _residuals(ranks, like)
                self._law(given, joined, result.gradients[0], before, after, f"{situation}, {dtype}, {world} ranks")
                before = after

    def situations(self) -> list[str]:
        """Return the names of the situations in which the law must hold."""
        return [name for name in SITUATIONS if not (self.mixes and name == "unused_by_all")]

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Collect one test for each situation."""
        super().pytest_generate_tests(metafunc)
        if "situation" in metafunc.fixturenames:
            metafunc.parametrize("situation", self.situations())

    def _law(
        self,
        given: Given,
        joined: list[int],
        out: dict[str, torch.Tensor],
        before: Readings | None,
        after: Readings,
        where: str,
    ) -> None:
        assert after, (
            "no parameter has a residual: choose options in `expr` that compress something, or set `first_step` to be "
            "past a warm-up"
        )
        sending = [one for rank, one in enumerate(given) if rank not in joined]
        used = {name for name in after if any(one[name] is not None for one in sending)}
        wanted = {n: _mean([one[n] for one in sending], len(given), out[n]) for n in after}
        # DDP drops the average of a parameter that no rank has used.
        gaps = unaccounted(wanted, {name: out[name] for name in used}, after, before)
        size = sum(float((wanted[n] + (before[n][0] if before and n in before else 0)).square().sum()) for n in after)
        relative, allowed = (
            (sum(gap**2 for gap in gaps.values()) / size) ** 0.5,
            self.conserved(next(iter(out.values())).dtype),
        )
        assert relative <= allowed, (
            f"{where}: input and sent + residual differ by {relative:.3g}, allowed {allowed:.3g}; most in "
            f"{max(gaps, key=gaps.__getitem__)}. A residual has the parameter's shape, or else the numbers in the order "
            "of memory. A rank that rounds for all ranks keeps the error although it sends no gradient "
            "(ctx.as_owner()). Set `conservation` if the method promises no better, `mean = False` if what it applies "
            "is no mean"
        )

    def _dtypes_and_worlds(self) -> list[tuple[torch.dtype, int]]:
        """Return fp32 on every number of ranks, and the other dtypes on the last."""
        return [
            (t, w) for t in self.dtypes for w in (self.world_sizes if t == torch.float32 else self.world_sizes[-1:])
        ]


def _reports(ranks: SimulatedRanks) -> list[dict[str, torch.Tensor]]:
    """Return the report of each rank."""
    return [handle.reduction.sent for handle in ranks.handles if isinstance(handle.reduction, Reporting)]


def _residuals(ranks: SimulatedRanks, like: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the mean residual of every parameter that has one on some rank."""
    rows = [
        {name: row["residual"] for name, row in saved["entries"].items() if "residual" in row} for saved in ranks.save()
    ]
    return mean_residuals(rows, {name: tensor for name, tensor in like.items() if any(name in one for one in rows)})


def _mean(gradients: list[torch.Tensor | None], world: int, like: torch.Tensor) -> torch.Tensor:
    """Return the mean over ``world`` ranks, ``(numel,)`` fp64; ranks without a gradient count as zeros."""
    found = [flat(gradient) for gradient in gradients if gradient is not None]
    return torch.stack(found).sum(0) / world if found else torch.zeros_like(flat(like))
