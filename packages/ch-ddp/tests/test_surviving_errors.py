"""DDP survives the backward after any error during the handover of a bucket."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_testing import Ranks, spawn

pytestmark = [pytest.mark.timeout(120), pytest.mark.gloo]


def errors(rank: int, world: int) -> list[str]:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)), bucket_cap_mb=0.001)
    handle = commhooks.attach(model, "bf16_compress")
    engine, seen = handle.binding.engine, []  # type: ignore[union-attr]
    submit = engine.submit  # type: ignore[union-attr]

    def lost(bucket: commhooks.Bucket) -> None:
        raise NotImplementedError("this work has no future")

    for broken in (False, True, False):
        engine.submit = lost if broken else submit  # type: ignore[union-attr, method-assign]
        try:
            model(torch.ones(2, 40)).sum().backward()
            seen.append("averaged")
        except commhooks.TransportError as error:
            seen.append(str(error))
    assert dist.get_world_size() == world
    return seen


def test_an_error_that_is_not_ours_is_raised_after_the_backward() -> None:
    expected = ["averaged", "NotImplementedError: this work has no future", "averaged"]
    assert spawn(errors, 2) == [expected, expected]


def dies(rank: int, world: int) -> None:
    model = DistributedDataParallel(nn.Linear(40, 40))
    commhooks.attach(model, "bf16_compress")
    for step in range(3):
        if (rank, step) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(2, 40)).sum().backward()
    torch.cuda.synchronize()


@pytest.mark.nccl
def test_over_nccl_a_lost_rank_ends_the_others_after_the_time_out_of_the_group() -> None:
    with Ranks(dies, 2, group_timeout=5.0) as ranks:
        survivor, victim = ranks.wait(60.0)
    assert victim.exit_code == -signal.SIGKILL
    assert survivor.exit_code not in (None, 0)
