"""A residual in 8 bits: its memory and its loss. A loss scale and a checkpoint do not see the codes."""

import pickle

import pytest
import torch

import commhooks
from ch_core import SimulatedRank, simulate
from ch_testing import SimulatedRanks
from commhooks import Bucket, HookState

SHAPE = (96, 70)  # 52 blocks of 128 and a half
EXPR = "quant4(error_feedback=True, residual='int8')"


def gradient(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {"w": torch.randn(SHAPE, generator=generator) + 0.1}


def ranks_of(expr: str, world: int = 3) -> SimulatedRanks:
    return SimulatedRanks(lambda: commhooks.create(expr), world, {"w": torch.zeros(SHAPE)}, buckets=1)


def held(state: HookState) -> int:
    return sum(t.nbytes for entry in state.versions.committed.values() for t in entry.tensors)


def test_it_takes_a_quarter_of_fp32_and_is_seen_as_fp32() -> None:
    packed, plain = ranks_of(EXPR), ranks_of("quant4(error_feedback=True)")
    for ranks in (packed, plain):
        ranks.step([gradient(rank, 0) for rank in range(3)])
        ranks.resolve_step()
    a, b = packed.engines[0].state, plain.engines[0].state
    assert held(a) < 0.26 * held(b)
    ((name, field, shown),) = list(a.entries())
    exact = b.read("w", "residual")
    assert exact is not None
    assert (name, field, shown.dtype) == ("w", "residual", torch.float32)
    assert shown.shape == exact.shape
    blocks = torch.nn.functional.pad(exact.view(-1), (0, 64)).view(-1, 128).abs().amax(1, keepdim=True)
    error = torch.nn.functional.pad((shown - exact).view(-1), (0, 64)).view(-1, 128).abs()
    assert bool((error <= blocks / 100).all())  # half a level is 1/254, and a rank's own part rounds twice
    assert error.any()


def test_the_forgotten_part_stays_small_over_many_steps() -> None:
    steps = 60

    def body(rank: SimulatedRank) -> tuple[torch.Tensor, torch.Tensor]:
        reduction = commhooks.create(EXPR).reduction
        assert reduction is not None
        engine = rank.engine(reduction)
        total = torch.zeros(SHAPE)
        for step in range(steps):
            bucket = commhooks.Bucket.from_tensors(gradient(rank.rank, step))
            engine.submit(bucket)
            engine.finish()
            total += bucket.view("w")
        engine.resolve_step()
        return total, next(tensor for _, _, tensor in engine.state.entries())

    ranks = simulate(3, body)
    truth = torch.stack([gradient(rank, step)["w"] for step in range(steps) for rank in range(3)]).sum(0) / 3
    kept = torch.stack([residual for _, residual in ranks]).mean(0).view(SHAPE)
    forgotten = float((ranks[0][0] + kept - truth).norm() / truth.norm())
    assert 0.0 < forgotten < 1e-2  # error feedback without a residual would give 0.05 or more


def test_a_loss_scale_multiplies_the_scales_alone() -> None:
    ranks = ranks_of(EXPR, 2)
    ranks.step([gradient(rank, 0) for rank in range(2)])
    ranks.resolve_step()
    state = ranks.engines[0].state
    before = [tensor.clone() for _, _, tensor in state.entries()]
    codes, scales = state.versions.committed["w", "residual"].tensors
    was = codes.clone(), scales.clone()
    state.versions.rescale(64.0)
    assert torch.equal(codes, was[0])
    assert torch.equal(scales, 64.0 * was[1])
    assert [torch.equal(a, b) for a, (_, _, b) in zip(before, state.entries(), strict=True)] == [True]


def test_a_resumed_run_has_the_bits_of_the_one_that_went_on() -> None:
    went_on, resumed = ranks_of(EXPR, 2), ranks_of(EXPR, 2)
    for step in range(3):
        went_on.step([gradient(rank, step) for rank in range(2)])
    resumed.load(went_on.save())
    for step in range(3, 6):
        every = [gradient(rank, step) for rank in range(2)]
        a, b = went_on.step([dict(g) for g in every]), resumed.step(every)
        assert torch.equal(a.gradients[0]["w"], b.gradients[0]["w"])


def test_it_continues_from_another_hooks_residual_in_fp32() -> None:
    """A warm-up switches from a hook that keeps an fp32 residual of the same name."""
    ranks = ranks_of(f"warmup(quant8(error_feedback=True), {EXPR}, steps=2)", 2)
    truth, total = torch.zeros(SHAPE), torch.zeros(SHAPE)
    for step in range(4):
        every = [gradient(rank, step) for rank in range(2)]
        truth += (every[0]["w"] + every[1]["w"]) / 2
        total += ranks.step(every).gradients[0]["w"]
    ranks.resolve_step()
    kept = torch.stack([next(t for _, _, t in e.state.entries()) for e in ranks.engines]).mean(0).view(SHAPE)
    assert ranks.engines[0].state.read("w", "residual").dtype == torch.int8  # type: ignore[union-attr]
    assert float((total + kept - truth).norm() / truth.norm()) < 5e-3


@pytest.mark.parametrize("expr", ["quant4(residual='int8')", "quant4(error_feedback=True, residual='fp16')"])
def test_illegal_residual_options(expr: str) -> None:
    with pytest.raises(commhooks.HookConfigError, match="residual"):
        commhooks.create(expr)


@pytest.mark.parametrize("joined", [False, True], ids=["unused", "joined"])
@pytest.mark.parametrize("expr", ["sign", "quant2", "quant4(error_feedback=True)", EXPR])
def test_the_owner_of_a_part_keeps_its_error_without_a_gradient(expr: str, joined: bool) -> None:
    """A rank that does not use a parameter, or has joined, still rounds its part of the average for all ranks."""
    ranks, world, steps = ranks_of(expr), 3, 12
    applied, wanted = torch.zeros(SHAPE), torch.zeros(SHAPE)
    for step in range(steps):
        absent = (world - 1 if step >= 2 else -1) if joined else step % world
        given = [gradient(rank, step) if rank != absent else {"w": None} for rank in range(world)]
        wanted += sum(one["w"] for one in given if one["w"] is not None) / world
        applied += ranks.step(given, joined=[absent] if joined else []).gradients[0]["w"]
    ranks.resolve_step()
    owed = [engine.state.versions.committed["w", "residual"].numbers() for engine in ranks.engines]
    total = applied + sum(one.view(SHAPE) for one in owed if one is not None) / world
    lost = float((total - wanted).norm() / wanted.norm())
    assert lost < (1e-2 if "int8" in expr else 1e-5), f"{lost:.3g} of the gradients is lost"


def test_the_pickled_residual_of_another_rank_is_dropped_with_its_scales() -> None:
    def saved(rank: SimulatedRank) -> bytes:
        engine = rank.engine(commhooks.create(EXPR).reduction)
        engine.submit(Bucket.from_tensors(gradient(rank.rank, 0)))
        engine.finish()
        engine.resolve_step()
        return pickle.dumps(engine.state)

    pickled = simulate(2, saved)

    def body(rank: SimulatedRank) -> list[tuple[str, str]]:
        state: HookState = pickle.loads(pickled[1 - rank.rank])
        rank.engine(commhooks.create(EXPR).reduction, state)
        return [(name, field) for name, field, _ in state.entries()]

    assert simulate(2, body) == [[], []]
