"""Gathered and exchanged numbers that travel in fewer bits, and the cautions about volume that grows."""

from typing import Any

import pytest
import torch

import commhooks
from commhooks import AllGather, AllToAll, Bucket, BucketLayout, HookConfigError, Reduction, StepContext, Wire
from commhooks.compositions.wire_cast import WireCast
from commhooks.engine.zero_requests import zero_requests
from commhooks.handle import CommHook
from commhooks.simulate import SimulatedRank, simulate
from commhooks.testing import SimulatedRanks


class Gathered(Reduction):
    """Gathers everything, as fp32, and leaves the mean; beside it an index that no wrapper may touch."""

    name, lossy = "gathered", True
    collectives = frozenset({"all_gather", "all_to_all"})
    castable = frozenset({"all_gather", "all_to_all"})

    def __init__(self, wire: Wire | None = None, castable: bool = True) -> None:
        self.wire, self.may = wire, castable

    def run(self, bucket: Bucket, ctx: StepContext) -> Any:
        x, world, device = bucket.buffer, ctx.world_size, bucket.device
        everyone, told = (ctx.scratch(name, (world, x.numel()), device=device) for name in ("everyone", "told"))
        numbers = torch.arange(1000, 1000 + 4 * world, device=device, dtype=torch.int32)
        others, rounded, swapped = torch.empty_like(numbers), torch.empty_like(x), torch.empty_like(told)
        told.copy_(x)
        yield (
            AllGather(x, everyone.view(-1), self.may, self.wire, rounded),
            AllToAll(numbers, others),
            AllToAll(told.view(-1), swapped.view(-1), self.may, self.wire),
        )
        if device.type != "meta":
            assert others.tolist() == [1000 + 4 * ctx.rank + i for i in range(4)] * world  # to the bit
            assert torch.equal(everyone[ctx.rank], rounded)
            assert torch.equal(everyone, swapped)
        bucket.buffer = everyone.mean(0)


VALUE = 1.0 + 2.0**-12  # not in bf16 nor fp16


def average(reduction: Reduction, value: float = VALUE) -> list[float]:
    def body(rank: SimulatedRank) -> float:
        bucket = Bucket.from_tensors({"w": torch.full((5,), value)})
        engine = rank.engine(reduction)
        engine.submit(bucket)
        assert engine.finish() is None
        return float(bucket.buffer[3])

    return simulate(3, body)


@pytest.mark.parametrize("accumulate", ["wire", "fp32"])
def test_a_wrapper_rounds_what_is_castable(accumulate: Any) -> None:
    assert average(Gathered()) == [pytest.approx(VALUE, abs=1e-7)] * 3
    assert average(WireCast(Gathered(), "bf16", accumulate=accumulate)) == [1.0] * 3
    assert average(WireCast(Gathered(castable=False), "bf16")) == [pytest.approx(VALUE, abs=1e-7)] * 3


def test_the_author_may_say_how_numbers_travel() -> None:
    half = Wire(torch.float16)
    assert average(Gathered(half)) == [1.0] * 3
    assert (
        average(WireCast(Gathered(half), "bf16"), 1.0 + 2.0**-10) == [1.0 + 2.0**-10] * 3
    )  # fp16 holds it, bf16 does not
    (stage,) = Gathered(half).plan(BucketLayout.of_shapes({"w": (5,)}), StepContext(world_size=3))
    assert [request.payload_bytes for request in stage] == [2 * 15, 4 * 12, 2 * 15]
    for planned, zero in zip(stage, zero_requests(stage, 3, torch.device("cpu")), strict=True):
        assert zero.plan() == planned  # a rank whose hook raised sends as many bytes


@pytest.mark.parametrize("request_of", [AllGather, AllToAll])
def test_bytes_cannot_be_rounded(request_of: type[AllGather] | type[AllToAll]) -> None:
    packed = torch.zeros(4, dtype=torch.uint8)
    for options in ({"castable": True}, {"wire": Wire(torch.bfloat16)}):
        with pytest.raises(TypeError, match="cannot be rounded"):
            request_of(packed, packed, **options).plan()  # type: ignore[arg-type]


def test_what_has_nothing_castable_is_refused() -> None:
    class Opaque(Gathered):
        castable = frozenset()

    with pytest.raises(HookConfigError, match="would change nothing"):
        WireCast(Opaque(), "bf16")


# -- cautions


class Bytes(Reduction):
    """Gathers everything in eight bits."""

    name, lossy, collectives = "bytes", True, frozenset({"all_gather"})

    def run(self, bucket: Bucket, ctx: StepContext) -> Any:
        small = bucket.buffer.to(torch.int8)
        everyone = ctx.scratch("all", (ctx.world_size * small.numel(),), torch.int8, bucket.device)
        yield AllGather(small, everyone)
        bucket.buffer = everyone.view(ctx.world_size, -1).float().mean(0)


def ranks(world: int, reduction: Reduction) -> SimulatedRanks:
    like = {"w": torch.zeros(40, 30)}
    return SimulatedRanks(lambda: CommHook(node={"hook": reduction.name, "config": {}}, built=reduction), world, like)


def test_a_growing_volume_is_told_from_where_it_passes_bf16() -> None:
    few, many = ranks(4, Bytes()).handles[0], ranks(6, Bytes()).handles[0]
    assert few.cautions() == []
    assert "over 6 it is 1.5 times" in many.cautions()[0]
    assert many.cautions()[0] in many.report().warnings
    assert "from 5 ranks on" in few.cautions(64)[0]


def test_what_does_not_grow_causes_no_caution() -> None:
    for expr in ("bf16_compress", "allreduce", "powersgd", 'bf16_compress(accumulate="fp32")'):
        pytest.importorskip("ch_powersgd", reason="one of the hooks is ch-powersgd's")
        reduction = commhooks.create(expr).reduction
        assert reduction is not None
        assert reduction.cautions(BucketLayout.of_shapes({"w": (500, 300)}), 512) == []
