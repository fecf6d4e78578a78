"""The part of the contract that needs real processes: what each gloo rank runs. Imported by the ranks."""

import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.errors import AttachError, HookConfigError, RankMismatchError, RemoteHookError
from commhooks.handle import CommHook
from commhooks.reduction import Reduction
from commhooks.registry.builder import Builder
from commhooks.registry.expression import Node, canonical
from commhooks.state import HookState
from commhooks.testing.faulty import WHERE, Faulty, Injected
from commhooks.testing.gradients import distance, same_bits

T = TypeVar("T")
Grads = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Order:
    """What the ranks are told of the hook under test."""

    expr: str | Mapping[str, Any]
    tolerance: float
    steps: int  # over which the sum must come near that of the averages
    averages: bool
    mean: bool
    compresses: bool
    any_bucket: bool  # whether another bucket size changes nothing
    first_step: int

    def attach(self, model: DistributedDataParallel, **options: Any) -> CommHook:
        return commhooks.attach(model, self.make(), **options)

    def make(self) -> CommHook:
        handle = commhooks.create(self.expr)
        if isinstance(handle.state, HookState):
            handle.state.step = self.first_step
        return handle


class Model(torch.nn.Module):
    """Some of everything: matrices, a transposed one, a prime, a scalar, an empty one, one that may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(48, 64)
        turned = torch.randn(32, 64, dtype=torch.float32, device="cpu").t() / 8  # (64, 32), stored as (32, 64)
        self.turned = torch.nn.Parameter(turned)
        self.scale = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float32, device="cpu"))
        self.empty = torch.nn.Parameter(torch.empty(0, 3, dtype=torch.float32, device="cpu"))
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
    """Gradients after one backward (of ``micro`` micro-batches, all but the last without synchronisation)."""
    model.zero_grad()
    for number in range(micro):
        generator = torch.Generator().manual_seed(1000 * step + 10 * number + dist.get_rank())
        x = torch.randn(8, 48, generator=generator, dtype=torch.float32, device="cpu")
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
        "promises no better (`steps`, with residuals), `mean = False` if it is no mean"
    )


def summed(model: DistributedDataParallel, order: Order, check: bool = True, **how: Any) -> Grads:
    """The mean over ``order.steps`` backwards of the same batch."""
    total: Grads = {}
    for _ in range(order.steps):
        found = backward(model, 0, **how)
        if check and order.averages:
            everywhere_the_same(found)
        for name, grad in found.items():
            total[name] = total.get(name, torch.zeros_like(grad)) + grad / order.steps
    return total


# -- the checks


def attached(order: Order) -> None:
    """``attach``, then steps over several buckets: same bits, near the average, counted, in use."""
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
    """The plain function with PyTorch's signature, through ``register_comm_hook``."""
    try:
        hook, state = plain_hook(canonical(order.expr))
    except HookConfigError:  # a composition of hooks that exist by name only
        return
    model = wrapped()
    model.register_comm_hook(state, hook)
    for step in range(3):
        found = backward(model, step)
        if order.averages:
            everywhere_the_same(found)


def plain_hook(node: Node) -> tuple[Callable[..., Any], object]:
    """``commhooks.get`` for every level, and the state that its innermost hook takes."""
    inner = node.get("inner")
    if "rules" in node or isinstance(inner, list):
        raise HookConfigError(f"{node['hook']} takes several hooks: there is no plain function of it")
    if inner is not None:
        hook, state = plain_hook(inner)
        return commhooks.get(node["hook"], "wrapper")(hook), state
    builder = Builder()
    spec = builder.spec(node)
    state = builder.registry.load(spec.state, spec)(None) if spec.state is not None else None
    return commhooks.get(spec.id), state


def accumulated(order: Order) -> None:
    """``no_sync`` micro-batches: one call of the hook per synchronised backward, on the accumulated gradient."""
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
    """A layer that gets no gradient at first, with ``find_unused_parameters``."""
    model = wrapped(find_unused_parameters=True)
    order.attach(model)
    for step in range(4):
        found = backward(model, step, late=step >= 2)
        if order.averages:
            everywhere_the_same(found)
        assert all(bool(g.isfinite().all()) for g in found.values())
        assert bool(found.get("late.weight", torch.zeros(1, dtype=torch.float32, device="cpu")).any()) == (step >= 2)


def views(order: Order) -> None:
    """``gradient_as_bucket_view`` and ``static_graph`` change nothing."""
    runs = []
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        model = wrapped(1.0, **options)  # one bucket: the hook may depend on the bucket's size, not on these
        order.attach(model)
        runs.append([backward(model, step) for step in range(4)])
    for other in runs[1:] if order.any_bucket else ():  # static_graph lays its buckets anew a step later
        assert [same_bits(a, b) for a, b in zip(runs[0], other, strict=True)] == [[]] * 4


def resumed(order: Order) -> None:
    """Saved, wrapped anew with other buckets, loaded: bit for bit the uninterrupted run."""
    whole, first = wrapped(), wrapped()
    order.attach(whole)
    saver = order.attach(first)
    for step in range(3):
        backward(whole, step)
        backward(first, step)
    if saver.reduction is None:
        return
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
    """A reduction that raises on one rank: an error on every rank at once, and the model goes on."""
    handle = order.make()
    if handle.reduction is None or not handle.reduction.collectives:
        return
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
        assert time.monotonic() - begun < 5.0  # nobody waits for a time-out
        found = backward(model, 2 + number)
        if order.averages:
            everywhere_the_same(found)


def disagreeing(order: Order) -> None:
    """Other options on one rank: every rank is told at ``attach``, before any gradient is sent."""
    what: Any = order.expr if dist.get_rank() == 0 else _Other()
    try:
        commhooks.attach(wrapped(), what, timeout=10.0)
    except RankMismatchError:
        return
    raise AssertionError("attach did not notice that the ranks use different hooks")


class _Other(Reduction):
    name = "another_hook"

    def run(self, bucket: Any, ctx: Any) -> Any:
        yield commhooks.AllReduce(bucket.buffer)


def detached(order: Order) -> None:
    """After ``detach`` the exact average; attaching again works; a second hook is a typed error."""
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
    backward(plain, 0)  # after the first DDP lays its buckets anew, and four ranks sum in an order that depends on them
    for step in (0, 1):
        wanted = backward(plain, step)
        assert same_bits(backward(model, step), wanted) == []
    order.attach(model).check()


def run_checks(checks: Mapping[str, Callable[[T], None]], order: T) -> dict[str, str]:
    """Run every check, whatever became of the others; returns its traceback, empty if it passed."""
    outcomes = {}
    for name, check in checks.items():
        try:
            check(order)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    return outcomes


CHECKS = {
    check.__name__: check
    for check in (attached, registered, accumulated, unused, views, resumed, not_finite, detached, raising, disagreeing)
}


def main(rank: int, world_size: int, order: Order) -> dict[str, str]:
    """Run every check of a world; see :func:`run_checks`."""
    return run_checks(CHECKS, order)
