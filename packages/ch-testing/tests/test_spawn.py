"""The process launcher: results and errors by rank, time limits, killed ranks."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ch_testing import Ranks, WorkerError, spawn

pytestmark = pytest.mark.timeout(120)


def summed(rank: int, world: int, offset: int = 0) -> float:
    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    return float(value)


def raising(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 fails first")
    dist.barrier()


def sleeping(rank: int, world: int) -> None:
    time.sleep(600.0)


def surroundings(rank: int, world: int, *names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def dying(rank: int, world: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def marked(rank: int, world: int, folder: str) -> str:
    """Sleep in the first start. Return in the second."""
    mark = Path(folder, f"lived{rank}")
    if mark.exists():
        return "again"
    mark.touch()
    time.sleep(600.0)
    return "never"


def entered(rank: int) -> None:
    os.environ["ENTERED"] = str(rank)


def test_ranks_meet_and_return() -> None:
    assert spawn(summed, 3, 1) == [6.0] * 3


def test_the_rank_that_raised_first_is_named() -> None:
    with pytest.raises(WorkerError, match="rank 1 fails first") as caught:
        spawn(raising, 3)
    assert caught.value.rank == 1


def test_the_time_limit_kills_every_rank() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] did not return within 2 s"):
        spawn(sleeping, 2, timeout=2.0)


def test_a_rank_that_is_meant_to_die() -> None:
    assert spawn(dying, 2, group=False, expect_exit={1: -signal.SIGKILL}) == [0, None]
    with pytest.raises(WorkerError, match="exit code -9"):
        spawn(dying, 2, group=False)


def test_a_rank_knows_its_place_and_enters_first() -> None:
    found = spawn(surroundings, 2, "RANK", "WORLD_SIZE", "ENTERED", group=False, enter=entered)
    assert found == [["0", "2", "0"], ["1", "2", "1"]]


def test_kill_and_restart_one_rank(tmp_path: Path) -> None:
    with Ranks(marked, 2, str(tmp_path), group=False) as ranks:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        ranks.kill(1)
        assert ranks.wait(20.0, until=lambda result: True)[1].exit_code == -signal.SIGKILL
        assert ranks.alive() == [0]
        ranks.start(1)
        results = ranks.wait(20.0, until=lambda result: result.ok)
        assert [result.value for result in results] == [None, "again"]
        assert (results[0].exit_code, results[1].ok) == (None, True)
        left = ranks.pid(0)
    with pytest.raises(ProcessLookupError):
        os.kill(left, 0)


def test_threads_that_start_ranks_read_the_right_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    read = forkserver.read_signed

    def slow(fd: int) -> Any:
        time.sleep(0.05)  # for another thread to begin to read the same end
        return read(fd)

    monkeypatch.setattr(forkserver, "read_signed", slow)

    def codes(_: int) -> list[int | None]:
        with Ranks(surroundings, 2, group=False) as ranks:
            return [result.exit_code for result in ranks.wait(60.0)]

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(codes, range(12))) == [[0, 0]] * 12
