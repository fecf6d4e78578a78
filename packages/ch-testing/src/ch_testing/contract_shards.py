"""Contract, part 4: sharded gradients, for reductions with a ``run_scatter()``, on simulated ranks."""

from typing import Any

import pytest
import torch

from ch_core import Scattered, SimulatedRank, simulate
from ch_testing.contract_case import Case, only_if
from ch_testing.gradients import all_ranks, average, distance
from commhooks import BucketLayout, HookNotSupportedError, HookState, ShardLayout

SHAPES = {"w": (65, 40), "b": (65,), "rows": (5, 64), "column": (129, 1), "square": (96, 96)}
"""Uneven on any number of ranks above one: padded, and on five ranks some ranks have no part of ``rows``."""


class Scattering(Case):
    """Checks of each rank's part of the average. A reduction without ``run_scatter()`` must be refused instead."""

    @property
    def scatters(self) -> bool:
        """True if the reduction can leave each rank a part of the average."""
        return self.simulates and self.reduction.scatters

    @property
    def scatters_not(self) -> bool:
        """True for a reduction without ``run_scatter()``."""
        return self.simulates and not self.reduction.scatters

    @only_if("scatters", "mean", "averages")
    def test_a_part_is_the_average_on_uneven_shards(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            for world in filter(self.fits, (1, *self.world_sizes, 5)):
                ranks = all_ranks(self._like(dtype), world, 0)
                steps = self.steps if self.local_fields else 1
                wholes = [whole for whole, _ in self._run(world, [ranks] * steps)]
                total = {n: torch.stack([w[n].double() for w in wholes]).mean(0) for n in SHAPES}
                allowed = max(self.allowed(dtype), 1.25 * self._error_of_run(ranks, dtype, steps))
                self.near(distance(total, average(ranks)), allowed, f"parts on {world} ranks, {dtype}")

    def _error_of_run(self, ranks: list[dict[str, torch.Tensor]], dtype: torch.dtype, steps: int) -> float:
        """Return the error that ``run`` makes on the same gradients; parts must come as near."""
        whole = self.ranks(len(ranks), self._like(dtype))
        total = {name: torch.zeros(shape, dtype=torch.float64, device="cpu") for name, shape in SHAPES.items()}
        for _ in range(steps):
            done = whole.step(ranks)
            for error in done.errors:
                if error is not None:
                    raise error
            for name, found in done.gradients[0].items():
                total[name] += found.double() / steps
        return distance(total, average(ranks))

    @only_if("scatters", "owes_residual")
    def test_parts_and_residuals_add_up_to_what_was_given(self) -> None:
        """Summed over steps, delivered parts plus the ranks' mean residual are the averages."""
        world, like = 3, self._like(torch.float32)
        given = [all_ranks(like, world, step) for step in range(4)]
        found = self._run(world, given)
        kept = found[-1][1]
        wanted = {n: torch.stack([average(ranks)[n].double() for ranks in given]).sum(0) for n in SHAPES}
        got = {n: torch.stack([whole[n].double() for whole, _ in found]).sum(0) for n in SHAPES}
        for state in kept:
            for name, field, tensor in state.entries():
                if field == "residual":
                    got[name] += tensor.double().view(SHAPES[name]) / world
        self.near(distance(got, wanted), self.conserved(), "delivered parts and residuals of whole parameters")

    @only_if("scatters")
    def test_a_step_that_is_rolled_back_leaves_no_trace_in_parts(self) -> None:
        world, like = self.few, self._like(torch.float32)
        given = [all_ranks(like, world, step) for step in (0, 1)]
        troubled = self._run(world, [given[0], given[1], given[1]], dropped=1)
        straight = self._run(world, given)
        for name in SHAPES:
            assert torch.equal(troubled[-1][0][name], straight[-1][0][name]), f"{name}: a dropped step left a trace"

    @only_if("scatters_not")
    def test_without_run_scatter_it_is_refused(self) -> None:
        with pytest.raises(HookNotSupportedError, match="run_scatter"):
            Scattered(self.reduction)

    def _like(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(shape, dtype=dtype, device="cpu") for name, shape in SHAPES.items()}

    def _run(
        self,
        world: int,
        steps: list[list[dict[str, torch.Tensor]]],
        dropped: int | None = None,
    ) -> list[tuple[dict[str, torch.Tensor], list[HookState]]]:
        """Return, for every step, the whole average, and all ranks' state after the last step."""
        dtype = steps[0][0]["w"].dtype
        cut = ShardLayout.of(BucketLayout.of_shapes(SHAPES, dtype), world)

        def body(rank: SimulatedRank) -> tuple[list[torch.Tensor], HookState]:
            handle = self.make()
            state = handle.hook_state
            assert handle.reduction is not None
            assert state is not None
            scattered = Scattered(handle.reduction)
            engine, parts = rank.engine(scattered, state), []
            for number, step in enumerate(steps):
                output = torch.full((cut.part.numel,), 7.0, dtype=dtype, device="cpu")
                engine.run(scattered.bucket(cut, _packed(cut, step[rank.rank], world), output))
                error = engine.finish()
                if error is not None:
                    raise error
                if number == dropped:
                    engine.rollback()
                engine.resolve_before_next_step()
                parts.append(output)
            return parts, state

        ranks = simulate(world, body)
        states = [state for _, state in ranks]
        return [(_whole(cut, [parts[number] for parts, _ in ranks]), states) for number in range(len(steps))]


def _packed(cut: ShardLayout, gradients: dict[str, torch.Tensor], world: int) -> torch.Tensor:
    """Return one rank's gradients as W padded parts, ``(W * n,)``."""
    parts = torch.zeros(world, cut.part.numel, dtype=cut.part.dtype, device="cpu")
    for p in cut.part.params:
        flat: Any = gradients[p.name].reshape(-1)
        for r, piece in enumerate(flat.split(p.numel)):
            parts[r, p.offset : p.offset + piece.numel()] = piece
    return parts.view(-1)


def _whole(cut: ShardLayout, parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return whole parameters from the parts of all ranks."""
    found = {}
    for p in cut.part.params:
        flat = torch.cat([part[p.offset : p.offset + p.numel] for part in parts])
        found[p.name] = flat[: cut.whole_param(p.name).numel].view(SHAPES[p.name])
    return found
