"""The group of one that DDP talks to: one per process."""

import os
import threading

import pytest
import torch
import torch.distributed as dist

from ch_ft.single_rank_group import alone


def test_no_model_owns_the_group_that_reaches_nobody() -> None:
    """A model collected while gloo's thread waits for the interpreter lock would wait for that thread for ever."""
    made: list[object] = []
    barrier = threading.Barrier(8)

    def body() -> None:
        barrier.wait()
        made.append(alone())

    threads = [threading.Thread(target=body) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert all(group is alone() for group in made)


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_gets_one_of_its_own() -> None:
    dist.all_reduce(torch.ones(2), group=alone())  # the parent's threads run, and do not follow
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(2), group=alone())
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
