"""Start N ranks on this machine and end them together.

Two ways in, one worker function: under ``torchrun`` the environment already says which rank this process is; otherwise
`launch` spawns the ranks itself, with a file store, so that no port is ever chosen. When one rank fails the others are
ended, and what is reported is the error that came *first*: the rest are usually only "connection closed by peer".
"""

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

TIMEOUT = timedelta(seconds=120)
GRACE = 2.0  # seconds in which a failing rank's peers may still report, to find out who was first


class WorkerFailed(RuntimeError):
    """A rank ended with an error; the message is its traceback."""


def under_torchrun() -> bool:
    """Whether a launcher has already made this process one rank of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def pick_device(rank: int, world: int) -> torch.device:
    """A GPU of its own for every rank, or the CPU for all."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= world:
        return torch.device("cuda", rank)
    return torch.device("cpu")


def join_group(rank: int, world: int, store: FileStore | None) -> torch.device:
    """Enter the process group (NCCL with a GPU each, else gloo), one thread per rank; give this rank's device."""
    torch.set_num_threads(1)  # ranks share the cores: more threads than cores would measure the scheduler
    device = pick_device(rank, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if store is None:
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    return device


def leave_group(device: torch.device) -> None:
    """Leave together, and leave nothing that holds the group.

    Models and hooks refer to each other, so only a collection frees them; what is left until the interpreter ends
    takes the group's threads along into its shutdown, where they abort the process.
    """
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
    gc.collect()
    dist.destroy_process_group()


def run_here(worker: Callable[..., None], *args: Any) -> None:
    """Run ``worker(rank, world, device, *args)`` as the rank that torchrun made this process."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world):
        _loopback()
    device = join_group(rank, world, None)
    try:
        worker(rank, world, device, *args)
    except BaseException:
        dist.destroy_process_group()
        raise
    leave_group(device)


def launch(worker: Callable[..., None], nproc: int, *args: Any, enter: Callable[[int], None] | None = None) -> None:
    """Spawn ``nproc`` ranks that run ``worker(rank, world, device, *args)`` and wait for them.

    ``enter(rank)`` is called first in each rank, before any socket exists (to step into a network namespace).
    Raises `WorkerFailed` with the traceback of the rank that failed first.
    """
    context = multiprocessing.get_context("spawn")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # unwind, and so end the ranks
    with tempfile.TemporaryDirectory(prefix="commhooks-") as folder:
        ranks = [
            context.Process(target=_rank, args=(worker, rank, nproc, folder, enter, args)) for rank in range(nproc)
        ]
        for process in ranks:
            process.start()
        try:
            failed = _wait(ranks)
        finally:
            _end(ranks)
        if failed:
            raise WorkerFailed(_first_error(Path(folder)) or f"a rank ended with exit codes {failed}, saying nothing")


def _rank(
    worker: Callable[..., None], rank: int, world: int, folder: str, enter: Callable[[int], None] | None, args: Any
) -> None:
    """The body of one spawned rank: run, or leave the traceback and its time where the parent finds them."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        if enter is not None:
            enter(rank)
        else:
            _loopback()
        device = join_group(rank, world, FileStore(str(Path(folder) / "store"), world))
        worker(rank, world, device, *args)
        leave_group(device)
    except BaseException:
        Path(folder, f"error-{time.monotonic_ns():020d}-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)  # not sys.exit: interpreter shutdown could wait for a collective that will never finish


def _end_with_parent() -> None:
    """A launcher that was killed cannot end its ranks: each watches it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _loopback() -> None:
    """All ranks are on this machine: let Gloo work also where the host name does not resolve."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _wait(ranks: list[SpawnProcess]) -> list[int | None]:
    """Block until all ranks are done (empty list) or one has failed (the exit codes so far)."""
    running = list(ranks)
    while running:
        wait([process.sentinel for process in running])
        running = [process for process in running if process.is_alive()]
        if any(process.exitcode for process in ranks):
            deadline = time.monotonic() + GRACE
            for process in ranks:
                process.join(max(0.0, deadline - time.monotonic()))
            return [process.exitcode for process in ranks]
    return []


def _end(ranks: list[SpawnProcess]) -> None:
    for process in ranks:
        if process.is_alive():
            process.terminate()
    for process in ranks:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


def _first_error(folder: Path) -> str:
    errors = sorted(folder.glob("error-*"))  # the names sort by time
    return errors[0].read_text() if errors else ""
