"""The ways in which gradients reach a hook on real ranks. Each trains a few steps and returns digests of what it computed.

A name that begins with ``=`` must have one digest on all ranks. Ways with dropped steps drop them at the same place on all
ranks, while messages are in flight.
"""

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import ch_ddp
import ch_fsdp
import ch_powersgd
import commhooks
from ch_outer import OuterOptimizer, Schedule
from ch_trace import Trace
from commhooks import CommHook
from tests.orders.late import LateCollectives
from tests.sizes.hooks import ROWS

from .models import Given, Like, given, like

Seen = dict[str, str]

STEPS = 4
BY_EXPR = {row.expr: row for row in ROWS}
CAPS = {"small": 0.011, "ordinary": 25.0}  # DDP's bucket_cap_mb


@dataclass(frozen=True)
class Case:
    """One run of a few steps.

    Attributes:
        way: key of :data:`WAYS`.
        hook: an expression as ``tests/sizes/hooks.py`` writes it, or a key of :data:`FUNCTIONS`.
        world: number of ranks.
        size: ``small`` (limits are small, too) or ``ordinary``.
        plant: name of a defect that is put back.
    """

    way: str
    hook: str
    world: int = 2
    size: str = "small"
    plant: str = ""

    def __str__(self) -> str:
        return f"{self.way}, {self.hook or 'no hook'}, {self.world} ranks, {self.size}"

    @property
    def expr(self) -> str:
        """The expression of the hook for this number of ranks."""
        return BY_EXPR[self.hook].expression(self.world) if self.hook in BY_EXPR else self.hook

    @property
    def equal(self) -> bool:
        """True if all ranks get the same gradients."""
        return self.hook not in BY_EXPR or BY_EXPR[self.hook].equal


def digest(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's bits."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()


network: LateCollectives | None = None
"""The late collectives of the present run."""


def hold(seconds: float = 0.15) -> None:
    """Let messages in flight outlive the step that is dropped next."""
    if network is not None:
        network.hold(seconds)


def note(seen: Seen, where: str, tensors: Iterable[tuple[str, torch.Tensor | None]]) -> None:
    """Add the digests of tensors that all ranks have in common."""
    for name, tensor in tensors:
        seen[f"={where} {name}"] = "none" if tensor is None else digest(tensor)


def note_state(seen: Seen, state: Any, where: str = "state") -> None:
    """Add the digests of everything in a state dict. It belongs to this rank."""
    if isinstance(state, Mapping):
        for name, part in state.items():
            note_state(seen, part, f"{where} {name}")
    elif isinstance(state, list | tuple):
        for number, part in enumerate(state):
            note_state(seen, part, f"{where} {number}")
    else:
        seen[where] = digest(state) if isinstance(state, torch.Tensor) else repr(state)


def finished(seen: Seen, handle: CommHook) -> Seen:
    handle.check()
    handle.commit()
    if handle.reduction is not None:
        note_state(seen, handle.state_dict())
    handle.detach()
    return seen


# -- DDP


def wrapped(case: Case, **options: Any) -> tuple[DistributedDataParallel, Like]:
    shapes = like(case.size)
    return DistributedDataParallel(Given(shapes), bucket_cap_mb=CAPS[case.size], **options), shapes


def train(
    case: Case, model: nn.Module, shapes: Like, rank: int, seen: Seen, steps: int = STEPS, *, leaves: bool = False
) -> None:
    """Step with new gradients, with zeroed ones, and with accumulated ones.

    With ``leaves`` a parameter is unused, in step 1 on one rank and in step 2 on all ranks.
    """
    steps = steps if case.size == "small" else 2
    for step in range(steps):
        model.zero_grad(set_to_none=step % 2 == 0)
        if step == 3 and hasattr(model, "no_sync"):
            with model.no_sync():
                model(given(shapes, rank, 50)).backward()
        numbers = given(shapes, rank, step)
        if leaves and (step == 2 or (step == 1 and rank == 1)):
            del numbers[list(numbers)[-2]]
        model(numbers).backward()
        note(seen, f"step {step}", ((name, p.grad) for name, p in model.named_parameters()))


def ddp(case: Case, rank: int) -> Seen:
    """``attach`` to ``DistributedDataParallel``."""
    model, shapes = wrapped(case)
    handle, seen = commhooks.attach(model, case.expr), Seen()
    train(case, model, shapes, rank, seen)
    return finished(seen, handle)


def ddp_views(case: Case, rank: int) -> Seen:
    """Gradients are views of DDP's buckets, some are unused, ranks are compared, and the hook moves to another model."""
    model, shapes = wrapped(case, gradient_as_bucket_view=True, find_unused_parameters=True)
    handle, seen = commhooks.attach(model, case.expr, check_ranks_every=1), Seen()
    train(case, model, shapes, rank, seen, leaves=True)
    saved = handle.state_dict() if handle.reduction is not None else None
    finished(seen, handle)
    other, _ = wrapped(case)
    again = commhooks.attach(other, case.expr)
    if saved is not None:
        again.load_state_dict(saved)
    train(case, other, shapes, rank, later := Seen(), 2)
    return finished(seen | {f"{name} again": value for name, value in later.items()}, again)


def ddp_traced(case: Case, rank: int) -> Seen:
    """A trace watches every work."""
    model, shapes = wrapped(case)
    handle, seen, names = commhooks.attach(model, case.expr), Seen(), [""]
    if rank == 0:
        names = [tempfile.mkdtemp(prefix="commhooks-")]
    dist.broadcast_object_list(names)
    with Trace(handle, Path(names[0], "trace.json")):
        train(case, model, shapes, rank, seen)
    dist.barrier()
    shutil.rmtree(names[0], ignore_errors=True)
    return finished(seen, handle)


class Stopped(Exception):
    """A backward that ends in the middle."""


def ddp_stopped(case: Case, rank: int) -> Seen:
    """A backward raises while messages are in flight, on all ranks. They continue over another group."""
    model, shapes = wrapped(case, gradient_as_bucket_view=True)
    handle, seen = commhooks.attach(model, case.expr), Seen()
    armed = [False]

    def stop(grad: torch.Tensor) -> None:
        if armed[0]:
            armed[0] = False
            raise Stopped

    model.module.get_parameter(next(iter(shapes))).register_hook(stop)  # of the last bucket
    train(case, model, shapes, rank, seen, 2)
    for turn in range(2):
        armed[0] = True
        model.zero_grad(set_to_none=False)
        try:
            model(given(shapes, rank, 90 + turn)).backward()
        except Stopped:
            hold()
            model._update_process_group(dist.new_group(list(range(case.world))))
        with model.no_sync():  # its gradients lie in DDP's buckets
            model.zero_grad(set_to_none=False)
            model(given(shapes, rank, 95)).backward()
        time.sleep(0.2 * turn)  # in the second turn the messages end now, in the first one later
        model(given(shapes, rank, 96)).backward()
        note(seen, f"after stop {turn}", ((name, p.grad) for name, p in model.named_parameters()))
    return finished(seen, handle)


def replicated(case: Case, rank: int) -> Seen:
    """``attach`` to a composable ``replicate()``."""
    shapes = like(case.size)
    model = replicate(Given(shapes), bucket_cap_mb=CAPS[case.size])
    handle, seen = commhooks.attach(model, case.expr), Seen()
    train(case, model, shapes, rank, seen)
    return finished(seen, handle)


def optimizer_in_backward(case: Case, rank: int) -> Seen:
    """Each bucket's average steps an optimizer while later buckets are in flight."""
    model, shapes = wrapped(case)
    handle, seen = commhooks.attach(model, case.expr), Seen()
    optimizer = ch_ddp.OverlappedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), handle)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(given(shapes, rank, step)).backward()
        optimizer.step()
        note(seen, f"step {step}", model.named_parameters())
    return finished(seen, handle)


def local_sgd(case: Case, rank: int) -> Seen:
    """Averages of gradients in subgroups, and of parameters, after the hook's warm-up."""
    model, shapes = wrapped(case)
    part, levels = (2, {1: 2, 4: 4}) if case.world == 4 else (1, {2: case.world})
    state = ch_ddp.PostLocalSGDState(None, None, 1, subgroup_size=part)
    model.register_comm_hook(state, ch_ddp.post_localSGD_hook)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer, seen = ch_ddp.PostLocalSGDOptimizer(inner, ch_ddp.HierarchicalModelAverager(levels, 1)), Seen()
    for step in range(6):
        optimizer.zero_grad()
        model(given(shapes, rank, step)).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            seen[f"step {step} {name}"] = digest(p)
    return seen


def all_gather_grad(case: Case, rank: int) -> Seen:
    """A differentiable all-gather."""
    seen = Seen()
    for name, tensor in given(like(case.size), rank, 0).items():
        mine = tensor.requires_grad_()
        every = ch_ddp.AllGatherGrad.apply(mine, None)
        (every * (1.0 + rank)).sum().backward()
        note(seen, "gathered", [(name, every)])
        seen[f"gradient {name}"] = digest(mine.grad)
    return seen


# -- DDP's register_comm_hook


def _powersgd() -> Any:
    return ch_powersgd.PowerSGDState(None, 2, 2, min_compression_rate=1.0)


FUNCTIONS: dict[str, Callable[[], tuple[Callable[..., Any], Any]]] = {
    "bf16_compress_wrapper(powerSGD_hook)": lambda: (
        ch_ddp.bf16_compress_wrapper(ch_powersgd.powerSGD_hook),
        _powersgd(),
    ),
    "fp16_compress_wrapper(torch's allreduce_hook)": lambda: (
        ch_ddp.fp16_compress_wrapper(default_hooks.allreduce_hook),
        dist.group.WORLD,
    ),
}
"""Functions that no row of ``tests/sizes/hooks.py`` has."""


def function_of(case: Case) -> tuple[Callable[..., Any], Any]:
    """Return the hook function and its state."""
    return FUNCTIONS[case.hook]() if case.hook in FUNCTIONS else BY_EXPR[case.hook].registered(case.world)


def function(case: Case, rank: int) -> Seen:
    """``register_comm_hook`` with a function of PyTorch's signature."""
    model, shapes = wrapped(case)
    hook, state = function_of(case)
    model.register_comm_hook(state, hook)
    seen = Seen()
    train(case, model, shapes, rank, seen)
    if isinstance(state, commhooks.HookState):
        note_state(seen, commhooks.state_dict(state))
    return seen


def users_function(case: Case, rank: int) -> Seen:
    """A function inside a user's hook, which uses the bucket's average as soon as its future completes."""
    model, shapes = wrapped(case)
    hook, state = function_of(case)

    def users(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        def doubled(done: Any) -> torch.Tensor:
            value = done.value()
            return (value[0] if isinstance(value, list) else value).mul(2.0)

        return hook(state, bucket).then(doubled)

    model.register_comm_hook(state, users)
    seen = Seen()
    train(case, model, shapes, rank, seen)
    return seen


# -- FSDP


class Layers(nn.Module):
    """Layers to shard, of uneven sizes."""

    def __init__(self, size: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner, outer = (48, 65) if size == "small" else (1000, 2101)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(inner, outer), nn.Tanh(), nn.Linear(outer, inner)) for _ in range(3)
        )
        self.head = nn.Linear(inner, 5)
        self.width = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).square().mean()

    def batch(self, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return torch.randn(3, self.width, generator=generator, dtype=torch.float32, device="cpu")


def sharded(case: Case, shards: int) -> Any:
    """Return a model under ``fully_shard``, in replicas of this many shards."""
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (case.world // shards, shards), mesh_dim_names=names)
    model = Layers(case.size)
    where = mesh if 1 < shards < case.world else mesh["shard"] if shards > 1 else mesh
    for layer in model.layers:
        fully_shard(layer, mesh=where)
    return fully_shard(model, mesh=where)


def fsdp2(case: Case, rank: int, *, shards: int, axis: str) -> Seen:
    model = sharded(case, shards)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle, seen = commhooks.attach(model, case.expr, axis=axis), Seen()
    for step in range(STEPS):
        optimizer.zero_grad()
        if step == 2:
            model.set_requires_gradient_sync(False)
            model(model.batch(rank, 50)).backward()
            model.set_requires_gradient_sync(True)
        loss = model(model.batch(rank, step))
        loss.backward()
        seen[f"loss {step}"] = digest(loss)
        for name, p in model.named_parameters():
            seen[f"step {step} {name}"] = digest(p.grad.to_local())
        optimizer.step()
    for name, p in model.named_parameters():
        note(seen, "end", [(name, p.detach().full_tensor())])
    return finished(seen, handle)


def fsdp1(case: Case, rank: int, *, strategy: ShardingStrategy) -> Seen:
    """A hook function of FSDP1 by ``register_comm_hook``."""
    hook = commhooks.get(case.hook, "fsdp")
    model = Layers(case.size)
    flat = FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=torch.device("cpu"),
        use_orig_params=False,
    )
    flat.register_comm_hook(ch_fsdp.LowPrecisionState(dist.group.WORLD), hook)
    seen = Seen()
    for step in range(STEPS):
        flat.zero_grad()
        flat(model.batch(rank, step)).backward()
        for name, p in flat.named_parameters():
            seen[f"step {step} {name}"] = digest(p.grad)
    return seen


# -- without a model


def reducer(case: Case, rank: int) -> Seen:
    """Rounds in every form, some with other collectives in between."""
    shapes = like(case.size)
    reducer, seen = commhooks.Reducer(case.expr, shapes), Seen()
    for step in range(2 * STEPS if case.size == "small" else 2):
        numbers = given(shapes, rank, step)
        if step % 2:  # filled in place
            for name, tensor in numbers.items():
                reducer.tensors[name].copy_(tensor)
        pending = reducer.start(None if step % 2 else numbers)
        if step % 4 == 1:
            for _ in range(reducer.stages):
                pending.advance()
                dist.all_reduce(torch.ones(3, dtype=torch.float32, device="cpu"))
        note(seen, f"step {step}", pending.wait().items())
        if step == 4:
            reducer.rollback()
    note_state(seen, reducer.state_dict())
    reducer.close()
    return seen


def reducer_dropped(case: Case, rank: int) -> Seen:
    """Rounds are abandoned, or dropped by a move to another group, with messages in flight."""
    shapes = like(case.size)
    reducer, seen = commhooks.Reducer(case.expr, shapes), Seen()
    for step in range(STEPS):
        pending = reducer.start(given(shapes, rank, 90 + step))
        for _ in range(min(step, reducer.stages - 1)):
            pending.advance()
        hold()
        if step % 2:
            reducer.move(dist.new_group(list(range(case.world))))
        else:
            reducer.abandon()
        numbers = given(shapes, rank, step)
        if step >= 2:
            for name, tensor in numbers.items():
                reducer.tensors[name].copy_(tensor)
        note(seen, f"step {step}", reducer.average(None if step >= 2 else numbers).items())
    note_state(seen, reducer.state_dict())
    reducer.close()
    return seen


def outer(case: Case, rank: int, *, moves: bool = False) -> Seen:
    """An outer optimizer whose exchanges travel while the model trains."""
    shapes = like(case.size)
    model, seen = Given(shapes), Seen()
    model.register_buffer("statistic", torch.zeros(5, dtype=torch.float32, device="cpu"))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = OuterOptimizer(inner, model, Schedule(every=4, fragments=2, overlap=2, mix="carry"), exchange=case.expr)
    for step in range(14):
        optimizer.zero_grad()
        model(given(shapes, rank, step)).backward()
        model.statistic.add_(rank + 1.0)
        optimizer.step()
        for name, p in model.named_parameters():
            seen[f"step {step} {name}"] = digest(p)
        if moves and step % 5 == 3:
            hold()
            optimizer.move(dist.new_group(list(range(case.world))))
    optimizer.finish()
    note(seen, "end", model.named_parameters())
    note_state(seen, optimizer.state_dict())
    return seen


WAYS: dict[str, Callable[[Case, int], Seen]] = {
    "attach to DDP": ddp,
    "attach, views": ddp_views,
    "attach, traced": ddp_traced,
    "attach, stopped backward": ddp_stopped,
    "replicate()": replicated,
    "OverlappedOptimizer": optimizer_in_backward,
    "local SGD": local_sgd,
    "AllGatherGrad": all_gather_grad,
    "register_comm_hook": function,
    "inside a user's hook": users_function,
    "FSDP2, shard": lambda case, rank: fsdp2(case, rank, shards=case.world, axis="shard"),
    "FSDP2, replicate": lambda case, rank: fsdp2(case, rank, shards=case.world // 2 or 1, axis="replicate"),
    "FSDP2, gather": lambda case, rank: fsdp2(case, rank, shards=case.world, axis="gather"),
    "FSDP1, NO_SHARD": partial(fsdp1, strategy=ShardingStrategy.NO_SHARD),
    "FSDP1, FULL_SHARD": partial(fsdp1, strategy=ShardingStrategy.FULL_SHARD),
    "Reducer": reducer,
    "Reducer, dropped and moved rounds": reducer_dropped,
    "OuterOptimizer, overlap": outer,
    "OuterOptimizer, overlap and moves": partial(outer, moves=True),
}
