"""The engines of one handle end a step together. An error on one axis reaches every rank of the mesh."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ch_core import (
    AllReduce,
    Bucket,
    BucketLayout,
    CpuTuning,
    Engine,
    EngineGroup,
    Gathered,
    GatherEngine,
    HookState,
    HookTimeoutError,
    Link,
    Plain,
    Reduction,
    RemoteHookError,
    ShardLayout,
    SimulatedGroup,
    SimulatedRank,
    SimulatedTransport,
    Stages,
    StepContext,
    Weights,
    simulate,
)


class Fails(Reduction):
    """Raises in the second step on the chosen rank."""

    name, lossy = "fails", True
    fields = {"last": "shared"}

    def __init__(self, here: bool) -> None:
        self.here, self.steps = here, 0

    def run(self, bucket: Bucket, ctx: Any) -> Iterator[Any]:
        ctx.write("w", "last", (1,), device=bucket.device).fill_(1.0)
        yield AllReduce(bucket.buffer)
        if not bucket.buffer.is_meta:
            self.steps += 1
            if self.here and self.steps == 2:
                raise ArithmeticError("broken on one axis")


def bucket() -> Bucket:
    return Bucket.from_tensors({"w": torch.ones(8)})


def own_column() -> SimulatedTransport:
    """Return the transport of a mesh axis that has one rank."""
    return SimulatedTransport(SimulatedGroup(1), 0)


@pytest.mark.parametrize("relayed", [True, False])
def test_an_error_on_one_axis_is_raised_and_rolled_back_on_every_rank_of_the_relay(relayed: bool) -> None:
    def body(rank: SimulatedRank) -> tuple[list[BaseException | None], list[bool | None], int]:
        engine = Engine(Fails(rank.rank == 1), own_column())
        group = EngineGroup({"replicate": engine}, rank.transport if relayed else None)
        errors, kept = [], []
        for _ in range(3):
            group.run("replicate", bucket())
            assert group.in_step
            errors.append(group.finish())
            assert not group.in_step
            kept.append(engine.resolve_step())
        return errors, kept, engine.state.step

    (others, kept, steps), (own, own_kept, own_steps) = simulate(2, body)
    assert own[0] is own[2] is None
    assert isinstance(own[1], ArithmeticError)
    assert (own_kept, own_steps) == ([True, False, True], 2)
    if relayed:
        assert others[0] is others[2] is None
        assert isinstance(others[1], RemoteHookError)
        assert "ArithmeticError: broken on one axis" in str(others[1])
        assert (kept, steps) == ([True, False, True], 2)
    else:
        assert (others, kept, steps) == ([None] * 3, [True] * 3, 3), "without a relay the ranks would drift apart"


def test_a_relay_that_lost_a_message_is_given_up() -> None:
    ranks = SimulatedGroup(2)
    engine = Engine(Plain(), own_column(), timeout=0.05)
    group = EngineGroup({"replicate": engine}, SimulatedTransport(ranks, 0))
    relay = group._relay
    assert relay is not None
    scratch = relay.scratch
    group.run("replicate", bucket())
    with pytest.raises(HookTimeoutError, match=r"ranks \[1\] did not take part"):
        group.finish()
    assert ranks.aborted == "rank 0 gave up"
    assert relay.scratch is not scratch, "the next status would use memory of a message in flight"


def test_an_error_from_outside_is_made_known_along_every_axis() -> None:
    def body(rank: SimulatedRank) -> BaseException | None:
        engines = {"shard": Engine(Plain(), rank.transport), "replicate": Engine(Plain(), own_column())}
        group = EngineGroup(engines)
        group.run("shard", bucket())
        group.run("replicate", bucket())
        return group.finish(outside=KeyError("lost hook") if rank.rank == 0 else None)

    own, others = simulate(2, body)
    assert isinstance(own, KeyError)
    assert isinstance(others, RemoteHookError)
    assert "lost hook" in str(others)


def test_steps_are_common_to_the_axes_and_bytes_add_up() -> None:
    def body(rank: SimulatedRank) -> dict[str, float]:
        group = EngineGroup({"shard": Engine(Plain(), rank.transport), "replicate": Engine(Plain(), own_column())})
        for axis in ("shard", "replicate", "replicate"):
            group.run(axis, bucket())
        assert group.finish() is None
        group.run("shard", bucket())
        group.abandon()
        return group.stats()

    stats = simulate(2, body)[0]
    assert stats["steps"] == 1
    assert (stats["shard_payload_bytes"], stats["replicate_payload_bytes"]) == (64.0, 64.0)
    assert stats["payload_bytes"] == 128.0
    assert (stats["shard_rounds"], stats["replicate_rounds"], stats["rounds"]) == (2.0, 2.0, 4.0)


class FailsToDecode(Plain):
    """Raises on the chosen rank when it has gathered weights."""

    def __init__(self, here: bool) -> None:
        self.here = here

    def gather_weights(self, weights: Weights, ctx: StepContext) -> Stages:
        yield from super().gather_weights(weights, ctx)
        if self.here and not weights.storage.is_meta:
            raise ArithmeticError("broken code")


def test_an_error_in_a_gather_that_the_end_of_the_step_decodes_is_told_to_far_ranks_at_once() -> None:
    """The engines of other axes end their steps next, on all ranks or on none."""

    def body(rank: SimulatedRank) -> str:
        treatment = Gathered(FailsToDecode(rank.rank == 1))
        far = CpuTuning.over(Link.parse("far"))
        engine = GatherEngine(treatment, rank.transport, HookState(), timeout=30.0, tuning=far)
        cut = ShardLayout.of(BucketLayout.of_shapes({"w": (4, 2)}), 2)
        engine.launch(treatment.gather_bucket(cut, torch.ones(8)))
        return type(EngineGroup({"gather": engine}).finish()).__name__

    assert simulate(2, body) == [RemoteHookError.__name__, ArithmeticError.__name__]
