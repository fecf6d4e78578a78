"""Long all-gathers on gloo processes have torch's bits, and leave no copies of their output in the process."""

import os
import platform
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ch_core import HookTimeoutError, TransportError
from ch_core.sizes import SIZES
from ch_core.transport.process_group import ProcessGroupTransport
from ch_testing import spawn

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120), pytest.mark.cpu("gloo's long all-gathers are tested")]

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float64, torch.complex64)


def gathers(rank: int, world: int, where: str) -> list[tuple[str, int, bool, int, int]]:
    """Gather messages around the limits; return dtype, bytes, if the bits are torch's, broadcasts and gathers started."""
    transport = ProcessGroupTransport(where=where)
    found = []
    for dtype in DTYPES:
        begin, end = SIZES.pieces_from, SIZES.pieces_below
        sizes = [SIZES.broadcast_from - 64 * world, begin // 2, begin, 3 * begin + 160 * world]
        for nbytes in (*sizes, end) if dtype == torch.uint8 else sizes:
            count = -(-nbytes // world // dtype.itemsize)
            mine = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)
            wanted, output = (torch.zeros(world * count, dtype=dtype) for _ in range(2))
            dist.all_gather_into_tensor(wanted, mine)
            with (
                mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast,
                mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as all_gather,
            ):
                transport.all_gather(output, mine).wait(30.0)
            same = torch.equal(output.view(torch.uint8), wanted.view(torch.uint8))
            found.append((str(dtype), output.nbytes, same, broadcast.call_count, all_gather.call_count))
    return found


@pytest.mark.parametrize(
    ("world", "where"), [(2, ""), (3, ""), pytest.param(3, "inside the node", marks=pytest.mark.full)]
)
def test_a_long_gather_has_the_bits_of_torchs(world: int, where: str) -> None:
    for row in zip(*spawn(gathers, world, where), strict=True):
        dtype, nbytes, same, broadcasts, pieces = row[0]
        assert all(one == row[0] for one in row), "ranks start the same collectives"
        assert same, (dtype, nbytes)
        if where:
            assert (broadcasts, pieces) == (world * (nbytes >= SIZES.broadcast_from), 0), (dtype, nbytes)
        elif not SIZES.pieces_from <= nbytes < SIZES.pieces_below:
            assert (broadcasts, pieces) == (0, 0), (dtype, nbytes)
        else:
            assert broadcasts == 0
            assert pieces >= nbytes / SIZES.piece_bytes or nbytes / world / pieces < 2 * SIZES.part_bytes
            assert nbytes / world / pieces >= SIZES.part_bytes / 2


def resident() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) * 1024


def left(rank: int, world: int, nbytes: int) -> float:
    """Return the growth of the resident memory over eight long gathers, in parts of the output."""
    transport = ProcessGroupTransport()
    output = torch.zeros(nbytes, dtype=torch.uint8)
    mine = torch.ones(nbytes // world, dtype=torch.uint8)
    for _ in range(2):  # threads and connections
        transport.all_gather(output[: world * 1024], mine[:1024]).wait(30.0)
    dist.barrier()
    before = resident()
    for _ in range(8):
        transport.all_gather(output, mine).wait(60.0)
    return (resident() - before) / nbytes


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="reads /proc, and is about glibc's allocator")
@pytest.mark.parametrize("world", [2, 3])
def test_gloos_copies_of_a_long_output_do_not_stay(world: int) -> None:
    """With gloo's whole all-gather, glibc kept three or four times the output."""
    assert max(spawn(left, world, 24_000_000)) < 1.0


def lost(rank: int, world: int) -> tuple[str, float]:
    """Return the error of a long gather whose last rank dies before it takes part, and the seconds until then."""
    transport = ProcessGroupTransport()
    mine = torch.ones(2 * SIZES.pieces_from // world, dtype=torch.uint8)
    output = torch.empty(world * len(mine), dtype=torch.uint8)
    transport.all_gather(output, mine).wait(30.0)
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        transport.all_gather(output, mine).wait(5.0)
    except (HookTimeoutError, TransportError) as error:
        dist.destroy_process_group()
        return type(error).__name__, time.monotonic() - begun
    return "nothing", 0.0


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3])
def test_a_lost_rank_ends_a_long_gather_in_time(world: int) -> None:
    *found, _ = spawn(lost, world, expect_exit={world - 1: -signal.SIGKILL})
    for kind, seconds in found:
        assert kind in ("TransportError", "HookTimeoutError")
        assert seconds < 30.0
