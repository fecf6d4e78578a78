"""Two levels on FSDP2's shard axis, where the shards of a parameter span two nodes of two ranks."""

import pytest

import commhooks
from ch_testing import spawn
from commhooks import HookNotSupportedError

from .fsdp_kit import distance, gpt, line, one_backward, shard2

pytest.importorskip("ch_quant")
pytestmark = [pytest.mark.timeout(240), pytest.mark.gloo, pytest.mark.full]


def body(rank: int, world: int) -> None:
    mesh = line(world)
    exact = one_backward(shard2(gpt(), mesh), rank)
    between = {}
    for name, limit in (
        ("two_level(allreduce, nodes=2)", 1e-5),
        ("two_level(bf16_compress, nodes=2)", 1e-2),
        ("two_level(quant4(block=16), nodes=2)", 1.2e-1),
        ("two_level(quant4(block=16), nodes=[[0, 3], [1, 2]])", 1.2e-1),
    ):
        model = shard2(gpt(), mesh)
        handle = commhooks.attach(model, name, axis="shard")
        assert distance(one_backward(model, rank), exact) <= limit, name
        between[name] = handle.stats()["between_bytes"]
        assert 0 < between[name] < handle.stats()["wire_bytes"]
        handle.detach()
        assert distance(one_backward(model, rank), exact) == 0
    plain, _, four, _ = between.values()
    assert four < 0.3 * plain
    with pytest.raises(HookNotSupportedError, match="run_scatter"):
        commhooks.attach(shard2(gpt(), mesh), "two_level(quant4(error_feedback=True), nodes=2)", axis="shard")


def test_shards_that_span_nodes() -> None:
    spawn(body, 4, timeout=200.0, group_timeout=120.0)
