"""Gathers of weights as differences, over simulated ranks."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import commhooks
from commhooks import BucketLayout, HookConfigError, HookNotSupportedError, HookState, ShardLayout
from commhooks.adapters import Gathered, GatherEngine
from commhooks.compositions.difference import difference
from commhooks.simulate import SimulatedRank, simulate

pytest.importorskip("ch_quant")
pytestmark = pytest.mark.timeout(60)

SHAPES = {"up.weight": (7, 16), "norm.weight": (5,), "down.weight": (16, 9)}
HOOK = "difference(quant4(block=16), full_every=4)"


def weights(step: int, scale: float = 0.01) -> dict[str, torch.Tensor]:
    """Weights that change by ``scale`` of their size in each step."""
    made = {name: torch.randn(shape, generator=torch.Generator().manual_seed(0)) for name, shape in SHAPES.items()}
    for now in range(1, step + 1):
        for number, tensor in enumerate(made.values()):
            noise = torch.Generator().manual_seed(100 * now + number)
            tensor += scale * torch.randn(tensor.shape, generator=noise)
    return made


def gather(engine: GatherEngine, cut: ShardLayout, exact: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Gather the shards of all ranks; every other place is NaN at first."""
    rank, world, n = engine.transport.rank, engine.transport.world_size, cut.part.numel
    storage = torch.full((world * n,), float("nan"), dtype=dtype)
    own = storage.narrow(0, rank * n, n)
    own.zero_()
    for p in cut.part.params:
        chunk = exact[p.name].chunk(world, cut.dims.get(p.name, 0))
        if rank < len(chunk):
            mine = chunk[rank].reshape(-1)
            own[p.offset : p.offset + mine.numel()].copy_(mine)
    assert isinstance(engine.reduction, Gathered)
    engine.complete(engine.launch(engine.reduction.gather_bucket(cut, storage)))
    return storage


def whole(cut: ShardLayout, storage: torch.Tensor, world: int) -> dict[str, torch.Tensor]:
    found = {}
    for p in cut.part.params:
        parts = [part[p.offset : p.offset + p.numel].view(p.shape) for part in storage.view(world, -1)]
        shape, dim = cut.whole[p.name], cut.dims.get(p.name, 0)
        found[p.name] = torch.cat(parts, dim).narrow(dim, 0, shape[dim])
    return found


def steps(rank: SimulatedRank, count: int, hook: str = HOOK, state: HookState | None = None, first: int = 0, **how):
    """Run gathers of one parameter group, one for each step. Return the decoded numbers of each, and the state."""
    dtype, world = how.get("dtype", torch.float32), rank.world_size
    state = state if state is not None else HookState()
    state.keep_copies(one=True)
    reduction = commhooks.create(hook).reduction
    engine = GatherEngine(Gathered(reduction, {"norm.weight": "1-D"}), rank.transport, state, timeout=None)
    cut = ShardLayout.of(BucketLayout.of_shapes(SHAPES, dtype), world)
    found, payload = [], [0.0]
    for step in range(first, first + count):
        found.append(whole(cut, gather(engine, cut, weights(step), dtype), world))
        assert engine.finish() is None
        payload.append(engine.counters.traffic.payload_bytes)
    engine.resolve_step()
    return found, [b - a for a, b in itertools.pairwise(payload)], state


def error(found: dict[str, torch.Tensor], step: int) -> float:
    exact = weights(step)
    return max(float((found[n].float() - exact[n]).norm() / exact[n].norm()) for n in ("up.weight", "down.weight"))


@settings(max_examples=12, deadline=None)
@given(world=st.integers(1, 5), bf16=st.booleans(), bits=st.sampled_from([8, 4, 3]))
def test_weights_are_equal_on_all_ranks_and_errors_do_not_add_up(world: int, bf16: bool, bits: int) -> None:
    dtype = torch.bfloat16 if bf16 else torch.float32
    hook = f"difference(quant(bits={bits}, block=16), full_every=100)"
    every = simulate(world, lambda rank: steps(rank, 12, hook, dtype=dtype)[0])
    for step in range(12):
        for name in SHAPES:
            assert all(torch.equal(one[step][name], every[0][step][name]) for one in every)
        assert torch.equal(every[0][step]["norm.weight"], weights(step)["norm.weight"].to(dtype))
        limit = 0.005 if bf16 else 0.0
        assert error(every[0][step], step) <= limit + (0.01 if step else 1e-7)


def test_every_nth_step_is_exact_and_the_others_send_codes() -> None:
    found, payload, _ = simulate(2, lambda rank: steps(rank, 9))[0]
    exact = [step for step in range(9) if all(torch.equal(found[step][n], weights(step)[n]) for n in SHAPES)]
    assert exact == [0, 3, 7]
    assert {payload[step] for step in exact} == {2 * 4 * (4 * 16 + 3 + 8 * 9)}
    assert payload[1] == payload[5] < payload[0] / 4


def test_a_lost_copy_is_found_again() -> None:
    """Without a copy, weights are coded against zeros, and the error shrinks by the factor of the code in each gather."""

    def body(rank: SimulatedRank) -> list[float]:
        state = HookState()
        state.step = 1
        found, _, _ = steps(rank, 4, "difference(quant4(block=16), full_every=100)", state)
        return [error(one, step) for step, one in enumerate(found)]

    errors = simulate(2, body)[0]
    assert errors[0] > 0.03 > 0.01 > errors[2]


@pytest.mark.parametrize("world", [2, 3])
def test_a_saved_copy_resumes_on_any_number_of_ranks(world: int) -> None:
    """Copies are those of whole parameters: with as many ranks the bits are those of a run without a break."""
    straight = simulate(2, lambda rank: steps(rank, 6)[0])[0]
    saved = simulate(2, lambda rank: steps(rank, 3)[2].state_dict())

    def body(rank: SimulatedRank):
        state = HookState()
        state.load_state_dict(saved[0])  # the copies are shared
        return steps(rank, 3, state=state, first=3)[0]

    resumed = simulate(world, body)
    assert all(torch.equal(one[0][n], resumed[0][0][n]) for one in resumed for n in SHAPES)
    for step in range(3):
        if world == 2:
            assert all(torch.equal(resumed[0][step][n], straight[3 + step][n]) for n in SHAPES)
        assert error(resumed[0][step], 3 + step) < 0.01


def test_a_second_gather_of_one_step_continues_the_first() -> None:
    def body(rank: SimulatedRank) -> tuple[float, float]:
        state = HookState()
        state.keep_copies(one=True)
        state.step = 1
        reduction = commhooks.create(HOOK).reduction
        engine = GatherEngine(Gathered(reduction), rank.transport, state, timeout=None)
        cut = ShardLayout.of(BucketLayout.of_shapes(SHAPES), rank.world_size)
        first = whole(cut, gather(engine, cut, weights(0), torch.float32), rank.world_size)
        engine.resolve_step()  # a checkpoint after an evaluation keeps the copies
        assert {field for _, field, _ in state.entries()} == {"copy"}
        second = whole(cut, gather(engine, cut, weights(0), torch.float32), rank.world_size)
        assert engine.finish() is None
        return error(first, 0), error(second, 0)

    first, second = simulate(2, body)[0]
    assert second < first / 5


def test_another_dimension_may_be_cut() -> None:
    def body(rank: SimulatedRank) -> float:
        whole_shapes = {"up.weight": (8, 16), "down.weight": (16, 6)}
        part = BucketLayout.of_shapes({"up.weight": (8, 8), "down.weight": (8, 6)})
        cut = ShardLayout(part, whole_shapes, {"up.weight": 1})
        state = HookState()
        state.keep_copies(one=True)
        engine = GatherEngine(Gathered(commhooks.create(HOOK).reduction), rank.transport, state, timeout=None)
        exact = {n: torch.randn(s, generator=torch.Generator().manual_seed(1)) for n, s in whole_shapes.items()}
        for _ in range(3):
            found = whole(cut, gather(engine, cut, exact, torch.float32), 2)
            assert engine.finish() is None
            for name, tensor in exact.items():
                assert torch.allclose(found[name], tensor, atol=2e-3)
                assert torch.equal(state.newest(name, "copy"), found[name])
                tensor += 0.01
        return 0.0

    simulate(2, body)


@pytest.mark.parametrize(
    ("hook", "error_type", "match"),
    [
        ("difference(quant4, full_every=0)", HookConfigError, "full_every"),
        ("difference(allreduce)", HookConfigError, "loses nothing"),
        ("difference(powersgd(rank=2))", HookNotSupportedError, "cannot gather weights"),
        ("difference(quant4(error_feedback=True))", HookNotSupportedError, "cannot gather weights"),
        ("warmup(difference(quant4), steps=3)", HookConfigError, "outermost"),
        ("policy({'*': difference(quant4)})", HookConfigError, "outermost"),
        ("difference", HookConfigError, "needs an inner hook"),
    ],
)
def test_refusals(hook: str, error_type: type[Exception], match: str) -> None:
    with pytest.raises(error_type, match=match):
        commhooks.create(hook)


def test_gradients_are_refused() -> None:
    with pytest.raises(HookNotSupportedError, match=r"axis='gather'"):
        commhooks.attach(torch.nn.Linear(2, 2), "difference(quant4)")
    made = difference(commhooks.create("quant8").reduction)
    with pytest.raises(HookConfigError, match="gathers weights"):
        made.plan(BucketLayout.of_shapes(SHAPES), commhooks.StepContext(world_size=2))


def test_a_policy_inside_chooses_the_exact_parameters() -> None:
    hook = "difference(policy({'down.*': allreduce, '*': quant8(block=16)}), full_every=100)"
    for found, payload, _ in simulate(2, lambda rank: steps(rank, 3, hook)):
        assert all(torch.equal(found[step]["down.weight"], weights(step)["down.weight"]) for step in range(3))
        assert not torch.equal(found[1]["up.weight"], weights(1)["up.weight"])
        assert payload[2] < payload[0]
