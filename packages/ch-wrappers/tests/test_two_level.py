"""Two levels, mostly over simulated ranks: equal bits, conservation, ownership of state, failures and other topologies."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commhooks
from ch_core import SimulatedGroup, SimulatedRank, simulate
from ch_testing import spawn
from ch_testing.conservation import mean_residuals, unaccounted
from ch_testing.simulated_ranks import SimulatedRanks, Step, split
from ch_wrappers.node_partition import Piece, partition
from ch_wrappers.two_level import TwoLevel
from commhooks import (
    Bucket,
    BucketLayout,
    Composite,
    HookConfigError,
    HookNotSupportedError,
    HookResultError,
    Plain,
    Reduction,
    RemoteHookError,
    Stages,
    StepContext,
    Topology,
    TransportError,
)
from commhooks.api.create import as_handle
from commhooks.checkpoint.world_change import merge

LIKE = {
    "up.weight": torch.zeros(40, 30),
    "up.bias": torch.zeros(30),
    "turned": torch.zeros(24, 50).t(),
    "down.weight": torch.zeros(64, 64),
    "scale": torch.zeros(()),
    "norm": torch.zeros(7),
    "cube": torch.zeros(12, 5, 2),
}
FED = ["powersgd(rank=2)", "quant4(error_feedback=True)", "error_feedback(topk(density=0.1, feedback=False))", "sign"]
HOOKS = [
    *FED,
    "allreduce",
    "bf16_compress",
    "quant8",
    "topk(density=0.1)",
    "batched_powersgd",
    "bf16_wrapper(powersgd)",
]


def full_only(*cases: Any) -> list[Any]:
    """Leave cases to the full set; each is a value, or a tuple of them."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=pytest.mark.full) for case in tuples]


def ranks(expr: str, nodes: int, each: int, **options: Any) -> SimulatedRanks:
    return SimulatedRanks(lambda: commhooks.create(expr), nodes * each, LIKE, nodes=each, **options)


def gradients(world: int, seed: int = 0, like: dict[str, torch.Tensor] = LIKE) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(seed)
    return [{n: torch.empty_like(t).normal_(generator=made) for n, t in like.items()} for _ in range(world)]


def equal(step: Step) -> bool:
    first = step.gradients[0]
    return all(torch.equal(first[n], other[n]) for other in step.gradients for n in first)


def means(given: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {n: torch.stack([one[n].double() for one in given]).mean(0) for n in LIKE}


def residuals(some: SimulatedRanks) -> list[dict[str, torch.Tensor]]:
    some.resolve_step()
    entries = [handle.hook_state.entries() for handle in some.handles if handle.hook_state is not None]
    return [{name: t for name, field, t in one if field == "residual"} for one in entries]


class Law:
    """Sums gradients and averages of simulated ranks. Other ranks that load their state may replace these ranks."""

    def __init__(self) -> None:
        self.wanted = {n: torch.zeros(t.shape, dtype=torch.float64) for n, t in LIKE.items()}
        self.applied = {n: torch.zeros(t.shape, dtype=torch.float64) for n, t in LIKE.items()}

    def steps(self, some: SimulatedRanks, count: int, seed: int) -> None:
        for i in range(count):
            given = gradients(some.world_size, seed + i)
            step = some.step(given)
            assert step.errors == [None] * some.world_size
            assert equal(step)
            for n, mean in means(given).items():
                self.wanted[n] += mean
                self.applied[n] += step.gradients[0][n]

    def gap(self, some: SimulatedRanks) -> float:
        owed = mean_residuals(residuals(some), LIKE)
        return max(unaccounted(self.wanted, self.applied, owed).values())


@pytest.mark.parametrize(("nodes", "each"), [(2, 2), *full_only((3, 2), (2, 4), (1, 3), (3, 1))])
@pytest.mark.parametrize("expr", HOOKS)
def test_equal_bits_on_all_ranks(expr: str, nodes: int, each: int) -> None:
    law = Law()
    law.steps(ranks(f"two_level({expr})", nodes, each), 3, 1)


@pytest.mark.parametrize(("nodes", "each"), [(2, 2), *full_only((3, 2), (3, 1))])
@pytest.mark.parametrize("expr", FED)
def test_nothing_is_lost(expr: str, nodes: int, each: int) -> None:
    some, law = ranks(f"two_level({expr})", nodes, each), Law()
    law.steps(some, 5, 3)
    assert law.gap(some) < 1e-4


@pytest.mark.parametrize("inside", ["allreduce", "bf16_compress", "quant8", "quant8(rotation=None)"])
def test_inside_a_node(inside: str) -> None:
    some = ranks(f"two_level(allreduce, inside={inside})", 2, 2)
    given = gradients(4)
    step = some.step(given)
    assert equal(step)
    error = max((step.gradients[0][n] - mean).norm() / mean.norm() for n, mean in means(given).items())
    assert error < {"allreduce": 1e-6, "bf16_compress": 1e-2}.get(inside, 3e-2)
    made = some.handles[0].reduction
    assert made is not None
    assert commhooks.create(repr(made)).reduction.config() == made.config()  # type: ignore[union-attr]


@pytest.mark.parametrize("inside", ["quant8(rotation='hadamard')", "sign(error_feedback=False)", "quant8"])
def test_padding_that_a_hook_inside_makes_numbers_of_reaches_no_average(inside: str) -> None:
    """Rotations, and codes without a zero, decode the padding of a part to numbers, which differ between nodes."""
    like = {"w": torch.zeros(31, 7), "b": torch.zeros(31)}  # 248 numbers: the second part has 120, and 8 of padding
    for hook in ("quant8", "powersgd(rank=2, min_compression_rate=1)", "allreduce"):
        expr = f'two_level({hook}, inside="{inside}")'
        some = SimulatedRanks(lambda expr=expr: commhooks.create(expr), 4, like, nodes=2, buckets=1)
        for number in range(2):
            assert equal(some.step(gradients(4, number, like))), expr


@pytest.mark.parametrize("expr", ["quant4(error_feedback=True)", "sign", *full_only("powersgd(rank=2)", FED[2])])
def test_each_rank_keeps_its_part_of_the_residual(expr: str) -> None:
    def kept(some: SimulatedRanks) -> int:
        some.step(gradients(8))
        some.resolve_step()
        states = [handle.hook_state for handle in some.handles]
        return max(
            sum(e.tensor.numel() for (_, f), e in state.draft.newest().items() if f == "residual")
            for state in states
            if state
        )

    assert kept(ranks(f"two_level({expr})", 2, 4)) < 0.45 * kept(ranks(expr, 2, 4))


CHANGES = [(2, 2, 4, 1), *full_only((4, 1, 2, 2), (2, 2, 1, 4), (2, 4, 2, 2), (2, 2, 3, 2), (3, 2, 2, 4))]


@pytest.mark.parametrize("expr", ["powersgd(rank=2)", "quant4(error_feedback=True)"])
@pytest.mark.parametrize(("nodes", "each", "later", "later_each"), CHANGES)
def test_another_topology_conserves_the_residual(expr: str, nodes: int, each: int, later: int, later_each: int) -> None:
    law = Law()
    before, after = ranks(f"two_level({expr})", nodes, each), ranks(f"two_level({expr})", later, later_each)
    law.steps(before, 3, 5)
    before.resolve_step()
    after.load(before.save())
    assert law.gap(after) < 1e-4
    law.steps(after, 3, 8)
    assert law.gap(after) < 2e-4


@pytest.mark.parametrize("expr", [*FED[:2], *full_only(*FED[2:])])
@pytest.mark.parametrize(("nodes", "each"), [(2, 2), *full_only((3, 2), (3, 1))])
def test_a_resume_on_the_same_nodes_continues_to_the_bit(expr: str, nodes: int, each: int) -> None:
    whole, first, second = (ranks(f"two_level({expr})", nodes, each) for _ in range(3))
    Law().steps(whole, 3, 1)
    Law().steps(first, 3, 1)
    second.load(first.save())
    for seed in (7, 8):
        given = gradients(nodes * each, seed)
        found, wanted = second.step(given), whole.step(given)
        assert all(torch.equal(found.gradients[0][n], wanted.gradients[0][n]) for n in LIKE)


@pytest.mark.full
@pytest.mark.parametrize("expr", ["powersgd(rank=2)", "quant4(error_feedback=True)"])
@pytest.mark.parametrize("first", [True, False])
def test_the_flat_hook_loads_the_state_and_back(expr: str, first: bool) -> None:
    law, forms = Law(), [f"two_level({expr})", expr]
    one, other = (ranks(form, 2, 2) for form in (forms if first else forms[::-1]))
    law.steps(one, 3, 5)
    one.resolve_step()
    other.load(one.save())
    law.steps(other, 3, 8)
    assert law.gap(other) < 2e-4
    merged = ranks(forms[0], 2, 3)
    other.resolve_step()
    merged.load(other.save())
    law.steps(merged, 2, 20)
    assert law.gap(merged) < 3e-4


TOPK = "error_feedback(topk(density=0.2, feedback=False))"


@pytest.mark.parametrize("order", [("powersgd(rank=1)", TOPK), (TOPK, "powersgd(rank=1)")])
def test_a_warmup_between_nodes_hands_its_residual_over(order: tuple[str, str]) -> None:
    law, some = Law(), ranks(f"two_level(warmup({', '.join(order)}, steps=2))", 2, 2)
    law.steps(some, 5, 1)
    assert law.gap(some) < 2e-4


def unused_on(some: SimulatedRanks, law: Law, absent: Sequence[int], seed: int) -> None:
    """Make a step in which some ranks use only one parameter."""
    given = gradients(some.world_size, seed)
    used = [dict.fromkeys(one) | {"norm": one["norm"]} if rank in absent else one for rank, one in enumerate(given)]
    step = some.step(used)
    assert step.errors == [None] * some.world_size
    zeros = [{n: torch.zeros(LIKE[n].shape) if g is None else g for n, g in one.items()} for one in used]
    for n, mean in means(zeros).items():
        law.wanted[n] += mean
        law.applied[n] += step.gradients[0][n]


@pytest.mark.parametrize("order", [("powersgd(rank=1)", TOPK), (TOPK, "powersgd(rank=1)")])
def test_a_residual_is_handed_over_in_a_step_without_its_gradient(order: tuple[str, str]) -> None:
    """The first hook keeps it as a matrix, the second one in the shape of the parameter, or the reverse."""
    law, some = Law(), ranks(f"two_level(warmup({', '.join(order)}, steps=2))", 2, 2)
    law.steps(some, 2, 1)
    unused_on(some, law, (0, 1), 9)
    law.steps(some, 1, 20)
    assert law.gap(some) < 2e-4


@pytest.mark.parametrize("expr", [*FED, "quant4(error_feedback=True, residual='int8')"])
@pytest.mark.parametrize("before", [[[0, 2], [1, 3]], pytest.param(None, marks=pytest.mark.full)])
def test_a_residual_of_other_nodes_waits_for_a_gradient(expr: str, before: list[list[int]] | None) -> None:
    law = Law()
    first, second = (
        SimulatedRanks(lambda: commhooks.create(f"two_level({expr})"), 4, LIKE, nodes=nodes) for nodes in (before, 2)
    )
    law.steps(first, 3, 1)
    first.resolve_step()
    second.load(first.save())
    for seed in (9, 10):
        unused_on(second, law, (0, 1), seed)
    law.steps(second, 1, 20)
    assert law.gap(second) < (0.15 if "int8" in expr else 2e-4)  # 8 bits are rounded in every step


@pytest.mark.parametrize("inner", ["powersgd(rank=1)", "bf16_compress(accumulate='fp32')"])
def test_a_policy_around_gives_all_places_one_number_of_stages(inner: str) -> None:
    """The places own different parameters, so the inner reduction has more rounds on one of them."""
    given, some = gradients(4), ranks(f"policy({{'*bias': allreduce, '*': two_level({inner})}})", 2, 2, buckets=7)
    step = some.step(given)
    assert step.errors == [None] * 4 and equal(step)
    torch.testing.assert_close(step.gradients[0]["up.bias"].double(), means(given)["up.bias"])


@pytest.mark.parametrize("inner", ["powersgd(rank=1)", "randomk(density=0.2)"])
def test_fp32_sums_around_give_all_places_one_number_of_stages(inner: str) -> None:
    """A sum becomes two stages. The place that owns no part has no sums, and takes part in both."""
    like = {"w": torch.zeros(64, 48), "v": torch.zeros(1, 40)}
    given = gradients(4, like=like)
    made = [
        f"bf16_wrapper(two_level({inner}), accumulate='fp32')",
        f"two_level(bf16_wrapper({inner}, accumulate='fp32'))",
    ]
    steps = [SimulatedRanks(lambda e=e: commhooks.create(e), 4, like, nodes=2).step(given) for e in made]  # type: ignore[misc]
    for step in steps:
        assert step.errors == [None] * 4 and equal(step)
    assert all(torch.equal(steps[0].gradients[0][n], steps[1].gradients[0][n]) for n in like)


class SkipsEmptyStages(Composite):
    """Yields no stage in which this rank asks for nothing, so that places plan different numbers of stages."""

    name = "skips"

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        for requests in self.inner.start(bucket, ctx):
            if requests:
                yield requests


def test_places_with_different_numbers_of_stages_are_refused_by_name() -> None:
    like = {"w": torch.zeros(64, 48), "v": torch.zeros(1, 40)}

    def make() -> commhooks.CommHook:
        inner = commhooks.create("powersgd(rank=1)").reduction
        assert inner is not None
        return as_handle(SkipsEmptyStages(TwoLevel(inner)))

    errors = SimulatedRanks(make, 4, like, nodes=2).step(gradients(4, like=like)).errors
    assert {type(error) for error in errors} == {HookResultError}
    assert "same number of stages on all ranks" in str(errors[0])


def test_merge_shares_the_entries_that_one_place_owned() -> None:
    some = ranks("two_level(powersgd(rank=2))", 2, 2)
    some.step(gradients(4))
    some.resolve_step()
    saved = some.save()
    assert saved[0]["fields"] == {"residual": "local", "q": "owned"}
    assert saved[0]["nodes"] == [[0, 1], [2, 3]]
    merged = merge(saved)
    assert merged["fields"]["q"] == "shared"
    assert "nodes" not in merged


def test_a_parameter_that_no_rank_uses_keeps_its_residual() -> None:
    some, law = ranks("two_level(quant4(error_feedback=True))", 2, 2), Law()
    law.steps(some, 2, 1)
    before = mean_residuals(residuals(some), LIKE)["down.weight"][0]
    given = gradients(4, 9)
    step = some.step([one | {"down.weight": None} for one in given])
    assert step.errors == [None] * 4
    after = mean_residuals(residuals(some), LIKE)["down.weight"][0]
    assert torch.equal(before, after)


def test_a_parameter_that_some_ranks_use() -> None:
    some, law = ranks("two_level(powersgd(rank=2))", 2, 2), Law()
    law.steps(some, 2, 1)
    given = gradients(4, 9)
    used = [one if rank == 1 else one | {"down.weight": None} for rank, one in enumerate(given)]
    step = some.step(used)
    assert equal(step)
    zeros = [{n: torch.zeros(LIKE[n].shape) if g is None else g for n, g in one.items()} for one in used]
    for n, mean in means(zeros).items():
        law.wanted[n] += mean
        law.applied[n] += step.gradients[0][n]
    assert law.gap(some) < 1e-4


def test_ranks_that_have_run_out_of_data() -> None:
    some, law = ranks("two_level(quant4(error_feedback=True))", 2, 2), Law()
    law.steps(some, 2, 1)
    given = gradients(4, 9)
    step = some.step(given, joined=(0, 3))
    assert step.errors == [None] * 4
    assert equal(step)


class Breaks(Reduction):
    """Raises on one rank, in one of its stages."""

    name, lossy = "breaks", True

    def __init__(self, rank: int, stage: int) -> None:
        self.where = (rank, stage)

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        for stage in range(3):
            if not bucket.storage.is_meta and (ctx.rank, stage) == self.where:
                raise ZeroDivisionError("between the levels")
            if stage < 2:
                yield commhooks.AllReduce(bucket.storage)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_error_between_the_levels_reaches_all_ranks(stage: int) -> None:
    from ch_wrappers.two_level import TwoLevel

    def body(rank: SimulatedRank) -> list[str]:
        culprit = rank.rank == 1
        engine = rank.engine(TwoLevel(Breaks(0 if culprit else 7, stage)))
        found = []
        for _ in range(2):
            for index in range(2):
                engine.submit(Bucket.from_tensors({f"w{index}": torch.ones(8, 8)}, index=index, is_last=index == 1))
            error = engine.finish()
            found.append(type(error).__name__)
            assert isinstance(error, ZeroDivisionError if culprit else RemoteHookError)
        return found

    assert len(simulate(body=body, nodes=2, ranks_per_node=2)) == 4


@pytest.mark.parametrize("step", [0, 1, 2, 3, 4])
def test_a_rank_that_ends_at_any_collective_is_noticed(step: int) -> None:
    """One rank leaves the step after some collectives. No other rank may wait for ever."""

    def body(rank: SimulatedRank) -> None:
        engine = rank.engine(commhooks.create("two_level(quant4)").reduction)  # type: ignore[arg-type]
        engine.messenger.timeout = 2.0
        if rank.rank == 3 and step == 0:
            raise KeyError("gone")
        engine.submit(Bucket.from_tensors({"w": torch.ones(64, 64)}, is_last=False))
        for _ in range(step if rank.rank == 3 else 5):
            engine.advance()
        if rank.rank == 3:
            raise KeyError("gone")
        engine.finish()

    with pytest.raises((KeyError, commhooks.CommHooksError)):
        simulate(body=body, nodes=2, ranks_per_node=2)


@pytest.mark.parametrize(
    "expr", ["powersgd(rank=2)", pytest.param("powersgd(rank=2, residual='averaged')", marks=pytest.mark.full)]
)
def test_each_place_has_the_results_of_the_flat_hook_on_the_pieces_that_it_owns(expr: str) -> None:
    """The flat hook on all ranks has the same gradients, so warm starts and residuals of owners change nothing."""
    each = 4
    [bucket] = split(LIKE, 1)
    parts = partition(bucket.layout, each, "rows")
    assert len({piece.param.name for part in parts.owned for piece in part}) < sum(map(len, parts.owned)), "none is cut"

    def piece_of(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
        rows = piece.param.to_memory_order(tensor).view(-1)[piece.start : piece.stop]
        return rows.view(-1, piece.param.matrix_shape[1]) if tensor.dim() > 1 else rows

    places = [{piece.param.name: piece_of(LIKE[piece.param.name], piece) for piece in part} for part in parts.owned]
    flat = [SimulatedRanks(lambda: commhooks.create(expr), 8, like, buckets=1) for like in places]
    two = ranks(f"two_level({expr})", 2, each, buckets=1)
    for number in range(5):
        given = gradients(8, number)
        found = two.step(given).gradients[0]
        for part, alone in zip(parts.owned, flat, strict=True):
            step = alone.step([{p.param.name: piece_of(one[p.param.name], p) for p in part} for one in given])
            for piece in part:
                name = piece.param.name
                torch.testing.assert_close(piece_of(found[name], piece), step.gradients[0][name], rtol=1e-3, atol=1e-4)
    assert two.handles[0].stats()["compressed_steps"] > 0


def test_the_hook_between_nodes_gets_the_same_bucket_in_every_step() -> None:
    """It then finds the views that it has cached, as the flat hook does."""

    class Seen(Plain):
        def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
            if bucket.device.type != "meta":
                self.buckets = [*getattr(self, "buckets", []), bucket]
            yield from super().run(bucket, ctx)

    def steps(rank: SimulatedRank) -> list[Bucket]:
        seen = Seen()
        engine = rank.engine(TwoLevel(seen))
        given = Bucket.from_tensors({"w": torch.ones(8, 4), "v": torch.ones(8, 4)})
        for _ in range(3):
            engine.submit(given)
            assert engine.finish() is None
        return seen.buckets

    for found in simulate(body=steps, nodes=2, ranks_per_node=2):
        assert len(found) == 3
        assert all(bucket is found[0] for bucket in found)


def test_one_more_parameter_is_noticed_though_all_messages_have_equal_sizes() -> None:
    """Parts of a node have the size of the largest one. So the padding of a smaller part may hide another parameter."""
    like = {"w": torch.zeros(8, 4), "b": torch.zeros(28)}
    more = like | {"c": torch.zeros(4)}
    found = []
    for odd in range(4):
        some = SimulatedRanks(lambda: commhooks.create("two_level(powersgd(rank=2))"), 4, more, nodes=2, buckets=1)
        errors = some.step(
            [one if rank == odd else {n: one[n] for n in like} for rank, one in enumerate(gradients(4, 1, more))]
        ).errors
        (kind,) = {type(error) for error in errors}
        found.append(kind)
        assert not any(saved["entries"] for saved in some.save()) or kind is TransportError
    # The owner of the smaller part sends its peer more than that one expects, so the transport notices.
    assert sorted(kind.__name__ for kind in found) == ["RankMismatchError"] * 2 + ["TransportError"] * 2


def test_bytes_that_leave_a_node() -> None:
    def out(expr: str) -> float:
        like = {"w": torch.zeros(512, 512)}
        some = SimulatedRanks(lambda: commhooks.create(expr), 8, like, nodes=4)
        some.step(gradients(8, like=like))
        return sum(engine.counters.traffic.between_bytes for engine in some.engines[:4])

    assert out("two_level(quant4)") < 0.36 * out("quant4")


def test_all_places_plan_the_same_number_of_stages() -> None:
    made = commhooks.create("two_level(powersgd(rank=1))").reduction
    assert made is not None
    layout = BucketLayout.of_shapes({"w": (64, 64), "b": (4096,)})  # one rank owns a matrix, the other a vector
    topology = Topology.even(4, 2)
    plans = [made.plan(layout, StepContext(rank, 4, topology=topology)) for rank in range(4)]
    assert {len(plan) for plan in plans} == {4}
    assert plans[0] == plans[2] != plans[1] == plans[3]
    scopes = [[r.scope for r in stage] for stage in plans[0]]
    assert (scopes[0], scopes[-1]) == (["node"], ["node"])


def refusals() -> Iterator[tuple[str, str]]:
    yield "two_level(two_level(quant4))", "two levels already"
    yield "two_level(quant4, inside=sign)", "keeps state"
    yield "two_level(quant4, inside=topk)", "keeps state"
    yield "two_level(quant4, inside=quantize_per_tensor)", "cannot leave each rank a part"
    yield "error_feedback(two_level(bf16_compress))", "does not report"


def test_an_unknown_hook_inside_a_node() -> None:
    with pytest.raises(commhooks.UnknownHookError, match="unknown hook 'fp33'"):
        commhooks.create("two_level(quant4, inside='fp33')")


@pytest.mark.parametrize(("expr", "why"), list(refusals()))
def test_refused_by_name(expr: str, why: str) -> None:
    with pytest.raises(HookConfigError, match=why):
        commhooks.create(expr)


def test_the_user_gives_the_nodes() -> None:
    some = SimulatedRanks(lambda: commhooks.create("two_level(quant4, nodes=2)"), 4, LIKE)
    assert equal(some.step(gradients(4)))
    assert some.engines[0].schedule.topology == Topology.even(4, 2)
    lists = SimulatedRanks(lambda: commhooks.create("two_level(quant4, nodes=[[0, 2], [1, 3]])"), 4, LIKE)
    assert equal(lists.step(gradients(4)))
    with pytest.raises(HookConfigError, match="cannot be cut into nodes of 3"):
        SimulatedGroup(4, 3)
    with pytest.raises(HookNotSupportedError, match=r"node 0: 4, node 1: 2.*nodes=\[\[0, 1\], \[2, 3\], \[4, 5\]\]"):
        Topology.given([[0, 1, 2, 3], [4, 5]], 6)


@pytest.mark.parametrize("expr", ["quant4", "powersgd(rank=2)", "topk(density=0.1)"])
def test_nodes_in_any_order_give_equal_bits(expr: str) -> None:
    """Places of ranks follow the order of ranks, as a process group numbers its members."""
    some = SimulatedRanks(lambda: commhooks.create(f"two_level({expr}, nodes=[[3, 0], [1, 2]])"), 4, LIKE)
    law = Law()
    law.steps(some, 3, 1)
    assert some.engines[3].schedule.topology == Topology(((0, 3), (1, 2)))
    if "powersgd" in expr:
        assert law.gap(some) < 1e-4


def test_a_transport_without_nodes_is_refused() -> None:
    class Bare:
        rank, world_size, free, elastic, link, exchanged = 0, 1, False, True, None, 0

    from ch_core.engine.engine import Engine

    engine = Engine(commhooks.create("two_level(quant4)").reduction, Bare())  # type: ignore[arg-type]
    with pytest.raises(HookNotSupportedError, match="members join and leave"):
        engine.open_levels()


def test_one_rank_per_node_is_the_flat_hook() -> None:
    given = gradients(3)
    flat, two = (ranks(expr, 3, 1).step(given).gradients[0] for expr in ("quant4", "two_level(quant4)"))
    assert all(torch.equal(flat[n], two[n]) for n in LIKE)
    one = ranks("two_level(quant4)", 1, 3).step(given).gradients[0]
    assert all(torch.allclose(one[n].double(), mean, atol=1e-6) for n, mean in means(given).items())


def test_the_plain_hook_needs_no_levels() -> None:
    assert not Plain().levels


# -- real groups


def rounds(rank: int, world: int, link: str | None, groups: int) -> list[float]:
    """Average a matrix, which place 0 owns, and a vector, which place 1 owns. Rank 3 may be in more groups than the others."""
    for _ in range(groups if rank == 3 else 0):
        dist.new_group([3], use_local_synchronization=True)
    hook = "two_level(powersgd(rank=1, start_iter=0), nodes=2)"
    mine = {"w": torch.full((64, 64), float(rank)), "b": torch.full((4000,), float(rank))}
    reducer = commhooks.Reducer(hook, mine, link=link, timeout=15.0)
    return [tensor.mean().item() for _ in range(2) for tensor in reducer.average(mine).values()]


@pytest.mark.gloo
@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("link", "groups"),
    [
        pytest.param("far", 0, id="one place sends fewer messages to far nodes"),
        pytest.param(None, 1, id="one rank is in more groups"),
    ],
)
def test_ranks_that_differ_average_together(link: str | None, groups: int) -> None:
    for averages in spawn(rounds, 4, link, groups, timeout=60, group_timeout=20.0):
        assert averages == pytest.approx([1.5] * 4, rel=1e-3)
