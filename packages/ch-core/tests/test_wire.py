"""The wire-cast transform over simulated ranks: what travels, what is lost, what is refused."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from commhooks.bucket import Bucket
from commhooks.compositions.wire_cast import WireCast
from commhooks.engine.engine import Engine
from commhooks.errors import HookConfigError
from commhooks.reduction import Plain, Reduction, StepContext
from commhooks.requests import AllReduce
from commhooks.simulate import SimulatedGroup, SimulatedRank, SimulatedTransport, simulate


def step(engine: Engine, parts: list[Bucket]) -> BaseException | None:
    for bucket in parts:
        engine.submit(bucket)
    return engine.finish()


def test_sent_is_what_the_others_receive() -> None:
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
        assert one == 33000.0 - 8.0  # the nearest fp16 below
        assert math.isinf(everywhere)
        assert math.isnan(nan)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_stochastic_rounding_is_unbiased(dtype: Any) -> None:
    torch.manual_seed(0)
    value = 1.0 + 1 / 3000  # between two neighbours of either type
    bucket = Bucket.from_tensors({"w": torch.full((200_000,), value)})
    engine = Engine(WireCast(Plain(), dtype, rounding="stochastic"), SimulatedTransport(SimulatedGroup(1), 0))
    step(engine, [bucket])
    assert len(bucket.buffer.unique()) == 2
    assert abs(bucket.buffer.double().mean().item() - value) < 6e-5


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


def test_wrapping_what_has_nothing_to_cast_is_refused() -> None:
    class Opaque(Plain):
        collectives = frozenset({"all_gather"})

    with pytest.raises(HookConfigError, match="would change nothing"):
        WireCast(Opaque(), "bf16")
    with pytest.raises(HookConfigError, match="expected 'wire' or 'fp32'"):
        WireCast(Plain(), "bf16", accumulate="fp64")  # type: ignore[arg-type]
