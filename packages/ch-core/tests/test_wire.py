"""The wire-cast transform over simulated ranks: messages, losses, refusals, and growth with the ranks."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import commhooks
from ch_core import (
    AllGather,
    AllReduce,
    AllToAll,
    Bucket,
    BucketLayout,
    HookConfigError,
    Plain,
    Reduction,
    SimulatedRank,
    StepContext,
    Wire,
    simulate,
)
from ch_core.engine.engine import Engine
from ch_core.engine.step import void_requests
from ch_testing import SimulatedRanks
from ch_wrappers import WireCast
from commhooks import CommHook


def step(engine: Engine, parts: list[Bucket]) -> BaseException | None:
    for bucket in parts:
        engine.submit(bucket)
    return engine.finish()


def test_sent_equals_the_numbers_that_peers_receive() -> None:
    class Sent(Reduction):
        name = "sent"

        def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
            sent = ctx.scratch("sent", bucket.buffer.shape, device=bucket.device)
            yield AllReduce(bucket.buffer, sent=sent)
            bucket.buffer.copy_(sent)

    for accumulate in ("wire", "fp32"):
        gradients = torch.randn(4, 1000) * 3

        def body(rank: SimulatedRank, accumulate: Any = accumulate, gradients: torch.Tensor = gradients) -> Any:
            mine, total = gradients[rank.rank].clone(), gradients[rank.rank].clone()
            engine = rank.engine(WireCast(Sent(), "bf16", accumulate=accumulate))
            bucket = Bucket.from_tensors({"w": mine})
            step(engine, [bucket])
            other = Bucket.from_tensors({"w": total})
            step(rank.engine(WireCast(Plain(), "bf16", accumulate=accumulate)), [other])
            return bucket.buffer, other.buffer

        results = simulate(4, body)
        mean_of_sent = torch.stack([sent for sent, _ in results]).mean(0)
        torch.testing.assert_close(results[0][1], mean_of_sent, rtol=2e-2, atol=2e-2)
        for r, (sent, _) in enumerate(results):
            torch.testing.assert_close(sent, (gradients[r] / 4).bfloat16().float() * 4, rtol=0, atol=0)


def test_wire_divides_before_the_cast_and_never_clamps() -> None:
    def body(rank: SimulatedRank) -> list[float]:
        bucket = Bucket.from_tensors({"w": torch.tensor([66000.0 * (rank.rank == 0), 2e6, float("nan")])})
        step(rank.engine(WireCast(Plain(), "fp16")), [bucket])
        return [float(x) for x in bucket.buffer]

    for one, everywhere, nan in simulate(2, body):
        assert one == 33000.0 - 8.0  # the next lower fp16
        assert math.isinf(everywhere)
        assert math.isnan(nan)


@pytest.mark.parametrize("world", [2, 8, 64])
def test_fp32_accumulation_does_not_degrade_with_world_size(world: int) -> None:
    gradients = torch.randn(world, 512, generator=torch.Generator().manual_seed(1)) + 4
    exact = gradients.double().mean(0)

    def error(accumulate: Any) -> float:
        def body(rank: SimulatedRank) -> torch.Tensor:
            bucket = Bucket.from_tensors({"w": gradients[rank.rank]})
            step(rank.engine(WireCast(Plain(), "bf16", accumulate=accumulate)), [bucket])
            return bucket.buffer

        return float((simulate(world, body)[0].double() - exact).norm() / exact.norm())

    assert error("fp32") < 2.6e-3
    if world == 64:
        assert error("wire") > 2 * error("fp32")


def test_wrapping_a_hook_with_nothing_to_cast_is_refused() -> None:
    class Opaque(Plain):
        collectives = frozenset({"all_gather"})

    with pytest.raises(HookConfigError, match="would change nothing"):
        WireCast(Opaque(), "bf16")
    with pytest.raises(HookConfigError, match="expected 'wire' or 'fp32'"):
        WireCast(Plain(), "bf16", accumulate="fp64")  # type: ignore[arg-type]


# -- gathered numbers


class Gathered(Reduction):
    """Gathers everything as fp32 and returns the mean. It also exchanges an index that no wrapper may touch."""

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


VALUE = 1.0 + 2.0**-12  # exact in neither bf16 nor fp16


def average(reduction: Reduction, value: float = VALUE) -> list[float]:
    def body(rank: SimulatedRank) -> float:
        bucket = Bucket.from_tensors({"w": torch.full((5,), value)})
        engine = rank.engine(reduction)
        engine.submit(bucket)
        assert engine.finish() is None
        return float(bucket.buffer[3])

    return simulate(3, body)


@pytest.mark.parametrize("accumulate", ["wire", "fp32"])
def test_a_wrapper_rounds_castable_requests(accumulate: Any) -> None:
    assert average(Gathered()) == [pytest.approx(VALUE, abs=1e-7)] * 3
    assert average(WireCast(Gathered(), "bf16", accumulate=accumulate)) == [1.0] * 3
    assert average(WireCast(Gathered(castable=False), "bf16")) == [pytest.approx(VALUE, abs=1e-7)] * 3


def test_the_author_may_say_how_numbers_travel() -> None:
    half = Wire(torch.float16)
    assert average(Gathered(half)) == [1.0] * 3
    assert (
        average(WireCast(Gathered(half), "bf16"), 1.0 + 2.0**-10) == [1.0 + 2.0**-10] * 3
    )  # exact in fp16, not in bf16
    (stage,) = Gathered(half).plan(BucketLayout.of_shapes({"w": (5,)}), StepContext(world_size=3))
    assert [request.payload_bytes for request in stage] == [2 * 15, 4 * 12, 2 * 15]
    for planned, zero in zip(stage, void_requests(stage, 3, torch.device("cpu")), strict=True):
        assert zero.plan() == planned  # a rank whose hook raised sends as many bytes


@pytest.mark.parametrize("request_of", [AllGather, AllToAll])
def test_bytes_cannot_be_rounded(request_of: type[AllGather] | type[AllToAll]) -> None:
    packed = torch.zeros(4, dtype=torch.uint8)
    for options in ({"castable": True}, {"wire": Wire(torch.bfloat16)}):
        with pytest.raises(TypeError, match="cannot be rounded"):
            request_of(packed, packed, **options).plan()  # type: ignore[arg-type]


def test_a_hook_without_castable_requests_is_refused() -> None:
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


def test_a_growing_volume_causes_a_caution_once_it_exceeds_bf16() -> None:
    few, many = ranks(4, Bytes()).handles[0], ranks(6, Bytes()).handles[0]
    assert few.cautions() == []
    assert "over 6 it is 1.5 times" in many.cautions()[0]
    assert many.cautions()[0] in many.report().warnings
    assert "from 5 ranks on" in few.cautions(64)[0]


def test_a_constant_volume_causes_no_caution() -> None:
    for expr in ("bf16_compress", "allreduce", "powersgd", 'bf16_compress(accumulate="fp32")'):
        pytest.importorskip("ch_powersgd", reason="one of the hooks is ch-powersgd's")
        reduction = commhooks.create(expr).reduction
        assert reduction is not None
        assert reduction.cautions(BucketLayout.of_shapes({"w": (500, 300)}), 512) == []
