"""PyTorch's own PowerSGD under its own bf16 wrapper, on real gloo ranks: what the local residual is compared with.

It keeps the gradient minus the *averaged* approximation of the whole bucket, in the bucket's dtype, which under the
wrapper is bf16. It is called through a function of another name, because DDP refuses the wrapper's without NCCL.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ch_bench.convergence.study_ranks import curves_of
from ch_bench.convergence.study_tasks import TASKS, Setting, measured_at
from commhooks.testing import spawn

_WRAPPED = default_hooks.bf16_compress_wrapper(powerSGD_hook)


def bf16_powersgd(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's ``bf16_compress_wrapper(powerSGD_hook)`` under a name that DDP lets through."""
    return _WRAPPED(state, bucket)


def train(setting: Setting, rank: int, start: int, kind: str, seed: int) -> dict[str, Any]:
    """The record of a run, as :func:`study_ranks.train` makes it, without the bytes, which nobody counted."""
    found: dict[str, Any] = spawn(worker, setting.ranks, setting, (rank, start), kind, seed, timeout=270.0)[0]
    return found


def worker(rank: int, world: int, setting: Setting, powersgd: tuple[int, int], kind: str, seed: int) -> dict[str, Any]:
    """One rank of a run."""
    begun = time.perf_counter()
    torch.set_num_threads(1)
    task = TASKS[setting.task](setting, seed, kind)
    model = DistributedDataParallel(task.model)
    state = PowerSGDState(None, matrix_approximation_rank=powersgd[0], start_powerSGD_iter=powersgd[1])
    model.register_comm_hook(state, bf16_powersgd)
    optimizer = task.optimizer()
    rows: list[tuple[float, ...]] = []
    wanted = list(measured_at(setting.steps))
    for step in range(setting.steps + 1):
        if step in wanted:
            norm = torch.tensor([sum(e.double().norm().item() ** 2 for e in state.error_dict.values()) ** 0.5])
            dist.all_reduce(norm)
            loss, test = task.measure() if rank == 0 else (0.0, 0.0)
            rows.append((step, loss, test, 0.0, norm.item() / world))
        if step < setting.steps:
            optimizer.zero_grad()
            task.loss(model, rank, step).backward()
            optimizer.step()
    if not state.error_dict:
        raise RuntimeError("PyTorch's PowerSGD has not compressed anything")
    return {**curves_of(rows), "seconds": time.perf_counter() - begun}
