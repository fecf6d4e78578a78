"""The largest entries of every chunk, over simulated ranks and on gloo processes."""

import logging
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_core import SimulatedRank, simulate
from ch_sparse import TopK
from ch_sparse.chunks import Chunks, largest
from ch_sparse.message import TwoLevels
from ch_testing import LogLines, spawn

pytestmark = pytest.mark.timeout(120)

SIZES = (1, 127, 129, 1009)
WORLDS = (1, 2, 3, 4, 5)


def gradient(numel: int, rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + numel))


def one_step(engine: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    bucket = commhooks.Bucket.from_tensors(tensors)
    engine.submit(bucket)
    assert engine.finish() is None
    return {p.name: view.clone() for p, view in bucket.views()}


def sparse(x: torch.Tensor, chunk: int, density: float) -> torch.Tensor:
    """Return the message for ``x`` by the definition, chunk by chunk in a loop."""
    kept = torch.zeros_like(x)
    for start in range(0, x.numel(), chunk):
        part = x[start : start + chunk]
        k = max(1, round(density * part.numel()))
        places = start + part.abs().sort(descending=True, stable=True).indices[:k]
        kept[places] = x[places]
    return kept


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("chunk", [16, 100, 4096])
def test_the_result_is_the_mean_of_each_ranks_largest(world: int, chunk: int) -> None:
    reduction = TopK(0.1, chunk, exempt=False)

    def body(rank: SimulatedRank) -> dict[str, torch.Tensor]:
        return one_step(rank.engine(reduction), {str(n): gradient(n, rank.rank) for n in SIZES})

    ranks = simulate(world, body)
    for n in SIZES:
        each = [sparse(gradient(n, rank), chunk, 0.1).bfloat16().float() for rank in range(world)]
        for got in ranks:
            assert torch.equal(got[str(n)], ranks[0][str(n)])
            assert torch.allclose(got[str(n)], torch.stack(each).mean(0), atol=1e-6)


@pytest.mark.parametrize("k", [1, 7, 41, 128])
def test_the_search_in_blocks_finds_the_largest(k: int) -> None:
    grid = torch.randn(300, 4096, generator=torch.Generator().manual_seed(k))
    found, wanted = largest(grid, k), grid.abs().topk(k, dim=1).indices
    assert torch.equal(found, wanted)


def test_two_levels_are_the_best_two() -> None:
    """Compare with every split of the magnitudes, one after another."""
    layout = commhooks.BucketLayout.of_shapes({"a": (64,), "b": (50,)})
    chunks = Chunks(layout, 32, 0.4)
    grid = torch.randn(chunks.rows, 32, generator=torch.Generator().manual_seed(5))
    grid[-1, 18:] = 0.0
    columns = largest(grid, chunks.k)
    chosen = grid.gather(1, columns)
    part = torch.zeros(TwoLevels().bytes(chunks), dtype=torch.uint8)
    TwoLevels().encode(chosen, chunks, part)
    found = TwoLevels().decode(part, chunks)
    start = 0
    for row, count in zip(chosen, chunks.counts.int().flatten().tolist(), strict=True):
        values, got = row[:count], found[start : start + count]
        start += count
        assert torch.equal(got.sign(), values.sign())
        sides = [(values.abs()[:s], values.abs()[s:]) for s in range(1, count + 1)]
        best = min(sum(float((side - side.mean()).square().sum()) for side in pair if len(side)) for pair in sides)
        assert float((got - values).square().sum()) <= best + 1e-3 * float(values.square().sum())
    assert start == chunks.total == len(found)


@pytest.mark.parametrize("bits", [32, 16, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_nothing_is_lost_with_feedback(bits: int, world: int) -> None:
    """Applied gradients + the mean residual = the sum of the averages."""
    steps, shapes = 12, {str(n): (n,) for n in SIZES}

    def body(rank: SimulatedRank) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine = rank.engine(TopK(0.05, 128, bits, exempt=False))
        total = {name: torch.zeros(shape) for name, shape in shapes.items()}
        for step in range(steps):
            for name, g in one_step(engine, {n: gradient(*s, rank.rank, step) for n, s in shapes.items()}).items():
                total[name] += g
        engine.resolve_step()
        return total, {name: t for name, field, t in engine.state.entries() if field == "residual"}

    ranks = simulate(world, body)
    for n in SIZES:
        every = [gradient(n, rank, step) for rank in range(world) for step in range(steps)]
        truth = torch.stack(every).sum(0) / world
        kept = torch.stack([residual[str(n)].view(-1) for _, residual in ranks]).mean(0)
        assert (ranks[0][0][str(n)] + kept - truth).norm() < 1e-5 * truth.norm()


def test_decay_is_the_share_of_the_residual_that_a_step_keeps() -> None:
    def body(rank: SimulatedRank) -> torch.Tensor:
        engine = rank.engine(TopK(1 / 16, 16, decay=0.5, exempt=False))
        for tensor in ([8.0] + [1.0] * 15, [0.0] * 16):
            one_step(engine, {"w": torch.tensor(tensor)})
        engine.resolve_step()
        kept = engine.state.read("w", "residual")
        assert kept is not None
        return kept.flatten()

    (kept,) = simulate(1, body)
    assert sorted(kept.tolist()) == [0.0, 0.0] + [0.5] * 14  # sent the whole 8, then one of the halves


@pytest.mark.parametrize("bits", [32, 16, 2])
def test_the_residual_follows_a_loss_scale(bits: int) -> None:
    """If all scales are powers of two, results equal those without a scale to the bit."""

    def body(scales: tuple[float, ...], rank: SimulatedRank) -> list[torch.Tensor]:
        engine, found = rank.engine(TopK(0.05, 100, bits, decay=0.75, exempt=False)), []
        for step, scale in enumerate(scales):
            engine.set_loss_scale(lambda: scale)  # noqa: B023 - asked for in this step
            found.append(one_step(engine, {"w": gradient(1009, rank.rank, step) * scale})["w"] / scale)
        engine.resolve_step()
        (residual,) = [
            t for _, field, t in engine.state.entries() if field == "residual"
        ]  # in the gradient's own units
        return [*found, residual]

    scaled, plain = (simulate(2, partial(body, s)) for s in ((1024.0, 1024.0, 64.0, 2.0**15), (1.0,) * 4))
    for with_scale, without in zip(scaled, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(with_scale, without, strict=True))


@pytest.mark.parametrize("bits", [16, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_inf_and_nan_arrive_from_every_place(bits: int, bad: float) -> None:
    """One chunk has more such values than it sends. Other chunks stay correct, and no residual remains."""

    def body(rank: SimulatedRank) -> torch.Tensor:
        engine = rank.engine(TopK(0.02, 64, bits, exempt=False))
        one_step(engine, {"w": gradient(1009, rank.rank)})
        engine.resolve_step()
        before = {name: t.clone() for name, _, t in engine.state.entries()}
        poisoned = gradient(1009, rank.rank, 1)
        if rank.rank == 1:
            poisoned[130:150] = bad
        got = one_step(engine, {"w": poisoned})["w"]
        engine.resolve_step()
        assert all(torch.equal(before[name], t) for name, _, t in engine.state.entries())
        return got.isfinite()

    for finite in simulate(2, body):
        assert not finite[130:150].all()
        assert finite[:128].all()
        assert finite[192:].all()


@pytest.mark.parametrize("bits", [16, 2])
@pytest.mark.parametrize("value", [0.0, 1e-44, 1e-37, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_and_extremes(bits: int, value: float, dtype: torch.dtype) -> None:
    value = min(value, torch.finfo(dtype).max * 0.9)

    def body(rank: SimulatedRank) -> torch.Tensor:
        return one_step(rank.engine(TopK(1.0, 64, bits, exempt=False)), {"w": torch.full((129,), value, dtype=dtype)})[
            "w"
        ]

    for got in simulate(3, body):
        assert got.dtype == dtype
        assert torch.allclose(got.float(), torch.full((129,), value), rtol=0.01, atol=1e-35)


@pytest.mark.parametrize(("chunk", "bits"), [(4096, 16), (4096, 2), (100, 16), (129, 2)])
@pytest.mark.parametrize("world", [2, 5])
def test_the_bytes_are_those_of_the_formula(chunk: int, bits: int, world: int) -> None:
    shapes, density = {"a": (257, 129), "b": (100, 100), "c": (40,)}, 0.03
    reduction = TopK(density, chunk, bits)

    def body(rank: SimulatedRank) -> float:
        engine = rank.engine(reduction)
        one_step(engine, {n: torch.randn(s) for n, s in shapes.items()})
        return engine.counters.traffic.payload_bytes

    chunks = entries = 0
    for numel in (257 * 129, 100 * 100):
        for start in range(0, numel, chunk):
            chunks += 1
            entries += max(1, round(density * min(chunk, numel - start)))
    width = math.ceil(math.log2(chunk))
    exact = entries * (bits + width) / 8 + (4 * chunks if bits == 2 else 0)
    for counted in simulate(world, body):
        message = (counted - 4 * 40) / world
        assert exact <= message <= exact + 2 * width + 4  # groups are padded


def test_the_caution_names_the_ranks_at_which_bf16_is_passed() -> None:
    layout = commhooks.BucketLayout.of_shapes({"w": (1024, 4096)})
    assert TopK(0.01).cautions(layout, 64) == []
    assert "from 115 ranks on" in TopK(0.01).cautions(layout, 128)[0]  # 41 of 4096 entries in 28 bits, against 32 bits
    assert "from 13 ranks on" in TopK(0.09).cautions(layout, 16)[0]
    assert "from 115" in commhooks.describe("topk")


def test_a_short_chunk_sends_fewer() -> None:
    chunks = Chunks(commhooks.BucketLayout.of_shapes({"a": (4096 + 300,), "b": (30,)}), 4096, 0.01)
    assert chunks.counts.flatten().tolist() == [41.0, 3.0, 1.0]


@pytest.mark.parametrize(
    "expr",
    [
        "topk(density=0.0)",
        "topk(density=1.5)",
        "topk(chunk=8)",
        "topk(chunk=100000)",
        "topk(bits=4)",
        "topk(decay=0.0)",
        "topk(decay=0.9, feedback=False)",
        "error_feedback(topk)",
        "bf16_wrapper(topk)",
    ],
)
def test_illegal_options(expr: str) -> None:
    with pytest.raises(commhooks.HookConfigError):
        commhooks.create(expr)


# -- gloo


def train(model: nn.Module, rank: int) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 40, generator=generator)).pow(2).mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def body_gloo(rank: int, world: int) -> dict[str, tuple[torch.Tensor, dict[str, float]]]:
    found = {}
    for expr in ("topk(density=0.05)", "topk(density=0.1, bits=2, chunk=100, exempt=False, decay=0.9)"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 8))
        model = DistributedDataParallel(net, bucket_cap_mb=0.001)
        handle = commhooks.attach(model, expr)
        train(model, rank)
        before = handle.stats()["payload_bytes"]  # DDP rebuilds its buckets after the first step
        trained = train(model, rank)
        handle.assert_active()
        assert handle.stats()["payload_bytes"] - before == 3 * handle.payload_per_step()
        found[expr] = trained, handle.stats()
    handle.detach()
    said = LogLines(logging.WARNING)
    handle = commhooks.attach(model, "topk(density=0.5)")
    assert said.lines == [f"[rank 0] {text}" for text in handle.cautions() if rank == 0]
    assert "from 3 ranks on" in handle.cautions()[0]
    return found


@pytest.mark.full
@pytest.mark.gloo
def test_four_processes_stay_equal() -> None:
    ranks = spawn(body_gloo, 4, timeout=110)
    for key, (parameters, stats) in ranks[0].items():
        assert all(torch.equal(parameters, other[key][0]) for other in ranks), key
        assert stats["compressed_steps"] == 6, (key, stats)
