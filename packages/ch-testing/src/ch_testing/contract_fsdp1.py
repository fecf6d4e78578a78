"""The contract of hooks of kind ``"fsdp"``: ``hook(state, grad)`` and ``hook(state, grad, output)`` of FSDP1.

Such a hook gets a unit's gradient as one flat vector, so most of the DDP contract does not apply. The checks run on two
gloo processes, with the plain function and registered with a model of several units. The hook must be installed.
"""

import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import commhooks
from ch_testing.contract_description import listed
from ch_testing.contract_processes import assert_passed, run_checks
from commhooks import HookSpec, LowPrecisionState

SIZES = (7, 64, 1 << 14)
"""Elements of a shard."""


@dataclass(frozen=True)
class FlatOrder:
    """The hook under test, as the ranks receive it."""

    hook: str
    tolerance: float

    @property
    def function(self) -> Callable[..., None]:
        return commhooks.get(self.hook, "fsdp")

    @property
    def forms(self) -> list[bool]:
        """Signatures that the hook has: False without an output, True with one."""
        signature, found = inspect.signature(self.function), []
        for sharded in (False, True):
            try:
                signature.bind(*([None] * (3 if sharded else 2)))
                found.append(sharded)
            except TypeError:
                continue
        return found


def state() -> LowPrecisionState:
    group = dist.group.WORLD
    assert group is not None
    return LowPrecisionState(group)


def run(
    function: Callable[..., None], sharded: bool, grad: torch.Tensor, held: LowPrecisionState | None = None
) -> torch.Tensor:
    """Run the plain function, and return this rank's average, or its shard of the average."""
    held = held if held is not None else state()
    if not sharded:
        function(held, grad)
        return grad
    output = torch.empty(grad.numel() // dist.get_world_size(), dtype=grad.dtype)
    function(held, grad, output)
    return output


def wanted(sharded: bool, every: torch.Tensor) -> torch.Tensor:
    """Return the exact fp64 average of the rows of ``every``, or this rank's shard of it."""
    mean = every.double().mean(0)
    return mean.chunk(dist.get_world_size())[dist.get_rank()] if sharded else mean


def rows(n: int, seed: int) -> torch.Tensor:
    """Return every rank's gradient, ``(world, world * n)``."""
    world = dist.get_world_size()
    return torch.randn(world, world * n, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def model_of(sharded: bool) -> FullyShardedDataParallel:
    """Return a model of three units, with the same parameters on every rank."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(48, 33), torch.nn.Tanh(), torch.nn.Linear(33, 20))
    strategy = ShardingStrategy.FULL_SHARD if sharded else ShardingStrategy.NO_SHARD
    return FullyShardedDataParallel(
        torch.nn.Sequential(layers, torch.nn.Linear(20, 8)),
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
        sharding_strategy=strategy,
        device_id=torch.device(torch.get_default_device().type),
        use_orig_params=True,
    )


def grads(model: FullyShardedDataParallel, step: int, poison: float = 1.0) -> torch.Tensor:
    """Return this rank's gradients after one backward, as one vector."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    x = torch.randn(8, 48, generator=generator, dtype=torch.float32)
    (poison * model(x).square().mean()).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def near(found: torch.Tensor, exact: torch.Tensor, allowed: float) -> None:
    error = float((found.double() - exact.double()).norm() / exact.double().norm())
    assert error <= allowed, (
        f"relative error {error:.3g} against the exact average, allowed {allowed:.3g}: set `tolerance` if the hook "
        "promises no better"
    )


# -- the checks


def averages(order: FlatOrder) -> None:
    """The plain function leaves the average, in the gradient's dtype, for any size."""
    for sharded in order.forms:
        for seed, n in enumerate(SIZES):
            every = rows(n, seed)
            found = run(order.function, sharded, every[dist.get_rank()].clone())
            assert found.dtype == torch.float32
            near(found, wanted(sharded, every), order.tolerance)


def same_everywhere(order: FlatOrder) -> None:
    """Without shards, all ranks have the same bits."""
    if False not in order.forms:
        return
    found = run(order.function, False, rows(64, 3)[dist.get_rank()].clone())
    every = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(every, found)
    assert all(torch.equal(every[0], other) for other in every)


def not_finite(order: FlatOrder) -> None:
    """Inf of one rank reaches the rank that holds the element, and leaves no trace in the next step."""
    for sharded in order.forms:
        held, every = state(), rows(64, 4)
        every[1, :] = float("inf")
        assert not bool(run(order.function, sharded, every[dist.get_rank()].clone(), held).isfinite().any())
        every = rows(64, 5)
        near(
            run(order.function, sharded, every[dist.get_rank()].clone(), held), wanted(sharded, every), order.tolerance
        )


def registered(order: FlatOrder) -> None:
    """On a model of several units: near FSDP without a hook. NaN of one rank is visible, and leaves no trace."""
    for sharded in order.forms:
        model, plain = model_of(sharded), model_of(sharded)
        model.register_comm_hook(state(), order.function)
        for step in range(3):
            near(grads(model, step), grads(plain, step), order.tolerance)
        assert not bool(grads(model, 3, float("nan") if dist.get_rank() == 0 else 1.0).isfinite().all())
        near(grads(model, 4), grads(plain, 4), order.tolerance)


def travels(order: FlatOrder) -> None:
    """Function and state can be pickled without the group, and average as before."""
    function, again = pickle.loads(pickle.dumps((order.function, state())))
    for sharded in order.forms:
        every = rows(64, 6)
        near(run(function, sharded, every[dist.get_rank()].clone(), again), wanted(sharded, every), order.tolerance)


CHECKS = {check.__name__: check for check in (averages, same_everywhere, not_finite, registered, travels)}


def main(rank: int, world_size: int, order: FlatOrder) -> dict[str, str]:
    """Run every check of a world; see :func:`~ch_testing.contract_processes.run_checks`."""
    return run_checks(CHECKS, order)


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")
class FlatHookContract:
    """Proves a hook of kind ``"fsdp"``, in a file that pytest collects::

        class TestMine(FlatHookContract):
            hook = "mine"

    Attributes:
        hook: its name or ``"provider/name"``.
        tolerance: relative distance from the exact average that is allowed; by default rounding, of 16 bits for hooks
            that are declared lossy.
        timeout: seconds for the gloo processes, all checks together.
    """

    hook: ClassVar[str]
    tolerance: ClassVar[float | None] = None
    timeout: ClassVar[float] = 90.0

    @property
    def spec(self) -> HookSpec:
        return commhooks.spec(self.hook, "fsdp")

    def order(self) -> FlatOrder:
        default = 1e-2 if "lossy" in self.spec.capabilities else 1e-6
        return FlatOrder(self.hook, default if self.tolerance is None else self.tolerance)

    def test_description(self) -> None:
        assert 0 < len(self.spec.summary) <= 100
        assert self.spec.name in commhooks.describe(self.spec.name, "fsdp")
        assert self.order().forms, "callable as (state, grad) or (state, grad, output)"

    def test_listing_imports_no_torch(self) -> None:
        found = listed()
        assert not found["torch"], "listing hooks imported torch: keep the plugin module free of it"
        assert self.spec.id in found["ids"]  # type: ignore[operator]

    @pytest.mark.parametrize("check", list(CHECKS))
    def test_gloo(self, check: str) -> None:
        assert_passed(self, main, (self.order(),), check, self.timeout)
