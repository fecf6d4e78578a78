"""Real gloo processes for tests: started in milliseconds, ended together, never left hanging.

Processes are forked from a server that has imported torch once. When one rank fails, or the time is up, all are
killed and the failing rank's traceback is raised. They also end with the process that started them, however it ends.
"""

import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",  # DDP imports it when it is made: seconds, in every rank
    "torch.distributed.fsdp",
    "commhooks.api.attaching",
    "ch_ddp.adapter.binding",  # where it is installed
]


class WorkerError(AssertionError):
    """A rank of :func:`spawn` failed; the message is its traceback. ``rank`` says which."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} failed:\n{text}")
        self.rank = rank


def spawn(
    target: Callable[..., Any],
    world_size: int = 2,
    *args: Any,
    timeout: float = 60.0,
    group_timeout: float = 30.0,
    expect_exit: dict[int, int] | None = None,
    backend: str = "gloo",
) -> list[Any]:
    """Run ``target(rank, world_size, *args)`` on gloo processes, and return what each rank returned.

    Args:
        *args: given to ``target`` after rank and world size.
        target: a module-level function; the default process group is ready when it is called.
        world_size: number of processes.
        timeout: seconds after which every process is killed and ``TimeoutError`` is raised.
        group_timeout: the process group's own timeout, in seconds.
        backend: ``"nccl"`` gives rank r the GPU r.
        expect_exit: rank -> exit code (negative: signal) of ranks that are meant to die; their result is ``None``.

    Raises:
        WorkerError: a rank raised or died.
        TimeoutError: some rank was not done in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    expected = expect_exit or {}
    with tempfile.TemporaryDirectory(prefix="commhooks-") as folder:
        processes = _start(context, target, world_size, args, folder, group_timeout, backend)
        try:
            _watch(processes, time.monotonic() + timeout, folder, expected)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [None if rank in expected else _result(folder, rank) for rank in range(world_size)]


def _start(
    context: ForkServerContext,
    target: Callable[..., Any],
    world: int,
    args: Any,
    folder: str,
    group_timeout: float,
    backend: str,
) -> list[Any]:
    processes = []
    for rank in range(world):
        process = context.Process(
            target=_main, args=(target, rank, world, args, folder, group_timeout, backend), name=f"rank {rank}"
        )
        process.start()
        processes.append(process)
    return processes


def _watch(processes: list[Any], deadline: float, folder: str, expected: dict[int, int]) -> None:
    alive = {process.sentinel: rank for rank, process in enumerate(processes)}
    while alive:
        ready = wait(list(alive), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(alive.values())} were not done in time and have been killed")
        for sentinel in ready:
            rank = alive.pop(sentinel)
            code = processes[rank].exitcode
            if code != expected.get(rank, 0):
                raise WorkerError(rank, _report(folder, rank, code))


def _report(folder: str, rank: int, code: int | None) -> str:
    error = Path(folder, f"error{rank}")
    return error.read_text() if error.exists() else f"exit code {code}"


def _result(folder: str, rank: int) -> Any:
    return pickle.loads(Path(folder, f"result{rank}").read_bytes())


def _main(
    target: Callable[..., Any], rank: int, world: int, args: Any, folder: str, group_timeout: float, backend: str
) -> None:
    import torch
    import torch._C._distributed_c10d as c10d
    import torch.distributed as dist

    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    code = 1
    try:
        store = c10d.FileStore(os.path.join(folder, "store"), world)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=group_timeout)
        )
        result = target(rank, world, *args)
        Path(folder, f"result{rank}").write_bytes(pickle.dumps(result))
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        code = 0
    except BaseException:
        Path(folder, f"error{rank}").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # torch 2.13's gloo now and then aborts in static destructors at interpreter exit; there is nothing to tidy.
        os._exit(code)


def _end_with_parent() -> None:
    """Ranks whose parent was killed would go on training, and take the cores from whatever comes next."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
