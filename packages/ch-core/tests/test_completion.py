"""A call on a thread of gloo ends before the interpreter does."""

import subprocess
import sys
from pathlib import Path

import pytest

# The call of `arrived` ends while `late` keeps the interpreter from ending. With add_done_callback the process aborts:
# "terminate called without an active exception".
SCRIPT = """
import sys, threading, time
import torch, torch.distributed as dist
from ch_core import call_on_arrival

class Late:
    def __del__(self):
        time.sleep(1.5)

def arrived(future):
    called.set()
    time.sleep(0.8)

rank, called, late = int(sys.argv[2]), threading.Event(), Late()
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
if rank:
    time.sleep(0.5)  # so that rank 0 waits for the message, and a thread receives it
future = dist.all_reduce(torch.ones(4), async_op=True).get_future()
call_on_arrival(future, arrived)
del future
assert called.wait(60)
"""


@pytest.mark.full
@pytest.mark.timeout(120)
def test_a_process_that_ends_waits_for_the_calls_of_its_messages(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    ends = [(rank.communicate(timeout=100)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in ends] == [0, 0], ends
