"""PyTorch's own hooks, as the benchmark's peers.

PowerSGD runs with one bucket only: with two or more it starts collectives inside callbacks and hangs on gloo. The bf16
hook is called through a function of another name, because DDP refuses its own name without NCCL, although gloo reduces
bf16 correctly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

START = 2  # PyTorch's PowerSGD wants two plain steps: the buckets are rebuilt after the first


def bf16(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's bf16 hook under a name that DDP lets through."""
    return default_hooks.bf16_compress_hook(group, bucket)


@dataclass
class Peer:
    """An attached hook of PyTorch's; ``payload(numel)`` is what it gives to collectives per step, in bytes."""

    hook: Callable[..., Any]
    state: Any = None
    bytes_per_element: int = 4

    def payload(self, numel: int) -> float:
        """Bytes per rank and step; PowerSGD tells itself, and must have compressed by now."""
        if not isinstance(self.state, PowerSGDState):
            return float(numel * self.bytes_per_element)
        if not self.state.error_dict:
            raise RuntimeError("PyTorch's PowerSGD has not compressed anything: warm it up for longer")
        _, before, after = self.state.compression_stats()
        return float(4.0 * numel * after / before)


def attach(model: DistributedDataParallel, name: str) -> Peer:
    """Register the peer called ``name`` (`NAMES`)."""
    peer = NAMES[name]()
    model.register_comm_hook(peer.state, peer.hook)
    return peer


def _powersgd(rank: int) -> Peer:
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=START)
    return Peer(powerSGD_hook, state)


NAMES: dict[str, Callable[[], Peer]] = {
    "torch allreduce": lambda: Peer(default_hooks.allreduce_hook),
    "torch bf16": lambda: Peer(bf16, bytes_per_element=2),
    "torch fp16": lambda: Peer(default_hooks.fp16_compress_hook, bytes_per_element=2),
    "torch PowerSGD rank 1": lambda: _powersgd(1),
    "torch PowerSGD rank 4": lambda: _powersgd(4),
}
