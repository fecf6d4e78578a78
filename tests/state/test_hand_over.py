"""A schedule hands a residual from one hook to the next without loss, for every memory format of the parameter."""

import pickle

import pytest
import torch

import commhooks
from ch_core import SimulatedRank, simulate
from ch_core.bucket import contiguous_stride
from ch_testing import SimulatedRanks
from ch_testing.gradients import all_ranks
from commhooks import Bucket, BucketLayout, ParamLayout

SHAPES = {
    "square, by columns": ((16, 16), (1, 16)),
    "square, by rows": ((16, 16), (16, 1)),
    "by columns": ((24, 16), (1, 24)),
    "convolution": ((8, 6, 5, 5), contiguous_stride((8, 6, 5, 5))),
    "channels last": ((8, 6, 5, 5), (150, 1, 30, 6)),
}
KEEPERS = ("powersgd(rank=1)", "error_feedback(bf16_compress)", "quant8(error_feedback=True)")
SCHEDULES = [f"warmup({a}, {b}, steps=2)" for a in KEEPERS for b in KEEPERS if a != b]
SCHEDULES += [
    "warmup(warmup(error_feedback(bf16_compress), powersgd(rank=1), steps=1), error_feedback(fp16_compress), steps=3)",
    "warmup(bf16_wrapper(powersgd(rank=1)), policy({'*': error_feedback(bf16_compress)}), steps=2)",
]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("expr", SCHEDULES)
def test_applied_and_owed_are_the_sum_of_all_gradients(expr: str, joined: bool) -> None:
    params, offset = [], 0
    for name, (shape, stride) in SHAPES.items():
        params.append(ParamLayout(name, shape, stride, offset))
        offset += params[-1].numel
    layout = BucketLayout(params, offset, torch.float32)

    def body(rank: SimulatedRank) -> list[dict[str, torch.Tensor]]:
        reduction = commhooks.create(expr).reduction
        assert reduction is not None
        engine = rank.engine(reduction)
        own = torch.Generator().manual_seed(rank.rank)
        true = {p.name: torch.zeros(p.shape) for p in params}
        applied = {p.name: torch.zeros(p.shape) for p in params}
        for step in range(6):
            bucket = Bucket(layout, torch.zeros(offset))
            # The rank is joined during the handover. Its residual waits, in the new order.
            engine.set_participating(not (joined and rank.rank == 1 and step in (1, 2, 3)))
            for p, view in bucket.views():
                if engine.participating:
                    view.copy_(torch.randn(p.shape, generator=own))
                true[p.name] += view
            engine.submit(bucket)
            assert engine.finish() is None
            for p, view in bucket.views():
                applied[p.name] += view
        engine.resolve_step()
        owed = {}
        for p in params:
            residual = engine.state.read(p.name, "residual")
            assert residual is not None
            in_memory = "residual" in reduction.memory_order(p, 5)
            owed[p.name] = p.to_own_shape(residual) if in_memory else residual
        return [true, applied, owed]

    first, second = simulate(2, body)
    for name in SHAPES:
        true, owed = ((first[i][name] + second[i][name]) / 2 for i in (0, 2))
        lost = float((first[1][name] + owed - true).norm() / true.norm())
        assert lost < 2e-2, name  # sums of 16-bit numbers round. A residual in the wrong order loses half or more


LIKE = {"a.weight": torch.zeros(40, 32), "b.weight": torch.zeros(24, 40), "b.bias": torch.zeros(24)}


def handed(first: str, second: str, like: dict[str, torch.Tensor] = LIKE) -> tuple[SimulatedRanks, SimulatedRanks]:
    """Return ranks of the first hook after two steps, and ranks of the second hook with their states."""
    old = SimulatedRanks(lambda: commhooks.create(first), 2, like)
    for step in range(2):
        assert not any(old.step(all_ranks(like, 2, step)).errors)
    states = []
    for handle in old.handles:
        handle.detach()
        states.append(handle.state)

    def make() -> commhooks.CommHook:
        handle = commhooks.create(second)
        handle.state = states.pop(0)
        return handle

    return old, SimulatedRanks(make, 2, like)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("powersgd(rank=1)", "powersgd(rank=2)"),
        ("powersgd(rank=4, min_compression_rate=0.5)", "bf16_wrapper(powersgd(rank=2))"),
        ("batched_powersgd(rank=2)", "powersgd(rank=4, min_compression_rate=0.5)"),
        ("powersgd(rank=2)", "powersgd(rank=2)"),
    ],
)
def test_q_of_another_rank_starts_again_and_the_residual_stays(first: str, second: str) -> None:
    _, new = handed(first, second)
    before = [dict(saved["entries"]) for saved in new.save()]
    assert all("residual" in row["a.weight"] for row in before)
    assert ("q" in before[0]["a.weight"]) is (first == second)
    assert not any(new.step(all_ranks(LIKE, 2, 2)).errors)


@pytest.mark.parametrize("second", ["quant8(error_feedback=True)", "topk(density=0.1)", "allreduce"])
def test_a_hook_saves_no_field_of_the_hook_before_and_loads_its_own_state(second: str) -> None:
    _, new = handed("powersgd(rank=2)", second)
    assert not any(new.step(all_ranks(LIKE, 2, 2)).errors)
    saved = new.save()
    assert all("q" not in row for row in saved[0]["entries"].values())
    new.load(saved)


def test_a_stateless_hook_in_between_leaves_the_residual() -> None:
    _, between = handed("topk(density=0.1)", "allreduce")
    assert between.engines[0].state.read("a.weight", "residual") is not None


def test_a_residual_of_another_shape_is_refused_after_a_hand_over_too() -> None:
    old = SimulatedRanks(lambda: commhooks.create("powersgd(rank=1)"), 1, LIKE)
    assert not any(old.step(all_ranks(LIKE, 1, 0)).errors)
    old.handles[0].detach()
    state = old.handles[0].state
    assert isinstance(state, commhooks.HookState)
    state.draft.write(("a.weight", "residual"), (3, 3)).tensor.zero_()
    state.versions.commit()
    handle = commhooks.create("topk(density=0.1)")
    handle.state = state
    with pytest.raises(commhooks.StateError, match=r"field 'residual', is \[3, 3\]"):
        SimulatedRanks(lambda: handle, 1, LIKE)


def test_a_residual_of_another_dtype_is_cast() -> None:
    """`topk` with few bits keeps fp32 for fp64 gradients, and PowerSGD keeps fp64."""
    like = {name: tensor.double() for name, tensor in LIKE.items()}
    _, new = handed("powersgd(rank=1)", "topk(density=0.2, bits=2)", like)
    kept = new.engines[0].state.read("a.weight", "residual")
    assert kept is not None and kept.dtype == torch.float32 and kept.any()
    assert not any(new.step(all_ranks(like, 2, 2)).errors)


def test_a_cast_keeps_the_loss_scale_of_a_residual() -> None:
    """The state holds scaled gradients, and shows them unscaled."""
    like = {name: tensor.double() for name, tensor in LIKE.items()}
    old = SimulatedRanks(lambda: commhooks.create("powersgd(rank=1)"), 1, like)
    old.engines[0].set_loss_scale(lambda: 1024.0)
    assert not any(old.step(all_ranks(like, 1, 0)).errors)
    old.resolve_step()
    old.handles[0].detach()
    state = old.handles[0].hook_state
    assert state is not None and state.versions.loss_scale == 1024.0
    before = state.read("a.weight", "residual").clone()
    handle = commhooks.create("topk(density=0.2, bits=2)")
    handle.state = state
    SimulatedRanks(lambda: handle, 1, like)
    after = state.read("a.weight", "residual")
    assert after.dtype == torch.float32
    torch.testing.assert_close(after.double(), before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pickled", [False, True])
def test_a_residual_of_scaled_gradients_goes_on_without_a_scale(pickled: bool) -> None:
    """The script drops its `GradScaler`, for example because it goes on in bf16."""
    states: list[commhooks.HookState] = [commhooks.HookState()]
    true, applied = torch.zeros(40, 32), torch.zeros(40, 32)
    for scale in (1024.0, None):
        handle = commhooks.create("powersgd(rank=1)")
        handle.state = states[-1]
        ranks = SimulatedRanks(lambda handle=handle: handle, 1, LIKE)
        ranks.engines[0].set_loss_scale(None if scale is None else lambda scale=scale: scale)
        for step in range(2):
            (given,) = all_ranks(LIKE, 1, step)
            reduced = ranks.step([{name: one * (scale or 1.0) for name, one in given.items()}])
            assert not any(reduced.errors)
            true += given["a.weight"]
            applied += reduced.gradients[0]["a.weight"] / (scale or 1.0)
        ranks.resolve_step()
        handle.detach()
        states.append(pickle.loads(pickle.dumps(handle.state)) if pickled else handle.state)
    owed = next(one for name, field, one in states[-1].entries() if (name, field) == ("a.weight", "residual"))
    torch.testing.assert_close(applied + owed.view(40, 32), true, rtol=1e-4, atol=1e-4)
