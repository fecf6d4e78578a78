"""DDP survives the backward after any error during the handover of a bucket."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_testing import spawn

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
