"""The hook under test: its declarations, and simulated ranks of it. Base of every part of :class:`HookContract`."""

import math
from collections.abc import Callable, Mapping
from functools import cached_property, wraps
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch

import commhooks
from ch_core import LATER
from ch_testing.gradients import all_ranks, parameters
from ch_testing.simulated_ranks import SimulatedRanks
from commhooks import (
    REGISTRY,
    BucketLayout,
    CommHook,
    HookSpec,
    Reduction,
    RemoteHookError,
    StepContext,
    canonical,
    nodes,
)

P = ParamSpec("P")
T = TypeVar("T")

REMEDIES = {
    "view size is not compatible": (
        "a gradient keeps its parameter's strides, and a transposed or channels_last one is not contiguous. Read it with "
        "reshape(-1), write it with copy_(), or take bucket.matrix(param), whose rows are contiguous in memory"
    ),
    "dtype": "a bucket has the dtype of its parameters. Cast with .to(), and set `dtypes` if the method takes fewer",
    "meta": (
        "requests are planned on meta tensors. Allocate with ctx.scratch(..., device=bucket.device), and read no numbers "
        "to decide about requests"
    ),
}
"""Part of an error's text -> its usual cause and remedy."""


class Case:
    """The hook under test.

    Attributes:
        expr: its expression, as for :func:`commhooks.create`.
        tolerance: allowed relative distance from the exact average. It holds for one step of a hook without residuals,
            and for the mean of ``steps`` steps of a hook with residuals. Default: rounding for exact hooks, 0.05 for lossy
            hooks, 0.6 for hooks with residuals.
        mean: False for a method that does not leave the mean, such as a majority vote or a momentum. Its results are
            then compared between ranks and runs only.
        conservation: allowed relative error of ``input = sent + residual``, averaged over the ranks. Default: rounding
            of fp32, or of 16 bits if the hook's collectives are cast.
        mixes: True if the method mixes the parameters of a bucket, so that the average of a parameter that no rank has
            used is not zero. DDP drops that average, and the law of conservation does not cover it.
        steps: number of steps after which a hook with residuals must come near the average.
        first_step: number of steps counted before the checks begin, to be past a warm-up.
        compresses: True if the hook sends fewer bytes than plain averaging. Default: True if it is lossy.
        world_sizes: simulated world sizes; 3 shows divisions. A hook with ``nodes=2`` takes ``(4, 6)``.
        dtypes: gradient dtypes that the hook takes.
        timeout: seconds for the gloo processes, all checks together.
    """

    expr: ClassVar[str | Mapping[str, Any]]
    tolerance: ClassVar[float | None] = None
    mean: ClassVar[bool] = True
    conservation: ClassVar[float | None] = None
    mixes: ClassVar[bool] = False
    steps: ClassVar[int] = 12
    first_step: ClassVar[int] = 0
    compresses: ClassVar[bool | None] = None
    world_sizes: ClassVar[tuple[int, ...]] = (2, 3)
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    timeout: ClassVar[float] = 90.0
    _first_failure: ClassVar[str]

    # -- the hook

    def make(self) -> CommHook:
        """Return a handle of the hook that is not attached."""
        handle = commhooks.create(self.expr)
        if handle.hook_state is not None:
            handle.hook_state.step = self.first_step
        return handle

    @cached_property
    def handle(self) -> CommHook:
        """A handle to inspect."""
        return self.make()

    @cached_property
    def specs(self) -> list[HookSpec]:
        """The specs of every level of the expression, outermost first."""
        return [REGISTRY.spec_of(node) for node in nodes(canonical(self.expr))]

    @cached_property
    def capabilities(self) -> frozenset[str]:
        """Capabilities that the specs of all levels declare, with the options of the expression."""
        levels = zip(self.specs, nodes(canonical(self.expr)), strict=True)
        return frozenset().union(*(spec.capabilities_with(node.get("config", {})) for spec, node in levels))

    @property
    def reduction(self) -> Reduction:
        """The hook as a reduction; :attr:`simulates` says if it is one."""
        found = self.handle.reduction
        assert found is not None, f"{self.handle.expr} is a foreign hook, whose collectives cannot be simulated"
        return found

    # -- its promises

    @property
    def simulates(self) -> bool:
        """True if the hook is a reduction. A foreign hook starts its own collectives, which need processes."""
        return self.handle.reduction is not None

    @property
    def installed(self) -> bool:
        """True if every level is an installed hook, so that other processes find it."""
        return all(spec.provider != "local" for spec in self.specs)

    @property
    def lossy(self) -> bool:
        """True if the hook changes the average by more than rounding."""
        return "lossy" in self.capabilities or (self.simulates and self.reduction.lossy)

    @property
    def averages(self) -> bool:
        """True if every step leaves the same gradients on all ranks; a hook with ``skips_sync`` does not promise it."""
        return "skips_sync" not in self.capabilities

    @property
    def sends_less(self) -> bool:
        """True if the hook promises fewer bytes than plain averaging."""
        return self.compresses if self.compresses is not None else self.lossy and self.averages

    @property
    def wraps(self) -> bool:
        """True if the outermost level is a wrapper around a reduction."""
        return self.simulates and not {"inner", "rules"}.isdisjoint(self.handle.config)

    @property
    def sends(self) -> bool:
        """True if the hook is a reduction with collectives."""
        return self.simulates and bool(self.reduction.collectives)

    @property
    def any_bucket(self) -> bool:
        """True if results do not depend on the buckets."""
        return not self.simulates or self.reduction.granularity == "tensor"

    @property
    def local_fields(self) -> list[str]:
        """Fields of state that are local to a rank, such as residuals."""
        reduction = self.handle.reduction
        return [f for f, kind in reduction.fields.items() if kind == "local"] if reduction is not None else []

    @property
    def keeps_state(self) -> bool:
        """True for a reduction with state fields."""
        return self.simulates and bool(self.reduction.fields)

    @property
    def owes_residual(self) -> bool:
        """True if the hook keeps a residual."""
        return "residual" in self.local_fields

    @property
    def owes(self) -> bool:
        """True if the law of error feedback holds for the hook."""
        return self.owes_residual and (self.mean or self.conservation is not None)

    @property
    def owns(self) -> bool:
        """True if each rank of a node keeps state for its part only."""
        return self.keeps_state and self.reduction.levels

    @property
    def fits_one_rank(self) -> bool:
        """True if the hook runs on a single rank."""
        return self.fits(1)

    def fits(self, world_size: int) -> bool:
        """Return True if this number of ranks fills the nodes of a hook with ``nodes=``."""
        nodes = self.handle.reduction.nodes if self.handle.reduction is not None else None
        if nodes is None:
            return True
        return world_size % nodes == 0 if isinstance(nodes, int) else world_size == sum(map(len, nodes))

    def allowed(self, dtype: torch.dtype = torch.float32) -> float:
        """Return :attr:`tolerance`, or its default."""
        if self.tolerance is not None:
            return self.tolerance
        if not self.lossy:
            return 4 * torch.finfo(dtype).eps
        return 0.6 if self.local_fields else 0.05

    def conserved(self, dtype: torch.dtype = torch.float32) -> float:
        """Return :attr:`conservation`, or its default for gradients of ``dtype``."""
        if self.conservation is not None:
            return self.conservation
        return max(2e-2 if self._sends_16_bits() else 1e-4, 4 * torch.finfo(dtype).eps)

    def _sends_16_bits(self) -> bool:
        layout = BucketLayout.of_tensors(parameters())
        plan = self.reduction.plan(layout, StepContext(0, 2, LATER))
        wires = (r.wire.dtype if r.wire is not None else r.dtype for stage in plan for r in stage)
        return any(dtype.is_floating_point and dtype.itemsize == 2 for dtype in wires)

    def near(self, error: float, allowed: float, where: str) -> None:
        """Fail if ``error`` is larger than allowed, and name the attribute to set."""
        assert error <= allowed, (
            f"{where}: relative error {error:.3g} against the exact average, allowed {allowed:.3g}. If the method "
            "promises no better, set `tolerance` (and `steps`, with residuals). If it leaves no mean, set `mean = False`"
        )

    # -- simulated ranks

    @property
    def few(self) -> int:
        """Number of ranks of most checks, the first of :attr:`world_sizes`."""
        return self.world_sizes[0]

    @property
    def many(self) -> int:
        """Another number of ranks, the last of :attr:`world_sizes`."""
        return self.world_sizes[-1]

    def ranks(
        self,
        world_size: int | None = None,
        like: dict[str, torch.Tensor] | None = None,
        buckets: int = 2,
        wrap: Callable[[Reduction], Reduction] | None = None,
    ) -> SimulatedRanks:
        """Return simulated ranks of fresh handles.

        Args:
            world_size: number of ranks; by default :attr:`few`.
            like: tensors like the parameters.
            buckets: number of buckets.
            wrap: put around every rank's reduction.
        """

        def make() -> CommHook:
            handle = self.make()
            if wrap is not None and handle.reduction is not None:
                handle.built = wrap(handle.reduction)
            return handle

        world = self.few if world_size is None else world_size
        return SimulatedRanks(make, world, like if like is not None else parameters(), buckets=buckets)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Collect the parametrised checks; parts of the contract add theirs."""

    @property
    def first_failure(self) -> str:
        """Why the hook cannot do one step, with the remedy; empty if it can. The step runs once for each class."""
        cls = type(self)
        if "_first_failure" not in cls.__dict__:
            cls._first_failure = self._try_one_step()
        return cls._first_failure

    def _try_one_step(self) -> str:
        if not self.simulates:
            return ""
        try:
            like = parameters()
            errors = self.ranks(self.few, like).step(all_ranks(like, self.few, 0)).errors
        except Exception as raised:
            errors = [raised]
        own = [e for e in errors if e is not None and not isinstance(e, RemoteHookError)]
        found = next((e for e in [*own, *errors] if e is not None), None)
        if found is None:
            return ""
        remedy = next((f"\n{remedy}" for part, remedy in REMEDIES.items() if part in str(found)), "")
        return f"one step on {self.few} simulated ranks failed with {type(found).__name__}: {found}{remedy}"


def only_if(*conditions: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Collect a check only for hooks for which these attributes of :class:`Case` are true.

    If a hook is registered after its test class was defined, its attributes are unknown then, and the check is skipped.
    """

    def mark(check: Callable[P, T]) -> Callable[P, T]:
        @wraps(check)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            if not applies(args[0], run):
                import pytest  # not above: the ranks of other processes import this module, too

                pytest.skip(f"needs {' and '.join(conditions)}")
            return check(*args, **kwargs)

        run.conditions = conditions  # type: ignore[attr-defined]
        return run

    return mark


def applies(case: object, check: object) -> bool:
    """Return True if a check that is marked with :func:`only_if` applies to a case."""
    return all(getattr(case, condition) for condition in getattr(check, "conditions", ()))


def finite(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return True if all numbers are finite."""
    return all(math.isfinite(float(t.double().abs().sum())) for t in tensors.values())
