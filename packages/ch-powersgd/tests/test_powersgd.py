"""Invariants of PowerSGD over simulated ranks."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ch_core import SimulatedRank, simulate
from ch_core.engine.engine import Engine
from ch_core.engine.schedule import TUNED, CpuTuning
from ch_powersgd import powersgd as of_powersgd
from ch_powersgd.powersgd import BatchedPowerSGD, PowerSGD
from ch_wrappers import WireCast
from commhooks import Bucket, BucketLayout, HookConfigError, ParamLayout, Reduction, StepContext

SHAPES = {"a": (24, 40), "bias": (40,), "b": (40, 12), "conv": (16, 3, 3, 5), "c": (24, 40), "scalar": ()}
Gradient = Callable[[int, int, str, tuple[int, ...]], torch.Tensor]


def noise(rank: int, step: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    seed = hash((rank, step, tuple(name.encode()))) % 2**31
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(
    make: Callable[[], Reduction],
    *,
    world: int = 2,
    steps: int = 4,
    buckets: tuple[tuple[str, ...], ...] = (tuple(SHAPES),),
    gradient: Gradient = noise,
    dtype: torch.dtype = torch.float32,
    tuning: CpuTuning = TUNED,
) -> list[tuple[list[dict[str, torch.Tensor]], Engine]]:
    """Return each rank's averaged gradients of every step by name, and its engine after resolve_step()."""

    def body(rank: SimulatedRank) -> tuple[list[dict[str, torch.Tensor]], Engine]:
        engine, history = rank.engine(make(), tuning=tuning), []
        for step in range(steps):
            made = []
            for i, names in enumerate(buckets):
                tensors = {n: gradient(rank.rank, step, n, SHAPES[n]).to(dtype) for n in names}
                made.append(Bucket.from_tensors(tensors, index=i, is_last=i == len(buckets) - 1))
                engine.submit(made[-1])
            error = engine.finish()
            if error is not None:
                raise error
            history.append({p.name: view.clone() for b in made for p, view in b.views()})
        engine.resolve_step()
        return history, engine

    return simulate(world, body)


@contextlib.contextmanager
def batched(on: bool) -> Iterator[None]:
    """Treat small matrices of one shape as a batch, as on devices with expensive kernel launches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_powersgd, "prefers_batches", lambda device, numel: on)
        yield


def test_equal_shapes_are_multiplied_together_if_that_saves_launches() -> None:
    layout = BucketLayout.of_shapes(SHAPES, device="meta").select(frozenset({"a", "b", "c"}))

    def names() -> list[list[str]]:
        return [[p.name for p in stack.params] for stack in PowerSGD().stacks(layout)]

    assert names() == [["a", "c"], ["b"]]
    with batched(False):
        assert names() == [["a"], ["b"], ["c"]]


def stored(engine: Engine, field: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, which, tensor in engine.state.entries() if which == field}


def mean(step: int, name: str, world: int) -> torch.Tensor:
    return torch.stack([noise(r, step, name, SHAPES[name]) for r in range(world)]).mean(0)


@settings(max_examples=12, deadline=None)
@given(
    world=st.integers(1, 5),
    rank=st.integers(1, 5),
    residual=st.sampled_from(["local", "averaged"]),
    warm=st.booleans(),
    feedback=st.booleans(),
    batch=st.booleans(),
)
def test_ranks_agree_to_the_bit_and_the_rest_is_exact(
    world: int, rank: int, residual: Any, warm: bool, feedback: bool, batch: bool
) -> None:
    def make() -> PowerSGD:
        return PowerSGD(rank, residual=residual, warm_start=warm, error_feedback=feedback)

    with batched(batch):
        ranks = train(make, world=world)
    for history, engine in ranks:
        for ours, first in zip(history, ranks[0][0], strict=True):
            assert all(torch.equal(ours[n], first[n]) for n in SHAPES)
        assert engine.counters.compressed_steps == 4
        assert set(stored(engine, "residual")) <= ({"a", "b", "c", "conv"} if feedback else set())
    for name in ("bias", "scalar"):
        torch.testing.assert_close(ranks[0][0][2][name], mean(2, name, world))


@pytest.mark.parametrize("make", [PowerSGD, BatchedPowerSGD])
@pytest.mark.parametrize("wire", [None, "bf16", "fp16"])
def test_input_is_sent_plus_residual(make: Callable[..., PowerSGD], wire: Any) -> None:
    """Summed over all steps, ranks' gradients = applied gradients + remaining residuals."""

    def wrapped() -> Reduction:
        return WireCast(make(rank=2), wire) if wire else make(rank=2)

    steps, world = 6, 3
    ranks = train(wrapped, world=world, steps=steps)
    left = [stored(engine, "residual") for _, engine in ranks]
    # The 16-bit *sum* also rounds. No rank's residual holds that error. All other terms balance.
    tolerance = {None: 2e-5, "bf16": 0.15, "fp16": 0.02}[wire]
    for name in left[0]:
        given_in = sum(mean(s, name, world) for s in range(steps))
        applied = sum(ranks[0][0][s][name] for s in range(steps))
        held = torch.stack([one[name].reshape(SHAPES[name]) for one in left]).mean(0)
        torch.testing.assert_close(applied + held, given_in, atol=tolerance, rtol=0)


def test_alone_the_sent_part_is_counted_after_rounding() -> None:
    """One rank has no sum to round. The identity is therefore exact on a bf16 wire too."""
    ((history, engine),) = train(lambda: WireCast(PowerSGD(2), "bf16"), world=1, steps=5)
    for name, held in stored(engine, "residual").items():
        total = sum(noise(0, s, name, SHAPES[name]) for s in range(5))
        applied = sum(h[name] for h in history)
        torch.testing.assert_close(applied + held.reshape(SHAPES[name]), total, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (32, 32), (2, 8, 64), (1024,)])
def test_a_bucket_whose_only_parameter_fills_the_near_square_matrix(shape: tuple[int, ...]) -> None:
    """Batched PowerSGD reshapes its 1024 elements to 32 x 32, for any original shape."""

    def body(rank: SimulatedRank) -> torch.Tensor:
        engine, difference = rank.engine(BatchedPowerSGD(rank=2)), torch.zeros(1024)
        for step in range(4):
            gradient = noise(rank.rank, step, "w", shape)
            bucket = Bucket.from_tensors({"w": gradient})
            engine.submit(bucket)
            error = engine.finish()
            if error is not None:
                raise error
            difference += (gradient - bucket.view("w")).view(-1)
        engine.resolve_step()
        return difference - stored(engine, "residual")["w"].view(-1)

    left = torch.stack(simulate(2, body)).mean(0)
    torch.testing.assert_close(left, torch.zeros(1024), atol=2e-5, rtol=0)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("batch", [False, True])
def test_buckets_make_no_difference_to_the_bit(world: int, batch: bool) -> None:
    names = tuple(SHAPES)
    layouts = [(names,), (names[:2], names[2:]), tuple((n,) for n in reversed(names))]
    for tuning in (TUNED, CpuTuning.off()):
        with batched(batch):
            runs = [train(lambda: PowerSGD(3), world=world, buckets=b, tuning=tuning) for b in layouts]
        for other in runs[1:]:
            for a, b in zip(runs[0][0][0], other[0][0], strict=True):
                assert all(torch.equal(a[n], b[n]) for n in names)


@pytest.mark.parametrize("make", [PowerSGD, BatchedPowerSGD])
def test_zero_and_rank_deficient_gradients_are_finite_and_recover(make: Callable[..., PowerSGD]) -> None:
    def gradient(rank: int, step: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        rows, cols = shape[0] if shape else 1, math.prod(shape[1:])
        if step < 2:
            return torch.zeros(shape)
        if step < 5:
            return torch.outer(torch.arange(rows).float(), torch.ones(cols)).view(shape)
        return noise(0, 0, name, (rows, 2)).mm(noise(1, 0, name, (2, cols))).view(shape)

    ranks = train(lambda: make(rank=4, error_feedback=False), steps=40, gradient=gradient)
    history = ranks[0][0]
    for averaged in history:
        assert all(t.isfinite().all() for t in averaged.values())
    assert all(t.count_nonzero() == 0 for t in history[1].values())
    if make is PowerSGD:  # exact after some steps, because the gradients have rank one and two
        for step, tolerance in ((4, 1e-5), (39, 1e-4)):
            for name in ("a", "b", "c", "conv"):
                want = gradient(0, step, name, SHAPES[name])
                torch.testing.assert_close(history[step][name], want, atol=tolerance * float(want.norm()), rtol=0)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("scale", [10.0, 1e-6])
def test_sixteen_bits_neither_overflow_nor_vanish(dtype: Any, scale: float) -> None:
    def gradient(rank: int, step: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        cols = math.prod(shape[1:])
        exact = noise(0, 0, name, (shape[0] if shape else 1, 2)).mm(noise(1, 0, name, (2, cols)))
        return exact.view(shape) * scale * 30

    narrow = train(lambda: WireCast(PowerSGD(2, error_feedback=False), dtype), steps=10, gradient=gradient)
    for name in ("a", "b", "c", "conv"):
        want = gradient(0, 0, name, SHAPES[name])
        assert (narrow[0][0][-1][name] - want).norm() <= 0.02 * want.norm()


@pytest.mark.full
def test_local_residual_stays_bounded_while_the_averaged_one_grows() -> None:
    """The ranks' gradients always differ. A residual against the average sums that difference for ever."""

    def gradient(rank: int, step: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return noise(rank, 0, name, shape)  # every step has this gradient

    def held(residual: Any, steps: int) -> float:
        ranks = train(
            lambda: PowerSGD(1, residual=residual), steps=steps, gradient=gradient, buckets=(("a",),), world=4
        )
        return float(stored(ranks[0][1], "residual")["a"].norm())

    assert held("local", 200) < 1.3 * held("local", 100)
    assert held("averaged", 200) > 1.8 * held("averaged", 100)


@pytest.mark.parametrize("make", [PowerSGD, BatchedPowerSGD])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("feedback", [True, False])
def test_not_finite_passes_through_and_leaves_state_alone(
    make: Callable[..., PowerSGD], bad: float, feedback: bool
) -> None:
    def body(rank: SimulatedRank) -> tuple[bool, list[bool]]:
        engine = rank.engine(make(rank=2, error_feedback=feedback))
        for step in range(3):
            tensors = {n: noise(rank.rank, step, n, SHAPES[n]) for n in ("a", "b")}
            if step == 2 and rank.rank == 1:
                tensors["b"][3, 4] = bad
            bucket = Bucket.from_tensors(tensors)
            engine.submit(bucket)
            assert engine.finish() is None
            if step == 1:
                assert engine.resolve_step()
                before = [(n, f, t.clone()) for n, f, t in engine.state.entries()]
        kept = engine.resolve_step()
        after = list(engine.state.entries())
        same = [torch.equal(t, u) for (*_, t), (*_, u) in zip(before, after, strict=True)]
        assert not kept
        return bool(bucket.view("b").isfinite().any()), same

    for any_finite, same in simulate(2, body):
        assert not any_finite
        assert all(same)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("make", [PowerSGD, BatchedPowerSGD])
def test_other_dtypes(make: Callable[..., PowerSGD], dtype: torch.dtype) -> None:
    wide = train(lambda: make(rank=2), steps=5)
    ranks = train(lambda: make(rank=2), steps=5, dtype=dtype)
    for name in ("a", "conv"):
        got = ranks[0][0][0][name]
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), wide[0][0][0][name], atol=0.03, rtol=0.03)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert {t.dtype for *_, t in ranks[0][1].state.entries()} == {expected}


def test_transposed_storage_is_the_same_problem() -> None:
    """PowerSGD approximates a column-major parameter as the matrix in its memory order."""
    shape, stride = (24, 40), (1, 24)

    def body(rank: SimulatedRank) -> torch.Tensor:
        engine = rank.engine(PowerSGD(2, error_feedback=False))
        layout = BucketLayout([ParamLayout("w", shape, stride, 0)], 960, torch.float32)
        want = noise(0, 0, "w", (24, 2)).mm(noise(1, 0, "w", (2, 40)))
        for _ in range(3):
            bucket = Bucket(layout, torch.empty(960))
            bucket.view("w").copy_(want)
            engine.submit(bucket)
            assert engine.finish() is None
        torch.testing.assert_close(bucket.view("w"), want, atol=1e-4, rtol=1e-4)
        return bucket.storage

    first, second = simulate(2, body)
    assert torch.equal(first, second)


def test_a_higher_rank_starts_q_again() -> None:
    def body(rank: SimulatedRank) -> bool:
        engine = rank.engine(PowerSGD(1))
        for reduction in (PowerSGD(1), PowerSGD(3)):
            other = Engine(reduction, rank.transport, engine.state)
            bucket = Bucket.from_tensors({"a": noise(rank.rank, 0, "a", SHAPES["a"])})
            other.submit(bucket)
            assert other.finish() is None
            other.resolve_step()
        q = engine.state.read("a", "q")
        return q is not None and q.shape == (3, 40)

    assert all(simulate(2, body))


def test_routing_says_why() -> None:
    layout = BucketLayout.of_shapes({**SHAPES, "thin": (100, 2)})
    reasons = PowerSGD(1, start_iter=3).routes(layout, 3)
    assert reasons == {"bias": "1-D", "scalar": "0-d", "thin": "(100+2)*1*2 >= 100*2"}
    assert set(PowerSGD(1, start_iter=3).routes(layout, 2).values()) == {"warm-up until step 3"}


def test_warm_up_is_one_plain_round_and_then_two() -> None:
    layout = BucketLayout.of_shapes(SHAPES)
    reduction = PowerSGD(2, start_iter=5)
    before = reduction.plan(layout, StepContext(world_size=2, step=4))
    after = reduction.plan(layout, StepContext(world_size=2, step=5))
    assert [sum(r.numel for r in stage) for stage in before] == [layout.size]
    matrices = [p for p in layout.params if p.name in ("a", "b", "c", "conv")]
    p = sum(2 * m.matrix_shape[0] for m in matrices)
    q = sum(2 * m.matrix_shape[1] for m in matrices)
    assert [sum(r.numel for r in stage) for stage in after] == [p + 41, q]
    assert [len(stage) for stage in after] == [3, 1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 0),
        ("rank", True),
        ("rank", 1.5),
        ("start_iter", -1),
        ("min_compression_rate", 0),
        ("min_compression_rate", math.inf),
        ("residual", "global"),
        ("error_feedback", 1),
        ("epsilon", -1e-8),
        ("epsilon", math.nan),
        ("seed", -1),
    ],
)
def test_values_out_of_range_are_named(field: str, value: Any) -> None:
    with pytest.raises(HookConfigError, match=f"{field}=.*expected"):
        PowerSGD(**{field: value})


@pytest.mark.parametrize("reduction", [PowerSGD(3, seed=7), BatchedPowerSGD(2, epsilon=1e-8)])
def test_config_builds_the_same_again(reduction: PowerSGD) -> None:
    assert type(reduction)(**reduction.config()).config() == reduction.config()


def test_paper_payload_of_resnet18() -> None:
    """Data per epoch of ResNet-18 on CIFAR-10 (paper, table 3): 1023 MB for SGD, 4.2, 7.5, 14.2 MB at rank 1, 2, 4."""
    layout = BucketLayout.of_shapes(resnet18())
    updates = 1023 / (layout.size * 4 / 2**20)
    for rank, megabytes in ((1, 4.2), (2, 7.5), (4, 14.2)):
        stages = PowerSGD(rank, min_compression_rate=1e-9).plan(layout, StepContext(world_size=16))
        payload = sum(request.payload_bytes for stage in stages for request in stage)
        assert payload / 2**20 * updates == pytest.approx(megabytes, abs=0.06)


def resnet18() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"conv1": (64, 3, 3, 3), "bn1.w": (64,), "bn1.b": (64,)}
    inside = 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            name = f"{stage}.{block}"
            for conv, channels in ((1, inside), (2, width)):
                shapes[f"{name}.conv{conv}"] = (width, channels, 3, 3)
                shapes[f"{name}.bn{conv}.w"] = shapes[f"{name}.bn{conv}.b"] = (width,)
            if inside != width:
                shapes[f"{name}.down"] = (width, inside, 1, 1)
                shapes[f"{name}.down.w"] = shapes[f"{name}.down.b"] = (width,)
            inside = width
    return {**shapes, "fc": (10, 512), "fc.b": (10,)}


def test_a_large_matrix_is_worked_on_in_blocks_on_a_cpu_though_it_was_planned_on_meta() -> None:
    def blocks(rank: SimulatedRank) -> list[int]:
        reduction = PowerSGD(rank=4)
        bucket = Bucket.from_tensors({"w": torch.randn(600, 512)})
        engine = rank.engine(reduction)
        engine.submit(bucket)
        assert engine.finish() is None
        space = reduction._workspace(bucket.layout, bucket)
        matrix = space.in_place(bucket, space._factors)[0]
        return [len(d) for d, _ in matrix.blocks]

    assert simulate(1, blocks) == [[300, 300]]
