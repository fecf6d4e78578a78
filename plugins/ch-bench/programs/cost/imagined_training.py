"""Races of whole trainings on the imagined GPU: FSDP2 on each of its axes, and overlapped exchanges of an outer optimizer.

torch's own FSDP2 runs, with its streams, events and hook slots, on meta tensors that claim to be CUDA tensors. Its process
groups are torch's fake ones. Each group's collectives have a separate stream, as with NCCL.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import commhooks
from ch_core import Engine
from ch_outer import FixedRanks, OuterOptimizer, Schedule
from programs.cost.imagined_gpu import DEVICE, ImaginedGPU, SilentGroup, planned_apart

WIDTHS = (64, 128, 128, 32)
"""Input of the first layer and output of each layer. Layers of one size would never replace scratch memory of another."""
RANKS_PER_NODE = 2
_TRANSPORTS = (  # where adapters make their transports
    "ch_fsdp.fsdp2.ProcessGroupTransport",
    "ch_fsdp.shard_axis.transport_over",
    "ch_fsdp.gather_axis.transport_over",
    "ch_fsdp.replicate_axis.transport_over",
    "commhooks.adapters.base.ProcessGroupTransport",
)
_COLLECTIVES = (
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_reduce",
)


@contextmanager
def _fake_ranks(world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _imagined_fsdp(gpu: ImaginedGPU) -> Iterator[None]:
    """Let FSDP2 take its device for CUDA, and replace the collectives of torch and of the adapters."""

    def made(group: dist.ProcessGroup, link: None = None, *, timeout: float | None = None) -> SilentGroup:
        nodes = RANKS_PER_NODE if group.size() % RANKS_PER_NODE == 0 else None
        return SilentGroup(gpu, group.size(), f"collectives of {group.group_name}", nodes)

    def collective(*given: Any, group: Any = None, async_op: bool = False, **named: Any) -> Any:
        tensors = [
            *given,
            *(named[key] for key in ("output", "output_tensor", "input", "input_tensor") if key in named),
        ]
        work = made(group).start(*tensors)
        if async_op:
            return work
        work.wait()
        return None

    with ExitStack() as patches:
        device_of = "torch.distributed.fsdp._fully_shard._fully_shard._get_device_from_mesh"
        patches.enter_context(mock.patch(device_of, return_value=DEVICE))
        for name in filter(lambda name: hasattr(dist, name), _COLLECTIVES):
            patches.enter_context(mock.patch.object(dist, name, collective))
        for place in _TRANSPORTS:
            patches.enter_context(mock.patch(place, made))
        # Ranks agree on numbers, and the imagined GPU has none.
        same: Callable[[Any, torch.Tensor], torch.Tensor] = lambda engine, mine: torch.stack([mine, mine])  # noqa: E731
        patches.enter_context(mock.patch.object(Engine, "gather", same))
        yield


class _Net(nn.Module):
    """Layers of which a forward may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes, device=DEVICE) for sizes in pairwise(WIDTHS))

    def forward(self, x: torch.Tensor, without: bool) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if not (without and number == 1):
                x = torch.relu(layer(x))
        return x.sum()


def fsdp2_races(
    hook: str, axis: str, count: int = 4, *, bf16: bool = False, seldom: bool = False, micro: int = 1
) -> list[str]:
    """Return accesses that no wait puts in order, in ``count`` steps of an FSDP2 model.

    Args:
        hook: an expression.
        axis: ``"shard"`` on two nodes of two ranks, ``"replicate"`` on a mesh of 2 x 2, or ``"gather"`` on two ranks.
        count: number of steps.
        bf16: True if torch reduces gradients in bf16 and casts them back.
        seldom: True if every other backward does not use a layer, whose gradient is then reduced late.
        micro: backwards of a step. torch waits for the streams of its hooks in the last one only.

    Example:
        >>> fsdp2_races("bf16_compress", "shard", 2)
        []
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16) if bf16 else None
    options: dict[str, Any] = {"mp_policy": policy} if policy is not None else {}
    with ExitStack() as stack:
        stack.enter_context(_fake_ranks(2 if axis == "gather" else 4))
        if axis == "replicate":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        gpu = stack.enter_context(ImaginedGPU())
        stack.enter_context(planned_apart(gpu))
        stack.enter_context(_imagined_fsdp(gpu))
        model: Any = _Net()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        handle = commhooks.attach(model, hook, axis=axis, verify_ranks=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(count):
            x = torch.zeros(4, WIDTHS[0], dtype=torch.bfloat16 if bf16 else torch.float32, device=DEVICE)
            for number in range(micro):
                model.set_is_last_backward(number == micro - 1)
                torch.autograd.backward(model(x, seldom and (step + number) % 2 == 1))
            optimizer.step()
            optimizer.zero_grad()
        handle.check()
        assert handle.stats()["steps"] > 0
        handle.detach()
        del model, handle, optimizer
        return list(gpu.order.races)


def outer_races(exchange: str, count: int = 12, schedule: Schedule | None = None) -> list[str]:
    """Return accesses that no wait puts in order, in ``count`` inner steps of an outer optimizer.

    Args:
        exchange: hook that exchanges the pseudo-gradients.
        count: number of inner steps.
        schedule: of the exchanges; by default two fragments, and two inner steps for an exchange to arrive.

    Example:
        >>> outer_races("allreduce", 6)
        []
    """
    with ImaginedGPU() as gpu, planned_apart(gpu):
        model = nn.Sequential(
            *(nn.Linear(*sizes, device=DEVICE) for sizes in pairwise(WIDTHS)), nn.BatchNorm1d(WIDTHS[-1]).to(DEVICE)
        )
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = schedule or Schedule(every=4, fragments=2, overlap=2)
        ranks = FixedRanks(transport=SilentGroup(gpu), verify_ranks=False)
        optimizer = OuterOptimizer(inner, model, schedule, exchange=exchange, ranks=ranks)
        for _ in range(count):
            x = torch.zeros(4, WIDTHS[0], dtype=torch.float32, device=DEVICE)
            torch.autograd.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.landed > 0
        return list(gpu.order.races)
