"""Warm-up, policies and error feedback over simulated ranks."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ch_core import SimulatedRank, simulate
from ch_core.engine.engine import Engine
from ch_wrappers import WireCast
from ch_wrappers.error_feedback import error_feedback
from ch_wrappers.policy import policy
from ch_wrappers.warmup import warmup
from commhooks import AllGather, AllReduce, Bucket, BucketLayout, HookConfigError, Plain, Reduction, StepContext

pytestmark = pytest.mark.timeout(60)

SHAPES = {"norm.weight": (5,), "up.weight": (7, 6), "up.bias": (7,), "down.weight": (6, 7), "down.bias": (6,)}


class RowMean(Reduction):
    """Sends row means, then their scaled signs, and remembers the means. It is coarse on purpose."""

    name = "row_mean"
    lossy = True
    fields = {"last": "shared"}
    reports_sent = True

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        means = [bucket.matrix(p).mean(1) for p in bucket.params]  # (rows,)
        own = [torch.empty_like(m) for m in means] if ctx.sent is not None else [None] * len(means)
        yield tuple(AllReduce(m, sent=o) for m, o in zip(means, own, strict=True))
        for p, o in zip(bucket.params, own, strict=True):
            if ctx.sent is not None and o is not None:
                ctx.sent.matrix(p).copy_(o.unsqueeze(1).expand(p.matrix_shape))
        for p, m in zip(bucket.params, means, strict=True):
            bucket.matrix(p).copy_(m.unsqueeze(1).expand(p.matrix_shape))
            ctx.write(p.name, "last", m.shape, device=m.device).copy_(m)
        yield AllReduce(ctx.scratch("nothing", (1,), device=bucket.device).zero_(), "sum")


class Gathered(Reduction):
    """Averages by all-gather, with opaque bytes and a state."""

    name = "gathered"
    lossy = True
    collectives = frozenset({"all_gather"})
    fields = {"last": "shared"}

    def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
        everyone = ctx.scratch("all", (ctx.world_size * bucket.buffer.numel(),), device=bucket.device)
        yield AllGather(bucket.buffer, everyone)
        bucket.buffer = everyone.view(ctx.world_size, -1).mean(0)
        for p, view in bucket.views():
            ctx.write(p.name, "last", p.shape, device=bucket.device).copy_(view)


def gradients(rank: int, step: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def mean(world: int, step: int = 0) -> dict[str, torch.Tensor]:
    every = [gradients(r, step) for r in range(world)]
    return {name: torch.stack([g[name] for g in every]).mean(0) for name in SHAPES}


def run_step(engine: Engine, tensors: dict[str, torch.Tensor], cuts: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """Run one step with the parameters in buckets that end at ``cuts``. Return the reduced gradients by name."""
    names = list(tensors)
    edges = [0, *cuts, len(names)]
    parts = [{n: tensors[n] for n in names[a:b]} for a, b in itertools.pairwise(edges)]
    made = [Bucket.from_tensors(part, index=i, is_last=i == len(parts) - 1) for i, part in enumerate(parts)]
    for bucket in made:
        engine.submit(bucket)
    assert engine.finish() is None
    return {p.name: view.clone() for bucket in made for p, view in bucket.views()}


def close(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], *names: str) -> bool:
    return all(torch.allclose(got[n], wanted[n], atol=1e-6) for n in names or wanted)


# -- warm-up


def test_warmup_switches_with_the_committed_steps() -> None:
    def body(rank: SimulatedRank) -> list[tuple[bool, float]]:
        engine = rank.engine(warmup(RowMean(), steps=2))
        seen = []
        for step in range(4):
            before = engine.counters.traffic.payload_bytes
            got = run_step(engine, gradients(rank.rank, step), (2, 4))
            seen.append((close(got, mean(2, step)), engine.counters.traffic.payload_bytes - before))
        engine.resolve_step()
        assert engine.state.read("up.weight", "last") is not None
        return seen

    for seen in simulate(2, body):
        exact, sizes = zip(*seen, strict=True)
        assert exact == (True, True, False, False)
        assert sizes[0] == sizes[1] == 4 * sum(torch.Size(s).numel() for s in SHAPES.values())
        assert sizes[2] == sizes[3] < sizes[0]


def test_a_rolled_back_step_does_not_count_towards_the_warmup() -> None:
    def body(rank: SimulatedRank) -> list[bool]:
        engine, exact = rank.engine(warmup(RowMean(), steps=1)), []
        for step in range(3):
            exact.append(close(run_step(engine, gradients(rank.rank, step)), mean(2, step)))
            if step == 0:
                engine.rollback()
        return exact

    assert simulate(2, body) == [[True, True, False]] * 2


def test_two_warmups_nest_by_absolute_step() -> None:
    fp16, bf16 = WireCast(Plain(), "fp16"), WireCast(Plain(), "bf16")
    nested = warmup(warmup(Plain(), fp16, steps=1), bf16, steps=3)
    layout = BucketLayout.of_shapes(SHAPES)
    wires = [
        nested.plan(layout, StepContext(world_size=2, step=step))[0][0].wire for step in range(4)
    ]  # the plan follows the step
    assert [w and w.dtype for w in wires] == [None, torch.float16, torch.float16, torch.bfloat16]
    assert nested.routes(layout, 0).keys() == SHAPES.keys()
    assert nested.label(layout.params[1], 3) == "bf16_wrapper(allreduce)"


@pytest.mark.parametrize("steps", [-1, 1.5, True])
def test_bad_steps_are_refused(steps: Any) -> None:
    with pytest.raises(HookConfigError, match="expected a number of steps"):
        warmup(Plain(), steps=steps)


def test_foreign_hooks_are_refused() -> None:
    def foreign(state: object, bucket: object) -> None: ...

    for wrap in (warmup, error_feedback, lambda hook: policy({"*": hook})):
        with pytest.raises(HookConfigError, match="made of reductions, and foreign"):
            wrap(foreign)
        with pytest.raises(HookConfigError, match=r"Plain is a class: give Plain\(\)"):
            wrap(Plain)


# -- policy

RULES = {"*.norm*": Plain(), "*.bias": WireCast(Plain(), "bf16"), "*": RowMean()}


def test_the_first_matching_pattern_wins() -> None:
    layout = BucketLayout.of_shapes(SHAPES)
    mixed = policy(RULES)
    named = {p.name: mixed.label(p, 0) for p in layout.params}
    assert named == {
        "norm.weight": "allreduce",
        "up.weight": "row_mean",
        "up.bias": "bf16_wrapper(allreduce)",
        "down.weight": "row_mean",
        "down.bias": "bf16_wrapper(allreduce)",
    }
    assert policy({"*": Plain(), "*.bias": RowMean()}).label(layout.params[2], 0) == "allreduce"


def test_a_policy_adds_no_rounds_and_sends_the_messages_of_each_hook() -> None:
    layout = BucketLayout.of_shapes(SHAPES)
    mixed, ctx = policy(RULES), StepContext(world_size=2)
    weights = layout.select(frozenset({"up.weight", "down.weight"}))
    alone = sum(r.payload_bytes for stage in RowMean().plan(weights, ctx) for r in stage)
    assert mixed.payload(layout, ctx) == {"*.norm*": 5 * 4, "*.bias": 13 * 2, "*": alone}
    assert len(mixed.plan(layout, ctx)) == len(RowMean().plan(weights, ctx)) == 2

    def body(rank: SimulatedRank) -> tuple[float, float]:
        engine = rank.engine(mixed)
        run_step(engine, gradients(rank.rank))
        return engine.counters.traffic.payload_bytes, engine.counters.traffic.rounds

    assert simulate(2, body) == [(20 + 26 + alone, 2)] * 2


def test_a_policy_does_not_depend_on_the_buckets() -> None:
    def body(rank: SimulatedRank, cuts: tuple[int, ...]) -> dict[str, torch.Tensor]:
        engine = rank.engine(policy(RULES))
        for step in range(3):
            got = run_step(engine, gradients(rank.rank, step), cuts)
        engine.resolve_step()
        return got | {f"state {name}": tensor for name, _, tensor in engine.state.entries()}

    layouts = [(), (2, 4), (1, 2, 3, 4)]
    results = [simulate(4, lambda rank, cuts=cuts: body(rank, cuts)) for cuts in layouts]
    for ranks in results:
        for got in ranks:
            assert got.keys() == results[0][0].keys()
            same = [n for n in got if n.startswith("state") or "bias" not in n]
            assert all(torch.equal(got[n], results[0][0][n]) for n in same)
            assert close(got, results[0][0])


def test_parts_of_one_kind_keep_their_state_apart() -> None:
    def body(rank: SimulatedRank) -> None:
        engine = rank.engine(policy({"up.*": RowMean(), "*": RowMean()}))
        got = run_step(engine, gradients(rank.rank))
        engine.resolve_step()
        kept = {name: tensor for name, _, tensor in engine.state.entries()}
        assert kept.keys() == SHAPES.keys()
        assert all(torch.equal(kept[n], got[n].reshape(len(kept[n]), -1)[:, 0]) for n in kept)

    simulate(2, body)


def test_an_unmatched_parameter_is_named() -> None:
    mixed = policy({"*.bias": Plain(), "up.*": Plain()})
    with pytest.raises(HookConfigError, match=r"matches norm\.weight, down\.weight; it has"):
        mixed.check(BucketLayout.of_shapes(SHAPES))
    warmup(policy({"*": Plain()}), steps=1).check(BucketLayout.of_shapes(SHAPES))


def test_a_policy_with_no_rules_is_refused() -> None:
    with pytest.raises(HookConfigError, match="at least one pattern"):
        policy({})


# -- error feedback


def conserved(reduction: Reduction, world: int = 2, steps: int = 6, *, equal: bool = False) -> dict[str, float]:
    """Return |sum applied + mean residual - sum of true averages| / |sum of true averages| for each parameter.

    ``equal`` gives all ranks one gradient. A sum of two equal 16-bit numbers is exact, so only each rank's own rounding
    remains. (The transport also rounds sums. That error belongs to no rank, and no residual holds it.)
    """
    give = (lambda rank, step: gradients(0, step)) if equal else gradients

    def body(rank: SimulatedRank) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine = rank.engine(reduction)
        total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for step in range(steps):
            for name, g in run_step(engine, give(rank.rank, step), (2, 4)).items():
                total[name] += g
        engine.resolve_step()
        return total, {name: t for name, field, t in engine.state.entries() if field == "residual"}

    results = simulate(world, body)
    assert all(torch.equal(results[0][0][n], r[0][n]) for r in results for n in SHAPES)
    lost = {}
    for name in SHAPES:
        every = [give(r, step)[name] for r in range(world) for step in range(steps)]
        truth = torch.stack(every).double().sum(0).float() / world
        kept = [r[1][name] for r in results if name in r[1]]
        now = results[0][0][name] + (torch.stack(kept).mean(0) if kept else 0)
        lost[name] = float((now - truth).norm() / truth.norm())
    return lost


@pytest.mark.parametrize(
    "inner",
    [
        RowMean(),
        policy({"*.bias": Plain(), "*": RowMean()}),
        warmup(RowMean(), steps=3),
    ],
    ids=lambda r: r.name,
)
@pytest.mark.parametrize("world", [2, 3])
def test_error_feedback_loses_nothing(inner: Reduction, world: int) -> None:
    without = conserved(inner, world)
    assert max(without.values()) > 1e-4
    assert max(conserved(error_feedback(inner), world).values()) < 2e-6


@pytest.mark.parametrize(
    "fed",
    [
        error_feedback(WireCast(Plain(), "bf16")),
        error_feedback(WireCast(Plain(), "fp16")),
        error_feedback(WireCast(policy({"*.bias": Plain(), "*": RowMean()}), "bf16")),
        WireCast(error_feedback(WireCast(Plain(), "fp16")), "bf16"),
        error_feedback(WireCast(WireCast(Plain(), "bf16"), "fp16")),
    ],
    ids=lambda r: r.name,
)
def test_the_sent_part_is_counted_after_rounding_on_the_wire(fed: Reduction) -> None:
    inner = fed.inner if hasattr(fed, "inner") else fed
    without = inner.inner if "error_feedback" in inner.name else inner  # type: ignore[attr-defined]
    assert max(conserved(without, equal=True).values()) > 1e-5
    assert max(conserved(fed, equal=True).values()) < 2e-6


def test_exact_parts_keep_a_zero_residual() -> None:
    def body(rank: SimulatedRank) -> None:
        engine = rank.engine(error_feedback(policy({"*.weight": RowMean(), "*": Plain()})))
        run_step(engine, gradients(rank.rank))
        engine.resolve_step()
        residual = {name: t for name, field, t in engine.state.entries() if field == "residual"}
        assert residual["up.bias"].abs().max() == 0
        assert residual["up.weight"].abs().max() > 0.1

    simulate(2, body)


def test_error_feedback_refuses() -> None:
    with pytest.raises(HookConfigError, match="loses nothing"):
        error_feedback(Plain())
    with pytest.raises(HookConfigError, match="does not report its contribution"):
        error_feedback(Gathered())
    with pytest.raises(HookConfigError, match="already keeps a residual"):
        error_feedback(error_feedback(RowMean()))


@pytest.mark.parametrize("reduction", [error_feedback(RowMean()), Gathered()], ids=lambda r: r.name)
def test_a_step_that_is_not_finite_on_one_rank_leaves_every_rank_as_it_was(reduction: Reduction) -> None:
    def body(rank: SimulatedRank) -> None:
        engine = rank.engine(reduction)
        run_step(engine, gradients(rank.rank), (2, 4))
        assert engine.resolve_step()
        before = {(name, field): t.clone() for name, field, t in engine.state.entries()}
        poisoned = gradients(rank.rank, 1)
        if rank.rank == 1:
            poisoned["up.weight"][3, 3] = float("inf")
        got = run_step(engine, poisoned, (2, 4))
        assert not got["up.weight"].isfinite().all()
        assert engine.resolve_step() is False
        after = {(name, field): t for name, field, t in engine.state.entries()}
        assert all(torch.equal(before[key], after[key]) for key in before)

    simulate(2, body)


def test_a_rank_without_input_keeps_its_residual() -> None:
    def body(rank: SimulatedRank) -> None:
        engine = rank.engine(error_feedback(RowMean()))
        run_step(engine, gradients(rank.rank))
        engine.resolve_step()
        before = engine.state.read("up.weight", "residual")
        assert before is not None
        kept = before.clone()
        engine.set_participating(rank.rank == 0)
        zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        run_step(engine, gradients(0, 1) if rank.rank == 0 else zeros)
        engine.resolve_step()
        after = engine.state.read("up.weight", "residual")
        assert after is not None
        assert torch.equal(kept, after) == (rank.rank == 1)

    simulate(2, body)


def test_a_part_without_a_field_does_not_decide_its_power_of_the_loss_scale() -> None:
    class Squares(Reduction):
        name, fields, scaled_fields = "squares", {"residual": "local"}, {"residual": 2}

        def run(self, bucket: Bucket, ctx: StepContext) -> Iterator[Any]:
            yield AllReduce(bucket.buffer)

    class Residual(Squares):
        name, scaled_fields = "residual", {"residual": 1}

    assert warmup(Plain(), Squares(), steps=2).scaled_fields == {"residual": 2}
    assert warmup(Squares(), Plain(), steps=2).scaled_fields == {"residual": 2}
    with pytest.raises(HookConfigError, match="scaled_fields"):
        warmup(Squares(), Residual(), steps=2)
