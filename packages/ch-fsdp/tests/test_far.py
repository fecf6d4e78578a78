"""FSDP2 over links with a long round trip: messages go directly, and their numbers are those of near ranks."""

import pytest
import torch
from torch import nn

import commhooks
from ch_testing import spawn

from .fsdp_kit import flat_params, gpt, line, shard2, square, train

pytestmark = [pytest.mark.timeout(120), pytest.mark.gloo]

REPLICATE = ("powersgd(rank=2, min_compression_rate=1)", "quant4(error_feedback=True)", "bf16_compress")
SHARD = ("bf16_compress(accumulate='fp32')", "quant8")


def replicas() -> nn.Module:
    return shard2(gpt(), square()["shard"])


def shards() -> nn.Module:
    return shard2(gpt(), line(2))


def far_and_near(rank: int, world: int) -> dict[str, list[torch.Tensor]]:
    """Return the parameters after three steps, over a far link and without one."""
    cases = {hook: (replicas, {}) for hook in REPLICATE} if world == 4 else {}
    if world == 2:
        cases |= {hook: (shards, {"axis": "shard"}) for hook in SHARD} | {"quant4": (shards, {"axis": "gather"})}
    found: dict[str, list[torch.Tensor]] = {}
    for hook, (make, options) in cases.items():
        for link in ("50mbit,80ms", None):
            model = make()
            handle = commhooks.attach(model, hook, link=link, **options)
            assert all((engine.transport.link is None) == (link is None) for engine in handle.binding.engines.values())
            train(model, 3, rank)
            found.setdefault(hook, []).append(flat_params(model))
            handle.detach()
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_two_ranks_of_an_axis_have_the_bits_of_near_ones(world: int) -> None:
    """On four ranks between two replicas of two shards, and on two ranks inside one shard mesh."""
    ranks = spawn(far_and_near, world, timeout=100)
    assert ranks[0]
    for hook, (far, near) in ranks[0].items():
        assert torch.equal(far, near), hook
        assert all(torch.equal(far, other[hook][0]) for other in ranks), hook
