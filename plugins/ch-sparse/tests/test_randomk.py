"""All ranks choose the same random entries, over simulated ranks."""

import pytest
import torch

import commhooks
from ch_core import Engine, SimulatedRank, simulate
from ch_sparse import RandomK
from ch_sparse.randomk import hashed

pytestmark = pytest.mark.timeout(120)

SIZES = (1, 127, 129, 1009)


def gradient(numel: int, rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + numel))


def one_step(engine: Engine, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    bucket = commhooks.Bucket.from_tensors(tensors)
    engine.submit(bucket)
    assert engine.finish() is None
    return {p.name: view.clone() for p, view in bucket.views()}


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_one_entry_of_each_stratum_is_the_mean_and_the_others_are_kept(world: int) -> None:
    def body(rank: SimulatedRank) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine = rank.engine(RandomK(0.1, exempt=False))
        got = one_step(engine, {str(n): gradient(n, rank.rank) for n in SIZES})
        engine.resolve_step()
        return got, {name: t.view(-1) for name, _, t in engine.state.entries()}

    ranks = simulate(world, body)
    for n in SIZES:
        mean = torch.stack([gradient(n, rank) for rank in range(world)]).mean(0)
        for rank, (got, kept) in enumerate(ranks):
            found, chosen = got[str(n)], kept[str(n)] == 0
            assert torch.equal(found, ranks[0][0][str(n)])
            assert torch.allclose(found, torch.where(chosen, mean, torch.zeros(())), atol=1e-6)
            assert torch.equal(kept[str(n)][~chosen], gradient(n, rank)[~chosen])
            assert all(int(part.sum()) == 1 for part in chosen[: n // 10 * 10].split(10) if len(part))


def test_every_entry_is_chosen_equally_often_and_neighbours_independently() -> None:
    keys = hashed(torch.arange(2000), 7)
    picks = torch.stack([hashed(keys, step).remainder(10) for step in range(400)])  # (steps, strata)
    counts = torch.bincount(picks.view(-1), minlength=10) / picks.numel()
    assert (counts - 0.1).abs().max() < 5 * (0.1 * 0.9 / picks.numel()) ** 0.5
    for other in (picks[1:, :], picks[:, 1:]):  # the step before, the stratum before
        same = (other == picks[: other.shape[0], : other.shape[1]]).float().mean()
        assert abs(float(same) - 0.1) < 5 * (0.1 * 0.9 / other.numel()) ** 0.5


def test_splitmix64_of_known_numbers() -> None:
    """Vigna's generator with seed 0. Its first numbers are the finalizer of 1, 2, 3 times the golden gamma."""
    wanted = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [value % 2**64 for value in hashed(torch.tensor([1, 2, 3]), 0).tolist()] == wanted


def test_the_choice_follows_from_seed_and_step_not_from_buckets() -> None:
    def run(reduction: RandomK, names: tuple[str, ...], steps: int = 2) -> torch.Tensor:
        def body(rank: SimulatedRank) -> torch.Tensor:
            engine = rank.engine(reduction)
            for _ in range(steps):
                found = one_step(engine, {name: torch.ones(600, 2) for name in names})
            return found["w"].ne(0)

        return simulate(2, body)[1]

    first = run(RandomK(0.01), ("w",))
    assert torch.equal(first, run(RandomK(0.01), ("a", "w", "b")))
    assert not torch.equal(first, run(RandomK(0.01, seed=1), ("w",)))
    assert not torch.equal(first, run(RandomK(0.01), ("w",), steps=3))


def test_without_feedback_the_expectation_is_the_mean() -> None:
    steps = 400

    def body(rank: SimulatedRank) -> torch.Tensor:
        engine = rank.engine(RandomK(0.25, feedback=False, exempt=False))
        return sum((one_step(engine, {"w": gradient(1009, rank.rank)})["w"] for _ in range(steps)), torch.zeros(1009))

    mean = torch.stack([gradient(1009, rank) for rank in range(2)]).mean(0)
    (found, _) = simulate(2, body)
    spread = mean.abs() * (3 / steps) ** 0.5  # the average over this many steps
    assert ((found / steps - mean).abs() <= 5 * spread + 1e-6).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_inf_and_nan_show_from_every_place(bad: float) -> None:
    """Try each place of a stratum, chosen or not."""

    def body(rank: SimulatedRank) -> list[bool]:
        engine, seen = rank.engine(RandomK(0.1, exempt=False)), []
        for place in range(10):
            poisoned = gradient(127, rank.rank)
            if rank.rank == 1:
                poisoned[30 + place] = bad
            got = one_step(engine, {"w": poisoned})["w"]
            seen.append(bool(got[30:40].isfinite().all()) or not bool(got[:30].isfinite().all()))
            engine.resolve_step()
        assert not list(engine.state.entries())
        return seen

    assert not any(seen for rank in simulate(2, body) for seen in rank)


@pytest.mark.parametrize("value", [0.0, 1e-44, 3e38])
def test_zeros_and_extremes(value: float) -> None:
    def body(rank: SimulatedRank) -> torch.Tensor:
        return one_step(rank.engine(RandomK(0.01, exempt=False)), {"w": torch.full((1009,), value)})["w"]

    for got in simulate(3, body):
        assert got.isfinite().all()
        assert got.max() == pytest.approx(value, rel=1e-5, abs=1e-44)


@pytest.mark.parametrize("expr", ["randomk(density=0.0)", "randomk(decay=0.5, feedback=False)"])
def test_illegal_options(expr: str) -> None:
    with pytest.raises(commhooks.HookConfigError):
        commhooks.create(expr)


def test_the_volume_does_not_grow_with_the_ranks() -> None:
    layout = commhooks.BucketLayout.of_shapes({"w": (512, 512), "odd": (101, 7)})
    volumes = {
        request.payload_bytes
        for world in (2, 4, 64)
        for stage in RandomK(0.01).plan(layout, commhooks.StepContext(world_size=world))
        for request in stage
    }
    assert volumes == {4 * (2622 + 8)}


def two_steps(expr: str, device: str) -> list[torch.Tensor]:
    """Return the last average of rank 0, and its state."""

    def body(rank: SimulatedRank) -> list[torch.Tensor]:
        with torch.device(device):
            reduction = commhooks.create(expr).reduction
            assert reduction is not None
            engine = rank.engine(reduction)
            for step in range(2):
                chance = torch.Generator("cpu").manual_seed(10 * step + rank.rank)
                gradient = torch.randn(64, 96, generator=chance, dtype=torch.float32, device="cpu")
                bucket = commhooks.Bucket.from_tensors({"w": gradient})
                engine.submit(bucket)
                assert engine.finish() is None
            engine.resolve_step()
            return [bucket.buffer, *(tensor for _, _, tensor in engine.state.entries())]

    return simulate(2, body)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("expr", ["topk(density=0.05)", "topk(density=0.05, bits=2)", "topk(bits=32)", "randomk"])
def test_torchs_default_dtype_and_device_change_nothing(expr: str, dtype: torch.dtype) -> None:
    wanted = two_steps(expr, "cpu")
    torch.set_default_dtype(dtype)
    try:
        found = two_steps(expr, "meta")
    finally:
        torch.set_default_dtype(torch.float32)
    assert [t.dtype for t in found] == [t.dtype for t in wanted]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
