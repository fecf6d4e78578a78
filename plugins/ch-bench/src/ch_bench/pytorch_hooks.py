"""PyTorch's own DDP hooks, by the name of the hook here that they are compared with.

PyTorch's PowerSGD works with one bucket only: with more it starts collectives inside callbacks and hangs on gloo. PyTorch's
bf16 hook needs another name, because DDP refuses ``bf16_compress_hook`` without NCCL, although gloo sums bf16 correctly.
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

import commhooks

PYTORCH = ["powersgd(rank=4)", "powersgd(rank=1)", "bf16_compress", "fp16_compress", "allreduce"]
"""Hooks that exist in PyTorch, too. Its quantizing hooks fail in a group of one rank."""

LABELS = {
    "torch allreduce": "allreduce",
    "torch bf16": "bf16_compress",
    "torch fp16": "fp16_compress",
    "torch PowerSGD rank 1": "powersgd(rank=1)",
    "torch PowerSGD rank 4": "powersgd(rank=4)",
}
"""Names of PyTorch's hooks in tables."""

START = 2  # steps before PyTorch's PowerSGD compresses: DDP rebuilds its buckets after the first


def reduction_of(expression: str) -> commhooks.Reduction:
    """Return the reduction of an expression.

    Raises:
        UnknownHookError: no such hook.
        HookNotSupportedError: the hook starts its own collectives, which cannot be planned or simulated.
    """
    found = commhooks.create(expression).reduction
    if found is None:
        raise commhooks.HookNotSupportedError(
            f"{expression} is a foreign hook, whose collectives are unknown: choose a reduction "
            "(commhooks list --kind reduction)"
        )
    return found


def bf16(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Run PyTorch's bf16 hook under a name that DDP accepts."""
    return default_hooks.bf16_compress_hook(group, bucket)


@dataclass(frozen=True)
class PyTorchHook:
    """A hook of PyTorch on a model."""

    hook: Callable[..., Any]
    state: Any = None
    bytes_per_element: int = 4

    def payload(self, numel: int) -> float:
        """Return the bytes that one rank gives to collectives in a step.

        Raises:
            RuntimeError: PowerSGD has not compressed yet.
        """
        if not isinstance(self.state, PowerSGDState):
            return float(numel * self.bytes_per_element)
        if not self.state.error_dict:
            raise RuntimeError("PyTorch's PowerSGD has compressed nothing: run more warm-up steps")
        _, before, after = self.state.compression_stats()
        return float(4.0 * numel * after / before)


def attach_pytorch(model: DistributedDataParallel, hook: str) -> PyTorchHook:
    """Register PyTorch's counterpart of a hook: a name of :data:`PYTORCH` or :data:`LABELS`."""
    name = LABELS.get(hook, hook)
    if name.startswith("powersgd"):
        rank = int(name.removesuffix(")").rpartition("=")[2])
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=START)
        found = PyTorchHook(powerSGD_hook, state)
    else:
        found = {
            "allreduce": PyTorchHook(default_hooks.allreduce_hook),
            "bf16_compress": PyTorchHook(bf16, bytes_per_element=2),
            "fp16_compress": PyTorchHook(default_hooks.fp16_compress_hook, bytes_per_element=2),
        }[name]
    model.register_comm_hook(found.state, found.hook)
    return found
