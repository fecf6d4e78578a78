"""FSDP2 with ``link=``: ranks that are far apart train to the same parameters as near ones."""

import pytest
import torch
from torch import nn

import commhooks
from ch_testing import spawn

from .fsdp_kit import flat_params, gpt, line, shard2, square, train

pytestmark = [pytest.mark.timeout(120), pytest.mark.gloo]


def replicas() -> nn.Module:
    return shard2(gpt(), square()["shard"])


def shards() -> nn.Module:
    return shard2(gpt(), line(2))


CASES = {
    2: {
        "bf16_compress(accumulate='fp32')": (shards, "shard"),
        "quant8": (shards, "shard"),
        "quant4": (shards, "gather"),
    },
    4: {
        "powersgd(rank=2, min_compression_rate=1)": (replicas, "replicate"),
        "quant4(error_feedback=True)": (replicas, "replicate"),
        "bf16_compress": (replicas, "replicate"),
    },
}
"""Hook -> model and axis, by number of ranks."""


def far_and_near(rank: int, world: int) -> dict[str, list[torch.Tensor]]:
    """Return the parameters after three steps, over a far link and without one."""
    found: dict[str, list[torch.Tensor]] = {}
    for hook, (make, axis) in CASES[world].items():
        for link in ("50mbit,80ms", None):
            model = make()
            handle = commhooks.attach(model, hook, link=link, axis=axis)
            assert all((engine.transport.link is None) == (link is None) for engine in handle.binding.engines.values())
            train(model, 3, rank)
            found.setdefault(hook, []).append(flat_params(model))
            handle.detach()
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_two_ranks_of_an_axis_have_the_bits_of_near_ones(world: int) -> None:
    """On four ranks between two replicas of two shards, and on two ranks inside one shard mesh."""
    ranks = spawn(far_and_near, world, timeout=100)
    for hook, (far, near) in ranks[0].items():
        assert torch.equal(far, near), hook
        assert all(torch.equal(far, other[hook][0]) for other in ranks), hook
