"""What a hook under test says of itself, and how the contract makes it: the base of :class:`HookContract`."""

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import pytest
import torch

import commhooks
from commhooks.bucket import BucketLayout
from commhooks.handle import CommHook
from commhooks.reduction import Reduction, StepContext
from commhooks.registry.builder import Builder
from commhooks.registry.expression import canonical, nodes
from commhooks.registry.specs import HookSpec
from commhooks.state import HookState
from commhooks.testing.gradients import parameters
from commhooks.testing.simulated_ranks import SimulatedRanks


class Case:
    """The hook under test.

    Attributes:
        expr: its expression, as for :func:`commhooks.create`.
        tolerance: relative distance from the exact average that is allowed: of one step for a hook without residuals;
            for one with, of the sum of ``steps`` steps from the sum of the averages. By default rounding for exact
            hooks, 0.05 for lossy ones, 0.6 for those with residuals.
        mean: whether a step leaves (nearly) the mean of the ranks' gradients. ``False`` for a method that is meant to
            leave something else, such as a majority vote or a momentum: its numbers are then compared between ranks
            and runs, not with the mean.
        conservation: relative error allowed in ``input = sent + residual``, averaged over the ranks; by default
            rounding of fp32, or of 16 bits where the hook's collectives are cast.
        steps: over how many steps a hook with residuals must come near the average.
        first_step: steps counted before the checks begin, to be past a warm-up.
        compresses: whether it sends fewer bytes than plain averaging; by default whether it is lossy.
        world_sizes: simulated world sizes; 3 is where divisions show.
        dtypes: gradient dtypes it takes.
        timeout: seconds for the gloo processes, all checks together.
    """

    expr: ClassVar[str | Mapping[str, Any]]
    tolerance: ClassVar[float | None] = None
    mean: ClassVar[bool] = True
    conservation: ClassVar[float | None] = None
    steps: ClassVar[int] = 12
    first_step: ClassVar[int] = 0
    compresses: ClassVar[bool | None] = None
    world_sizes: ClassVar[tuple[int, ...]] = (2, 3)
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    timeout: ClassVar[float] = 90.0

    # -- the hook

    def make(self) -> CommHook:
        """A handle of the hook, not attached."""
        handle = commhooks.create(self.expr)
        if isinstance(handle.state, HookState):
            handle.state.step = self.first_step
        return handle

    @cached_property
    def handle(self) -> CommHook:
        """One handle, to look at."""
        return self.make()

    @cached_property
    def specs(self) -> list[HookSpec]:
        """The specs of every level of the expression, outermost first."""
        builder = Builder()
        levels = nodes(canonical(self.expr))
        return [builder.spec(n, "wrapper" if "inner" in n or "rules" in n else None) for n in levels]

    @cached_property
    def capabilities(self) -> frozenset[str]:
        """What the specs of all levels declare, with the parameters that the expression gives."""
        levels = zip(self.specs, nodes(canonical(self.expr)), strict=True)
        return frozenset().union(*(spec.capabilities_with(node.get("config", {})) for spec, node in levels))

    @property
    def reduction(self) -> Reduction:
        """The reduction; a test that asks for it is skipped for a foreign hook, whose collectives are its own."""
        if self.handle.reduction is None:
            pytest.skip("a foreign hook: its collectives are its own and cannot be simulated; see the gloo checks")
        return self.handle.reduction

    # -- what it promises

    @property
    def lossy(self) -> bool:
        reduction = self.handle.reduction
        return "lossy" in self.capabilities or (reduction is not None and reduction.lossy)

    @property
    def averages(self) -> bool:
        """Whether every step leaves the average on all ranks; what ``skips_sync`` says it does not."""
        return "skips_sync" not in self.capabilities

    @property
    def wraps(self) -> bool:
        """Whether the outermost level is a wrapper around one of our reductions."""
        return self.handle.reduction is not None and not {"inner", "rules"}.isdisjoint(self.handle.config)

    @property
    def local_fields(self) -> list[str]:
        reduction = self.handle.reduction
        return [f for f, kind in reduction.fields.items() if kind == "local"] if reduction is not None else []

    def allowed(self, dtype: torch.dtype = torch.float32) -> float:
        """:attr:`tolerance`, or what follows from the hook."""
        if self.tolerance is not None:
            return self.tolerance
        if not self.lossy:
            return 4 * torch.finfo(dtype).eps
        return 0.6 if self.local_fields else 0.05

    def needs_average(self) -> None:
        if not self.averages:
            pytest.skip("declares skips_sync: some steps leave the ranks with different gradients, on purpose")

    def near(self, error: float, allowed: float, where: str) -> None:
        """Fail unless ``error`` is allowed, naming what to set."""
        assert error <= allowed, (
            f"{where}: relative error {error:.3g} against the exact average, allowed {allowed:.3g}. If the method "
            "promises no better, set `tolerance` (and `steps`, with residuals); if it is no mean, set `mean = False`"
        )

    # -- simulated ranks

    def ranks(
        self,
        world_size: int = 2,
        like: dict[str, torch.Tensor] | None = None,
        buckets: int = 2,
        wrap: Callable[[Reduction], Reduction] | None = None,
        in_place: bool = False,
    ) -> SimulatedRanks:
        """Simulated ranks of fresh handles, whose reductions are put into ``wrap``; ``in_place``, with one copy of state."""
        _ = self.reduction  # skips a foreign hook

        def make() -> CommHook:
            handle = self.make()
            if wrap is not None and handle.reduction is not None:
                handle.built = wrap(handle.reduction)
            if isinstance(handle.state, HookState):
                handle.state.in_place = in_place
            return handle

        return SimulatedRanks(make, world_size, like if like is not None else parameters(), buckets=buckets)

    def sends_16_bits(self) -> bool:
        """Whether any number travels in 16 bits."""
        layout = BucketLayout.of_tensors(parameters())
        plan = self.reduction.plan(layout, StepContext(0, 2, 10**6))
        wires = (r.wire.dtype if r.wire is not None else r.dtype for stage in plan for r in stage)
        return any(dtype.is_floating_point and dtype.itemsize == 2 for dtype in wires)

    def conserved(self, dtype: torch.dtype = torch.float32) -> float:
        """:attr:`conservation`, or what follows from the hook and from the rounding of a gradient of ``dtype``."""
        if self.conservation is not None:
            return self.conservation
        return max(2e-2 if self.sends_16_bits() else 1e-4, 4 * torch.finfo(dtype).eps)


def finite(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether all numbers are finite."""
    return all(math.isfinite(float(t.double().abs().sum())) for t in tensors.values())
