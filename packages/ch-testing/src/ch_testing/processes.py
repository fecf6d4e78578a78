"""Start N ranks as processes on this machine, and end them together.

:func:`spawn` runs a function on N ranks and returns their results. :class:`Ranks` can kill each
rank, start it again, and read its result or error. No rank outlives the time limit, or the process that started it.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ch_testing import rank_device

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",  # DDP imports it in its constructor, which costs every rank seconds
    "torch.distributed.fsdp",
    "commhooks.api.attach",
    "ch_ddp.adapter.binding",  # skipped if ch-ddp is not installed
)
"""Modules that the server imports once, before it forks ranks."""


_ends = threading.Lock()
"""Held while the end of a process is read. Each start of a process reads the ends of all others, and of two threads that
read one end, the second one is told that the process has failed (255)."""


class WorkerError(AssertionError):
    """A rank of :func:`spawn` failed. The message is its traceback, and ``rank`` its number."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} failed:\n{text}")
        self.rank = rank


@dataclass(frozen=True)
class RankResult:
    """State of one rank.

    Attributes:
        rank: its number.
        exit_code: of its process; negative after a signal, ``None`` while it runs.
        value: return value of the function, if it has returned.
        error: traceback, if the function has raised.
    """

    rank: int
    exit_code: int | None
    value: Any = None
    error: str = ""

    @property
    def ok(self) -> bool:
        """True if the function has returned and the process has ended."""
        return self.exit_code == 0


@dataclass(frozen=True)
class _Order:
    """Everything that a rank must know, picklable."""

    target: Callable[..., Any]
    rank: int
    world_size: int
    args: tuple[Any, ...]
    folder: str
    group: bool
    device: str
    group_timeout: float
    enter: Callable[[int], object] | None


class Ranks:
    """Ranks that run one function, each in a process; a context manager that kills the remaining ranks.

    Args:
        target: module-level function, called as ``target(rank, world_size, *args)``.
        world_size: number of ranks.
        *args: passed to ``target``. They must be picklable.
        group: True if the default process group exists when ``target`` is called. Its back end is that of the device.
            With False, ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` are set instead.
        device: of the ranks, one of :data:`ch_testing.rank_device.CHOICES`; by default that of ``pytest --device``.
        group_timeout: of the process group, in seconds.
        enter: called as ``enter(rank)`` in the rank before anything else.
        preload: more modules for the server to import. Only the first call in a process can choose them.

    Example::

        with Ranks(train, 4, config) as ranks:
            ranks.kill(2)
            for result in ranks.wait(timeout=60.0):
                print(result.rank, result.exit_code, result.value, result.error)
    """

    def __init__(
        self,
        target: Callable[..., Any],
        world_size: int,
        *args: Any,
        group: bool = True,
        device: str | None = None,
        group_timeout: float = 30.0,
        enter: Callable[[int], object] | None = None,
        preload: Iterable[str] = (),
    ) -> None:
        self.target, self.world_size, self.args = target, world_size, args
        self.group, self.device = group, rank_device.chosen() if device is None else device
        self.group_timeout, self.enter = group_timeout, enter
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOAD, *preload])
        self._processes: dict[int, BaseProcess] = {}

    def __enter__(self) -> "Ranks":
        self._folder = tempfile.TemporaryDirectory(prefix="commhooks-")
        try:
            for rank in range(self.world_size):
                self.start(rank)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for rank in list(self._processes):
            self.kill(rank)
            wait([self._processes[rank].sentinel])
        self._folder.cleanup()

    def start(self, rank: int) -> None:
        """Start a rank, or start it again after its end."""
        for old in (self._path("result", rank), self._path("error", rank)):
            old.unlink(missing_ok=True)
        order = _Order(
            self.target,
            rank,
            self.world_size,
            self.args,
            self._folder.name,
            self.group,
            self.device,
            self.group_timeout,
            self.enter,
        )
        process = self._context.Process(target=_run, args=(order,), name=f"rank {rank}")
        with _ends:
            process.start()
        self._processes[rank] = process

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank that is still alive; ``SIGSTOP`` freezes it."""
        pid = self._processes[rank].pid
        if self._exit_code(rank) is None and pid is not None:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, number)

    def pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        found = self._processes[rank].pid
        if found is None:
            raise RuntimeError(f"rank {rank} has no process: start it first")
        return found

    def alive(self) -> list[int]:
        """Return the ranks whose processes have not ended."""
        return [rank for rank in self._processes if self._exit_code(rank) is None]

    def wait(self, timeout: float, until: Callable[[RankResult], bool] | None = None) -> list[RankResult]:
        """Wait until all ranks have ended, and return :meth:`results`.

        Args:
            timeout: seconds. Ranks that still run afterwards have no exit code.
            until: called with each rank that ends; True stops waiting.
        """
        deadline = time.monotonic() + timeout
        pending = set(self._processes)
        while pending:
            ended = [rank for rank in sorted(pending) if self._exit_code(rank) is not None]
            pending.difference_update(ended)
            if until is not None and any(until(self.result(rank)) for rank in ended):
                break
            left = deadline - time.monotonic()
            if not pending or left <= 0:
                break
            wait([self._processes[rank].sentinel for rank in pending], timeout=left)
        return self.results()

    def results(self) -> list[RankResult]:
        """Return the state of every rank, in the order of ranks."""
        return [self.result(rank) for rank in range(self.world_size)]

    def result(self, rank: int) -> RankResult:
        """Return the state of one rank."""
        code = self._exit_code(rank)
        value, error = self._path("result", rank), self._path("error", rank)
        return RankResult(
            rank,
            code,
            pickle.loads(value.read_bytes()) if code is not None and value.exists() else None,
            error.read_text() if error.exists() else "",
        )

    def first_error(self) -> int | None:
        """Return the rank that raised first. The others often only report a closed connection."""
        found = [
            (path.stat().st_mtime_ns, rank) for rank in self._processes if (path := self._path("error", rank)).exists()
        ]
        return min(found)[1] if found else None

    def _exit_code(self, rank: int) -> int | None:
        with _ends:
            return self._processes[rank].exitcode

    def _path(self, kind: str, rank: int) -> Path:
        return Path(self._folder.name, f"{kind}{rank}")


def spawn(
    target: Callable[..., Any],
    world_size: int = 2,
    *args: Any,
    timeout: float = 60.0,
    group_timeout: float = 30.0,
    expect_exit: Mapping[int, int] | None = None,
    **options: Any,
) -> list[Any]:
    """Run ``target(rank, world_size, *args)`` on N ranks and return the result of each rank.

    When one rank fails, or the time is up, all ranks are killed.

    Args:
        target: module-level function; the default process group exists when it is called.
        world_size: number of ranks.
        *args: passed to ``target`` after rank and world size.
        timeout: seconds after which every rank is killed and ``TimeoutError`` is raised.
        group_timeout: of the process group, in seconds.
        expect_exit: rank -> exit code (negative for a signal) of ranks that are meant to die. Their result is ``None``.
        **options: further options of :class:`Ranks`.

    Raises:
        WorkerError: a rank raised or died. It names the rank that raised first.
        TimeoutError: a rank has not returned in time.
    """
    expected = expect_exit or {}
    failed: list[RankResult] = []

    def fails(result: RankResult) -> bool:
        if result.exit_code != expected.get(result.rank, 0):
            failed.append(result)
        return bool(failed)

    with Ranks(target, world_size, *args, group_timeout=group_timeout, **options) as ranks:
        results = ranks.wait(timeout, fails)
        if failed:
            first = ranks.first_error()
            one = failed[0] if first is None else ranks.result(first)
            raise WorkerError(one.rank, one.error or f"exit code {one.exit_code}")
        if late := ranks.alive():
            raise TimeoutError(f"ranks {late} did not return within {timeout:g} s and have been killed")
    return [None if result.rank in expected else result.value for result in results]


def _run(order: _Order) -> None:
    """Run one rank in its process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    code = 1
    folder = Path(order.folder)
    try:
        if order.enter is not None:
            order.enter(order.rank)
        rank_device.enter(order.device, order.rank, order.world_size)
        leave = _join_group(order)
        value = order.target(order.rank, order.world_size, *order.args)
        (folder / f"result{order.rank}").write_bytes(pickle.dumps(value))
        leave()
        code = 0
    except BaseException:
        (folder / f"error{order.rank}").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # torch 2.13's gloo sometimes aborts in static destructors at interpreter exit; there is nothing to tidy.
        os._exit(code)


def _end_with_parent() -> None:
    """End this rank with the process that started it; otherwise it would train on and occupy cores."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _join_group(order: _Order) -> Callable[[], None]:
    """Make the default process group, and return the function that leaves it."""
    names = {"RANK": order.rank, "LOCAL_RANK": order.rank, "WORLD_SIZE": order.world_size}
    if not order.group:
        os.environ.update({name: str(value) for name, value in names.items()})
        return lambda: None
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group(
        rank_device.backend(),
        store=FileStore(str(Path(order.folder, "store")), order.world_size),
        rank=order.rank,
        world_size=order.world_size,
        timeout=timedelta(seconds=order.group_timeout),
    )

    def leave() -> None:
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    return leave
