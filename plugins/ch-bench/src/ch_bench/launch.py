"""Run a worker on the ranks of torchrun, or on processes that :func:`launch` starts on this machine."""

import gc
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ch_testing import WorkerError, spawn
from commhooks import CommHooksError

TIMEOUT = 120.0  # seconds of the process group
WEEK = 7 * 86400.0  # seconds: measurements end by themselves


def under_torchrun() -> bool:
    """Return True if a launcher has made this process one rank of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def pick_device(rank: int, world: int) -> torch.device:
    """Return a GPU for each rank if there are enough, otherwise the CPU."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= world:
        return torch.device("cuda", rank)
    return torch.device("cpu")


def run_here(worker: Callable[..., None], *args: Any) -> None:
    """Run ``worker(rank, world, device, *args)`` as the rank that torchrun made this process."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world):
        _use_loopback()
    torch.set_num_threads(1)  # ranks share the cores: more threads than cores would measure the scheduler
    device = pick_device(rank, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=TIMEOUT))
    try:
        worker(rank, world, device, *args)
    except BaseException:
        dist.destroy_process_group()
        raise
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
    gc.collect()  # models and hooks that still hold the group would abort the process at its end
    dist.destroy_process_group()


def launch(worker: Callable[..., None], nproc: int, *args: Any, enter: Callable[[int], None] | None = None) -> None:
    """Run ``worker(rank, world, device, *args)`` on ``nproc`` new processes and wait for them.

    Args:
        worker: module-level function.
        nproc: number of ranks.
        *args: passed to ``worker``; picklable.
        enter: called as ``enter(rank)`` in each rank before it opens a socket, for example to enter a network namespace.

    Raises:
        CommHooksError: a rank raised it.
        WorkerError: a rank failed; the message is the traceback of the rank that failed first.
    """
    device = pick_device(0, nproc).type
    with tempfile.TemporaryDirectory(prefix="commhooks-") as folder:
        try:
            spawn(
                _work, nproc, worker, folder, args,
                timeout=WEEK, group_timeout=TIMEOUT, device=device, enter=enter or _on_loopback,
            )  # fmt: skip
        except WorkerError as error:
            file = Path(folder, str(error.rank))
            if file.exists():
                raise pickle.loads(file.read_bytes()) from None
            raise


def launch_and_read(
    worker: Callable[..., None], nproc: int, *args: Any, enter: Callable[[int], None] | None = None
) -> Any:
    """Run :func:`launch` and return what rank 0 wrote as JSON to the path that ``worker`` gets after ``args``."""
    with tempfile.TemporaryDirectory(prefix="commhooks-") as folder:
        path = Path(folder, "found.json")
        launch(worker, nproc, *args, path, enter=enter)
        return json.loads(path.read_text())


def _work(rank: int, world: int, worker: Callable[..., None], folder: str, args: tuple[Any, ...]) -> None:
    try:
        worker(rank, world, pick_device(rank, world), *args)
    except CommHooksError as error:
        Path(folder, str(rank)).write_bytes(pickle.dumps(error))
        raise
    gc.collect()


def _on_loopback(rank: int) -> None:
    _use_loopback()


def _use_loopback() -> None:
    """Let gloo use the loopback interface, also if the host name does not resolve."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
