"""Weight gathers in two levels, where the shards of a parameter span two nodes of two ranks."""

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy

import commhooks
from ch_testing import spawn

from .fsdp_kit import gpt, line, shard2, square, train
from .test_gather_axis import run_case

pytest.importorskip("ch_quant")
pytestmark = [pytest.mark.timeout(240), pytest.mark.gloo, pytest.mark.full]

HOOK = "two_level(quant8(block=16), nodes=2)"


def body(rank: int, world: int) -> None:
    mesh = line(world)
    for hook, options in (
        (HOOK, {}),
        ("two_level(quant8(block=16), inside=quant8(block=16), nodes=[[0, 3], [1, 2]])", {}),
        (HOOK, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    ):
        handle = run_case(rank, world, shard2(gpt(), mesh, **options), gpt(), hook=hook)
        stats = handle.stats()
        assert 0 < stats["between_bytes"] < stats["wire_bytes"], hook
        handle.detach()


def body_backward_inside_a_node(rank: int, world: int) -> None:
    """With ``reshard_after_forward`` equal to the ranks of a node, no backward gather leaves it (hpZ)."""
    counted = []
    for after in (True, 2):
        model = shard2(gpt(), line(world), reshard_after_forward=after)
        handle = run_case(rank, world, model, gpt(), hook=HOOK)
        counted.append(handle.stats())
        handle.detach()
    both, forward = counted
    assert 0 < forward["between_bytes"] < 0.8 * both["between_bytes"]
    assert forward["regather_payload_bytes"] > 0


def body_all_axes(rank: int, world: int) -> None:
    """On a 2-D mesh each replica is a node here, and weights cross no node."""
    model = shard2(gpt(), line(world))
    handle = commhooks.attach(model, HOOK, axis="gather")
    gradients = commhooks.attach(model, "two_level(quant4(block=16), nodes=2)", axis="shard")
    losses = train(model, 4, rank)
    assert losses[-1] < losses[0]
    assert "to other nodes" in str(handle.report())
    gradients.detach()
    handle.detach()
    inside = commhooks.attach(shard2(gpt(), square()), HOOK, axis="gather")
    assert inside.stats()["between_bytes"] == 0


def test_weights_that_cross_nodes() -> None:
    spawn(body, 4, timeout=200.0, group_timeout=120.0)


def test_backward_gathers_stay_inside_a_node() -> None:
    spawn(body_backward_inside_a_node, 4, timeout=200.0, group_timeout=120.0)


def test_all_axes_in_two_levels() -> None:
    spawn(body_all_axes, 4, timeout=200.0, group_timeout=120.0)
