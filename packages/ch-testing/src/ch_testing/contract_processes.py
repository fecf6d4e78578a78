"""Contract, part 6: ``DistributedDataParallel`` on two gloo processes. Each check is a function that every rank runs.

All checks of a test class run in one world of processes. Each is a separate test.
"""

import copy
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_testing.conservation import mean_residuals, unaccounted
from ch_testing.contract_case import Case, only_if
from ch_testing.faulty import WHERE, Faulty, Injected
from ch_testing.gradients import distance, same_bits
from ch_testing.processes import spawn
from commhooks import (
    REGISTRY,
    AttachError,
    CommHook,
    HookConfigError,
    Node,
    RankMismatchError,
    Reduction,
    RemoteHookError,
    canonical,
)

Grads = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Order:
    """The hook under test and its promises, as the ranks receive them.

    Attributes:
        expr: its expression.
        tolerance: allowed relative distance from the exact average.
        steps: number of steps whose sum must come near the sum of the averages.
        averages: True if all ranks get the same gradients.
        mean: True if the gradients are the mean.
        compresses: True if the hook sends less than plain averaging.
        any_bucket: True if results do not depend on the buckets.
        first_step: steps counted before the first one.
        conservation: allowed relative error of the law of error feedback.
        mixes: True if the average of a parameter that no rank has used is not zero.
    """

    expr: str | Mapping[str, Any]
    tolerance: float
    steps: int
    averages: bool
    mean: bool
    compresses: bool
    any_bucket: bool
    first_step: int
    conservation: float
    mixes: bool

    def attach(self, model: DistributedDataParallel, **options: Any) -> CommHook:
        return commhooks.attach(model, self.make(), **options)

    def make(self) -> CommHook:
        handle = commhooks.create(self.expr)
        if handle.hook_state is not None:
            handle.hook_state.step = self.first_step
        return handle


class Model(torch.nn.Module):
    """Matrices (one transposed), a prime size, a scalar, an empty parameter, and a layer that may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(48, 64)
        turned = torch.randn(32, 64, dtype=torch.float32).t() / 8  # (64, 32), stored as (32, 64)
        self.turned = torch.nn.Parameter(turned)
        self.scale = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float32))
        self.empty = torch.nn.Parameter(torch.empty(0, 3, dtype=torch.float32))
        self.last = torch.nn.Linear(32, 101)
        self.late = torch.nn.Linear(32, 64)

    def forward(self, x: torch.Tensor, late: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.first(x)) @ self.turned * self.scale
        out = self.last(hidden).square().mean() + self.empty.sum()
        total: torch.Tensor = out + self.late(hidden).square().mean() if late else out
        return total


def wrapped(cap: float = 0.004, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Model(), bucket_cap_mb=cap, **options)


def backward(model: DistributedDataParallel, step: int, late: bool = True, micro: int = 1) -> Grads:
    """Return the gradients after ``micro`` micro-batches, of which only the last is synchronised."""
    model.zero_grad()
    for number in range(micro):
        generator = torch.Generator().manual_seed(1000 * step + 10 * number + dist.get_rank())
        x = torch.randn(8, 48, generator=generator, dtype=torch.float32)
        with model.no_sync() if number < micro - 1 else nullcontext():
            model(x, late).backward()
    return grads(model)


def grads(model: DistributedDataParallel) -> Grads:
    return {n: p.grad.detach().clone() for n, p in model.module.named_parameters() if p.grad is not None}


def everywhere_the_same(found: Grads) -> None:
    flat = torch.cat([t.reshape(-1) for t in found.values()])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    for rank, other in enumerate(every):
        assert torch.equal(every[0].nan_to_num(7.0), other.nan_to_num(7.0)), f"ranks 0 and {rank} have other gradients"


def near(total: Grads, wanted: Grads, allowed: float) -> None:
    assert total.keys() == wanted.keys()
    error = distance(total, wanted)
    assert error <= allowed, (
        f"relative error {error:.3g} against the exact average, allowed {allowed:.3g}: set `tolerance` if the method "
        "promises no better (`steps`, with residuals), `mean = False` if it is not a mean"
    )


def summed(model: DistributedDataParallel, order: Order) -> Grads:
    """Return the mean over ``order.steps`` backwards of the same batch."""
    total: Grads = {}
    for _ in range(order.steps):
        found = backward(model, 0)
        if order.averages:
            everywhere_the_same(found)
        for name, grad in found.items():
            total[name] = total.get(name, torch.zeros_like(grad)) + grad / order.steps
    return total


# -- the checks


def attached(order: Order) -> None:
    """Steps over several buckets leave the same bits, near the average, and the handle counts them."""
    model = wrapped()
    handle = order.attach(model)
    total = summed(model, order)
    backward(model, 1)
    handle.assert_active()
    if order.averages and order.mean:
        near(total, summed(wrapped(), order), order.tolerance)
    if order.compresses and handle.reduction is not None:
        assert handle.stats()["compressed_steps"] > 0, "no step sent less: set `first_step`, or `compresses = False`"
        assert handle.stats()["steps"] == order.steps + 1


def registered(order: Order) -> None:
    """The plain function with PyTorch's signature works through ``register_comm_hook``."""
    hook, state = plain_hook(canonical(order.expr))
    model = wrapped()
    model.register_comm_hook(state, hook)
    for step in range(3):
        found = backward(model, step)
        if order.averages:
            everywhere_the_same(found)


def plain_hook(node: Node) -> tuple[Callable[..., Any], object]:
    """Return the plain function of an expression, and the state of its innermost hook."""
    inner = node.get("inner")
    if "rules" in node or isinstance(inner, list):
        raise HookConfigError(
            f"{node['hook']} takes several hooks, so it has no plain function: attach it by its expression"
        )
    if inner is not None:
        hook, state = plain_hook(inner)
        return commhooks.get(node["hook"], "wrapper")(hook), state
    spec = REGISTRY.spec_of(node)
    state = REGISTRY.load(spec.state, spec)(None) if spec.state is not None else None
    return commhooks.get(spec.id), state


def accumulated(order: Order) -> None:
    """After ``no_sync`` micro-batches the hook runs once, on the accumulated gradient."""
    model, plain = wrapped(), wrapped()
    handle = order.attach(model)
    for step in range(2):
        found, wanted = backward(model, step, micro=2), backward(plain, step, micro=2)
        if order.averages:
            everywhere_the_same(found)
        if order.averages and order.mean and order.steps == 1:  # no residual: each step is near the average
            near(found, wanted, order.tolerance)
    if handle.reduction is not None:
        assert handle.stats()["steps"] == 2


def unused(order: Order) -> None:
    """With ``find_unused_parameters``, a layer that has no gradient at first gets the right one later."""
    model = wrapped(find_unused_parameters=True)
    order.attach(model)
    for step in range(4):
        found = backward(model, step, late=step >= 2)
        if order.averages:
            everywhere_the_same(found)
        assert all(bool(g.isfinite().all()) for g in found.values())
        assert bool(found.get("late.weight", torch.zeros(1, dtype=torch.float32)).any()) == (step >= 2)


def views(order: Order) -> None:
    """``gradient_as_bucket_view`` and ``static_graph`` change nothing."""
    runs = []
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        model = wrapped(1.0, **options)  # one bucket: the hook may depend on the bucket's size, not on these
        order.attach(model)
        runs.append([backward(model, step) for step in range(4)])
    for other in runs[1:] if order.any_bucket else ():  # static_graph rebuilds its buckets a step later
        assert [same_bits(a, b) for a, b in zip(runs[0], other, strict=True)] == [[]] * 4


def resumed(order: Order) -> None:
    """A run that is saved, wrapped again with other buckets and loaded gives the same bits."""
    whole, first = wrapped(), wrapped()
    order.attach(whole)
    saver = order.attach(first)
    for step in range(3):
        backward(whole, step)
        backward(first, step)
    second = wrapped(0.02 if order.any_bucket else 0.004)
    loader = order.attach(second)
    loader.load_state_dict(saver.state_dict())
    for step in range(3, 6):
        a, b = backward(whole, step), backward(second, step)
        if order.any_bucket:
            assert same_bits(a, b) == [], f"step {step}"


def not_finite(order: Order) -> None:
    """Inf on one rank reaches all ranks; the next step is finite."""
    model = wrapped()
    order.attach(model)
    backward(model, 0)
    poison = model.module.last.bias.register_hook(lambda g: g * float("inf") if dist.get_rank() == 0 else g)
    found = backward(model, 1)
    poison.remove()
    if order.averages:
        assert not bool(found["last.bias"].isfinite().all()), "a non-finite gradient was hidden from the scaler"
    assert all(bool(g.isfinite().all()) for g in backward(model, 2).values())


def raising(order: Order) -> None:
    """If the reduction raises on one rank, every rank raises at once, and the model stays usable."""
    handle = order.make()
    assert handle.reduction is not None
    faulty = handle.built = Faulty(handle.reduction)
    model = wrapped()
    commhooks.attach(model, handle)
    backward(model, 0)
    for number, where in enumerate(WHERE):
        if dist.get_rank() == 1:
            faulty.arm(where)
        dist.barrier()
        begun = time.monotonic()
        try:
            backward(model, 1)
        except (Injected, RemoteHookError) as error:
            if isinstance(error, Injected) != (dist.get_rank() == 1):
                raise AssertionError(f"the wrong rank has {error!r}") from error
        else:
            raise AssertionError(f"nothing was raised on rank {dist.get_rank()} ({where})")
        assert time.monotonic() - begun < 5.0, "a rank waited for a time-out"
        found = backward(model, 2 + number)
        if order.averages:
            everywhere_the_same(found)


def disagreeing(order: Order) -> None:
    """If one rank has another hook, every rank raises in ``attach``, before any gradient is sent."""
    what: Any = order.expr if dist.get_rank() == 0 else _Other()
    try:
        commhooks.attach(wrapped(), what, timeout=10.0)
    except RankMismatchError:
        return
    raise AssertionError("attach accepted different hooks on different ranks")


class _Other(Reduction):
    name = "another_hook"

    def run(self, bucket: Any, ctx: Any) -> Any:
        yield commhooks.AllReduce(bucket.buffer)


def detached(order: Order) -> None:
    """``detach`` restores the exact average, attaching again works, and a second hook is a typed error."""
    model = wrapped()
    handle = order.attach(model)
    backward(model, 0)
    try:
        order.attach(model)
    except AttachError:
        pass
    else:
        raise AssertionError("a second hook was attached")
    handle.detach()
    plain = wrapped()
    # DDP rebuilds its buckets after the first step, and the order of sums over four ranks depends on them.
    backward(plain, 0)
    for step in (0, 1):
        wanted = backward(plain, step)
        assert same_bits(backward(model, step), wanted) == []
    order.attach(model).check()


class Experts(torch.nn.Module):
    """Three experts, of which each rank leaves out one, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList([torch.nn.Linear(64, 64, bias=False) for _ in range(3)])
        self.twice = torch.nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor, left_out: int) -> torch.Tensor:
        hidden = self.twice(torch.tanh(self.twice(x)))
        return torch.stack([e(hidden) for n, e in enumerate(self.experts) if n != left_out]).square().mean()


def conserved(order: Order) -> None:
    """Nothing is lost with unused parameters, a shared layer, accumulation and a rank that joins."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    bare = Experts()
    model = DistributedDataParallel(copy.deepcopy(bare), bucket_cap_mb=0.02, find_unused_parameters=True)
    handle = order.attach(model)
    like = {name: param.detach() for name, param in bare.named_parameters()}
    applied, own = ({name: torch.zeros_like(param) for name, param in like.items()} for _ in range(2))
    with Join([model]):
        for step in range(12 if rank == 0 else 6):
            model.zero_grad()
            bare.zero_grad()
            left_out = -1 if order.mixes and step >= 6 else (rank + step) % 3  # after the join one rank is left
            for micro in range(2):
                chance = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
                x = torch.randn(8, 64, generator=chance, dtype=torch.float32)
                with model.no_sync() if micro == 0 else nullcontext():
                    model(x, left_out).backward()
                bare(x, left_out).backward()
            for total, net in ((applied, model.module), (own, bare)):
                for name, param in net.named_parameters():
                    if param.grad is not None:
                        total[name] += param.grad
    handle.commit()
    rows = {name: row["residual"] for name, row in handle.state_dict()["entries"].items() if "residual" in row}
    every: list[Any] = [None] * world
    dist.all_gather_object(every, (own, rows))
    wanted = {name: torch.stack([one[name] for one, _ in every]).sum(0) / world for name in like}
    if rank == 0:  # the other one has joined half way
        gaps = unaccounted(wanted, applied, mean_residuals([kept for _, kept in every], like))
        for name, gap in gaps.items():
            lost = gap / float(wanted[name].norm())
            assert lost <= order.conservation, f"{lost:.3g} of the gradients of {name} is neither applied nor owed"


CHECKS = {
    check.__name__: check
    for check in (
        attached,
        registered,
        accumulated,
        unused,
        views,
        resumed,
        not_finite,
        detached,
        raising,
        disagreeing,
        conserved,
    )
}
CONDITIONS = {"registered": "has_function", "resumed": "simulates", "raising": "sends", "conserved": "owes"}
"""Check -> the attribute of :class:`Case` that must be true for it."""


def main(rank: int, world_size: int, checks: list[str], order: Order) -> dict[str, str]:
    """Run checks on one rank, and return the traceback of each, empty if it passed."""
    outcomes = {}
    for name in checks:
        try:
            CHECKS[name](order)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    return outcomes


class Processes(Case):
    """Checks over ``DistributedDataParallel`` with several buckets and real collectives."""

    @property
    def has_function(self) -> bool:
        """True if the hook exists as a plain function."""
        try:
            plain_hook(canonical(self.expr))
        except HookConfigError:
            return False
        return True

    def order(self) -> Order:
        """Return the hook and its promises for the ranks."""
        return Order(
            self.expr,
            max(self.allowed(), 1e-6),
            self.steps if self.local_fields else 1,
            self.averages,
            self.mean,
            self.sends_less,
            self.any_bucket,
            self.first_step,
            self.conserved() if self.owes else 0.0,
            self.mixes,
        )

    def checks(self) -> list[str]:
        """Return the names of the checks that apply."""
        return [name for name in CHECKS if name not in CONDITIONS or getattr(self, CONDITIONS[name])]

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Collect one test for each check that applies."""
        super().pytest_generate_tests(metafunc)
        if "check" in metafunc.fixturenames:
            try:
                names = self.checks()
            except Exception:  # the hook is not registered yet, or is broken: the checks will tell
                names = list(CHECKS)
            metafunc.parametrize("check", names)

    @only_if("installed")
    def test_gloo(self, check: str) -> None:
        """Fail if a check failed on any rank of the world, which runs once for all checks of a class."""
        key = f"{type(self).__module__}.{type(self).__qualname__}"
        if key not in _DONE:
            try:
                _DONE[key] = spawn(main, 2, self.checks(), self.order(), timeout=self.timeout, group_timeout=20.0)
            except Exception as error:  # every check of this world fails with it
                _DONE[key] = error
        done = _DONE[key]
        if isinstance(done, Exception):
            raise done
        for rank, outcomes in enumerate(done):
            assert not outcomes[check], f"rank {rank}:\n{outcomes[check]}"


_DONE: dict[str, list[dict[str, str]] | Exception] = {}  # test class -> outcomes by rank, or the error of its world
