"""Weighted averages: exact, equal on all ranks, without a message, and lawful with residuals."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import commhooks
from ch_core import Bucket, Engine, Plain, SimulatedGroup, SimulatedRank, SimulatedTransport, simulate
from ch_testing import SimulatedRanks
from ch_testing.conservation import flat, mean_residuals
from ch_testing.gradients import all_ranks, parameters, same_bits
from commhooks import HookConfigError, HookNotSupportedError, Reducer, StateError

HOOKS = (
    "allreduce",
    "bf16_compress",
    "quant4(error_feedback=True)",
    "powersgd(rank=2, min_compression_rate=1)",
    "topk(density=0.1)",
)
# ‖average - weighted mean‖ / ‖weighted mean‖ of one step, of methods that round each number by itself.
CLOSE = {"allreduce": 1e-6, "bf16_compress": 1e-2, "quant8": 5e-2}

fast = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
weights_of_ranks = st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0, 900.0, 1024.0, 5e6]), min_size=2, max_size=4)


def ranks(hook: str, world: int, **options: Any) -> SimulatedRanks:
    return SimulatedRanks(lambda: commhooks.create(hook), world, parameters(), **{"weighted": True, **options})


def weighted_mean(every: Sequence[dict[str, torch.Tensor]], weights: Sequence[float]) -> dict[str, torch.Tensor]:
    """Return sum(n_r g_r) / sum(n_r) in fp64; zeros if all weights are 0."""
    total = sum(weights) or 1.0
    return {
        name: sum(n / total * one[name].double() for n, one in zip(weights, every, strict=True)) for name in every[0]
    }


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    gap = math.fsum(float((found[name].double() - wanted[name]).square().sum()) for name in wanted)
    size = math.fsum(float(one.square().sum()) for one in wanted.values())
    return math.sqrt(gap / size) if size else math.sqrt(gap)


# -- the average


@pytest.mark.parametrize("hook", CLOSE)
@fast
@given(weights=weights_of_ranks)
def test_the_average_is_weighted_and_equal_on_all_ranks(hook: str, weights: list[float]) -> None:
    world = len(weights)
    simulated, every = ranks(hook, world), all_ranks(parameters(), world, 0)
    step = simulated.step(every, weights=weights)
    assert step.errors == [None] * world
    assert distance(step.gradients[0], weighted_mean(every, weights)) <= CLOSE[hook]
    assert not any(same_bits(step.gradients[0], other) for other in step.gradients[1:])


@pytest.mark.parametrize("world", [2, 4])
def test_two_and_four_ranks_equal_one_process_on_the_concatenated_batch(world: int) -> None:
    torch.manual_seed(world)  # a mean of gradients that cancel each other has larger relative errors
    rows = [5, 1, 17, 2][:world]
    x, y = torch.randn(sum(rows), 7), torch.randn(sum(rows))
    layer = torch.nn.Linear(7, 1)

    def gradient(rows: slice, reduction: str) -> dict[str, torch.Tensor]:
        layer.zero_grad()
        torch.nn.functional.mse_loss(layer(x[rows]).squeeze(1), y[rows], reduction=reduction).backward()
        return {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}

    begins = [sum(rows[:rank]) for rank in range(world)]
    parts = [slice(begin, begin + size) for begin, size in zip(begins, rows, strict=True)]
    one = gradient(slice(None), "mean")
    for reduction in ("mean", "sum"):
        simulated = SimulatedRanks(
            lambda: commhooks.create("allreduce"), world, dict(layer.named_parameters()), weighted=True
        )
        step = simulated.step([gradient(part, reduction) for part in parts], weights=rows, of=reduction)  # type: ignore[arg-type]
        for name, wanted in one.items():
            assert (step.gradients[0][name] - wanted).norm() <= 1e-6 * wanted.norm(), reduction


@pytest.mark.parametrize(
    "hook", ["two_level(allreduce)", "two_level(quant8)", "two_level(bf16_compress, inside='bf16')"]
)
def test_two_levels_average_by_weight(hook: str) -> None:
    every, weights = all_ranks(parameters(), 4, 0), [3.0, 0.0, 1000.0, 8.0]
    for rows in ([1.0, 1.0, 1.0, 1.0], weights):
        step = ranks(hook, 4, nodes=2).step(every, weights=rows)
        assert step.errors == [None] * 4
        assert distance(step.gradients[0], weighted_mean(every, rows)) <= (1e-6 if "allreduce" in hook else 5e-2)
        assert not any(same_bits(step.gradients[0], other) for other in step.gradients[1:])


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("world", [2, 3])
def test_weights_that_equal_the_reference_leave_every_bit(hook: str, world: int) -> None:
    with_weights, without = ranks(hook, world), ranks(hook, world, weighted=False)
    for number in range(3):
        every = all_ranks(parameters(), world, number)
        mine = with_weights.step(every, weights=[1024.0] * world)
        plain = without.step(every)
        assert not any(same_bits(a, b) for a, b in zip(mine.gradients, plain.gradients, strict=True))
    assert [h.stats()["weight_skew"] for h in with_weights.handles] == [1.0] * world


@pytest.mark.parametrize("hook", HOOKS)
def test_no_message_is_added_but_one_before_the_first_step(hook: str) -> None:
    with_weights, without = ranks(hook, 2), ranks(hook, 2, weighted=False)
    sent: list[list[int]] = [[], []]
    for number in range(3):
        every = all_ranks(parameters(), 2, number)
        for place, some in enumerate((with_weights, without)):
            before = some.transports[0]._number
            some.step(every, weights=[10, 20] if some is with_weights else ())
            sent[place].append(some.transports[0]._number - before)
    assert sent[0] == [sent[1][0] + 1, *sent[1][1:]]


def test_a_weight_may_be_a_tensor_that_changes_after_the_call() -> None:
    simulated, every = ranks("allreduce", 2), all_ranks(parameters(), 2, 0)
    counts = [torch.tensor([3]), torch.tensor(1)]
    for handle, count in zip(simulated.handles, counts, strict=True):
        handle.weigh(count)
        count.fill_(77)
    step = simulated.step(every)
    assert distance(step.gradients[0], weighted_mean(every, [3, 1])) < 1e-6


def test_weights_of_several_backwards_add_up() -> None:
    """Two micro-batches of 4 and 12 tokens on rank 0, of 8 and 8 on rank 1, as under no_sync()."""
    first, second = all_ranks(parameters(), 2, 0), all_ranks(parameters(), 2, 1)
    counts = [(4, 12), (8, 8)]
    wanted = weighted_mean([*first, *second], [counts[0][0], counts[1][0], counts[0][1], counts[1][1]])
    for of in ("mean", "sum"):
        simulated, window = ranks("allreduce", 2), []
        for rank, (a, b) in enumerate(counts):
            simulated.handles[rank].weigh(a, of)  # type: ignore[arg-type]
            simulated.handles[rank].weigh(b, of)  # type: ignore[arg-type]
            # The script scales each mean by its own n over that of the window. Sums it leaves alone.
            share = (a, b) if of == "sum" else (a / (a + b), b / (a + b))
            window.append({n: share[0] * first[rank][n] + share[1] * second[rank][n] for n in first[rank]})
        step = simulated.step(window)
        assert distance(step.gradients[0], wanted) < 1e-6


def test_averages_that_are_used_early_are_divided_before() -> None:
    def body(rank: SimulatedRank, early: str) -> tuple[list[float], list[float]]:
        engine = rank.engine(Plain())
        engine.set_weighted()
        assert engine.weighing is not None
        seen: list[float] = []
        if early == "callback":
            engine.set_on_reduced(lambda bucket: seen.append(bucket.storage[0].item()))
        for step in range(2):
            engine.weighing.add([1.0, 3.0][rank.rank], "mean")
            buckets = [
                Bucket.from_tensors({n: torch.full((2,), rank.rank + step + 1.0)}, index=i, is_last=i == 1)
                for i, n in enumerate("ab")
            ]
            for bucket in buckets:
                if early == "run":
                    engine.run(bucket)
                    seen.append(bucket.storage[0].item())
                else:
                    engine.submit(bucket)
            assert engine.finish() is None
        return seen, [bucket.storage[0].item() for bucket in buckets]

    for early in ("run", "callback"):
        assert (
            simulate(2, lambda rank, early=early: body(rank, early)) == [([1.75, 1.75, 2.75, 2.75], [2.75, 2.75])] * 2
        )


def test_run_and_submit_in_one_weighted_step_are_refused() -> None:
    def body(rank: SimulatedRank) -> BaseException | None:
        engine = rank.engine(Plain())
        engine.set_weighted()
        assert engine.weighing is not None
        engine.weighing.add(1.0, "mean")
        engine.submit(Bucket.from_tensors({"a": torch.ones(2)}, is_last=False))
        engine.run(Bucket.from_tensors({"b": torch.ones(2)}, index=1))
        return engine.finish()

    assert all(isinstance(error, HookNotSupportedError) for error in simulate(2, body))


# -- residuals


@pytest.mark.parametrize(
    "hook", ["quant4(error_feedback=True)", "powersgd(rank=2, min_compression_rate=1)", "topk(density=0.1)"]
)
@fast
@given(weights=st.lists(weights_of_ranks.filter(lambda w: len(w) == 3 and any(w)), min_size=3, max_size=5))
def test_every_weighted_gradient_is_sent_or_owed(hook: str, weights: list[list[float]]) -> None:
    """Sum over steps of sum(n) times the average, plus W reference times the mean residual, is sum(n g)."""
    simulated, like = ranks(hook, 3), parameters()
    wanted = {name: torch.zeros(one.numel(), dtype=torch.float64) for name, one in like.items()}
    applied = {name: torch.zeros_like(one) for name, one in wanted.items()}
    largest = 0.0
    for number, row in enumerate(weights):
        every = all_ranks(like, 3, number)
        step = simulated.step(every, weights=row)
        for name in like:
            wanted[name] += sum(n * flat(one[name]) for n, one in zip(row, every, strict=True))
            applied[name] += sum(row) * flat(step.gradients[0][name])
        largest = max(largest, sum(row))
    simulated.resolve_step()
    reference = simulated.engines[0].state.versions.reference
    assert reference is not None
    held = [{n: t for n, f, t in e.state.entries() if f == "residual"} for e in simulated.engines]
    owed = mean_residuals(held, like)
    for name, one in wanted.items():
        gaps = [one - applied[name] - 3 * reference * kept for kept in owed[name]]
        assert min(float(gap.norm()) for gap in gaps) <= 2e-5 * largest * len(weights) * math.sqrt(max(1, one.numel()))


def test_residuals_follow_the_reference_exactly() -> None:
    simulated, like = ranks("quant4(error_feedback=True)", 2), parameters()
    for number in range(2):
        simulated.step(all_ranks(like, 2, number), weights=[16, 16 if number == 0 else 512])
    simulated.resolve_step()
    versions = simulated.engines[0].state.versions
    before = {key: entry.decoded().double() for key, entry in versions.committed.items()}
    assert (versions.reference, versions.next_reference) == (16.0, 256.0)
    simulated.step([dict.fromkeys(like) for _ in range(2)], weights=[1, 1])  # no gradient, so residuals stay
    simulated.rollback()
    simulated.resolve_step()
    assert versions.reference == 256.0 and any(bool(one.any()) for one in before.values())
    for key, one in before.items():
        assert torch.equal(versions.committed[key].decoded().double() * 256.0, one * 16.0)


@pytest.mark.parametrize("hook", ["quant4(error_feedback=True)", "powersgd(rank=2, min_compression_rate=1)"])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(hook: str) -> None:
    rows, like = [[16, 48], [4000, 100], [7, 9000], [60, 5]], parameters()
    whole = ranks(hook, 2)
    for number, row in enumerate(rows[:2]):
        whole.step(all_ranks(like, 2, number), weights=row)
    saved, resumed = whole.save(), ranks(hook, 2)
    assert saved[0]["reference"] == 32.0
    resumed.load(saved)
    for number, row in enumerate(rows[2:], 2):
        every = all_ranks(like, 2, number)
        a, b = whole.step(every, weights=row), resumed.step(every, weights=row)
        assert not same_bits(a.gradients[0], b.gradients[0])


class Skips:
    """A judge whose optimizer skips the second step."""

    def __init__(self) -> None:
        self.steps = 0

    def begin_period(self) -> None: ...

    def finish_step(self) -> None:
        self.steps += 1

    def used(self) -> bool:
        return self.steps != 2

    def doubt(self) -> None: ...

    def clock(self) -> int:
        return self.steps - (self.steps > 1)

    def set_clock(self, clock: int) -> None:
        self.steps = clock + (clock > 0)


def weighed(engine: Engine, weight: float | None, number: float) -> float:
    """Return the average of a step in which this rank has the gradient ``number``."""
    assert engine.weighing is not None
    if weight is not None:
        engine.weighing.add(weight)
    bucket = Bucket.from_tensors({"a": torch.full((2,), number)})
    engine.submit(bucket)
    assert engine.finish() is None
    return bucket.storage[0].item()


def test_a_joined_rank_that_presumes_a_skipped_step_keeps_the_reference_of_its_peers() -> None:
    def body(rank: SimulatedRank) -> float:
        engine = rank.engine(Plain())
        engine.set_weighted()
        engine.set_judge(Skips())
        weighed(engine, 1024.0, 1.0)
        engine.set_participating(rank.rank == 0)
        weighed(engine, 16.0, 1.0)  # a short last batch, and rank 1 has none
        commhooks.state_dict(engine.state)
        engine.set_participating(True)
        return weighed(engine, 1024.0, float(rank.rank))

    assert simulate(2, body) == [0.5, 0.5]


def test_a_step_without_a_bucket_takes_the_reference_of_the_last_one() -> None:
    """Rank 0 alone has looked at its state before."""

    def body(rank: SimulatedRank) -> float:
        engine = rank.engine(Plain())
        engine.set_weighted()
        assert engine.weighing is not None
        weighed(engine, 16.0, 1.0)
        weighed(engine, 1024.0, 1.0)
        if rank.rank == 0:
            commhooks.state_dict(engine.state)
        engine.weighing.add(1024.0)
        assert engine.finish(outside=RuntimeError("before the first bucket")) is not None
        return weighed(engine, 1024.0, float(rank.rank))

    assert simulate(2, body) == [0.5, 0.5]


def test_the_reference_follows_weights_that_overflow() -> None:
    def body(rank: SimulatedRank) -> list[float]:
        reduction, every = commhooks.create("powersgd(rank=1, min_compression_rate=0.1)").reduction, []
        assert reduction is not None
        engine = rank.engine(reduction)
        engine.set_weighted()
        assert engine.weighing is not None
        for weight in (1.0, 2.0**20, 2.0**20):
            engine.weighing.add(weight)
            bucket = Bucket.from_tensors({"a": torch.ones(8, 8, dtype=torch.float16)})
            engine.submit(bucket)
            assert engine.finish() is None
            every.append(bucket.storage[0].item())
        return every

    for found in simulate(2, body):
        assert found[0] == pytest.approx(1.0, rel=1e-2) and not math.isfinite(found[1])
        assert found[2] == pytest.approx(1.0, rel=1e-2)


def test_ranks_of_a_new_group_agree_on_a_reference() -> None:
    """Each rank has trained alone, with other weights, or not at all."""

    def body(rank: SimulatedRank) -> float:
        reduction = commhooks.create("quant4(error_feedback=True)").reduction
        assert reduction is not None
        engine = Engine(reduction, SimulatedTransport(SimulatedGroup(1), 0))
        engine.set_weighted()
        for _ in range(rank.rank):  # the first rank is new
            assert engine.weighing is not None
            engine.weighing.add(16.0**rank.rank)
            engine.submit(Bucket.from_tensors({"b": torch.randn(16, 16) + 2.0}))
            assert engine.finish() is None
        versions = engine.state.versions

        def owed() -> list[float]:
            return [
                one.numbers().double().sum().item() * (versions.reference or 0.0) for one in versions.committed.values()
            ]

        engine.move(rank.transport)
        engine.state.step = 2  # of the newest rank
        before = owed()
        found = weighed(engine, 40.0 * 3.0**rank.rank, float(rank.rank))
        assert owed() == before and len(before) == (rank.rank > 0) and all(before)
        return found

    assert simulate(3, body) == pytest.approx([(3.0 + 2 * 9.0) / 13.0] * 3, rel=1e-6)


def test_a_reference_that_no_run_saves_is_refused() -> None:
    simulated = ranks("quant4(error_feedback=True)", 2)
    simulated.step(all_ranks(parameters(), 2, 0), weights=[16, 48])
    for bad in (0.0, 3.0, math.nan, math.inf, "32", 32):
        saved = [{**one, "reference": bad} for one in simulated.save()]
        with pytest.raises(StateError, match="reference is a power of two"):
            simulated.load(saved)


# -- ranks that weigh nothing


@pytest.mark.parametrize("of", ["mean", "sum"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_rank_of_weight_0_sends_its_residual_and_nothing_of_its_gradient(
    hook: str, of: Literal["mean", "sum"]
) -> None:
    like, results = parameters(), []
    for poison in (0.0, math.nan):
        simulated = ranks(hook, 2)
        simulated.step(all_ranks(like, 2, 0), weights=[8, 24], of=of)
        mine, other = all_ranks(like, 2, 1)
        spoilt = {name: torch.full_like(one, poison) for name, one in mine.items()}
        step = simulated.step([spoilt, other], weights=[0, 24], of=of)
        assert step.errors == [None, None]
        results.append(step.gradients[0])
        simulated.resolve_step()
        assert [e.state.step for e in simulated.engines] == [2, 2]
    assert not same_bits(*results)
    assert all(one.isfinite().all() for one in results[0].values())


@pytest.mark.parametrize("hook", HOOKS)
def test_if_all_weigh_0_the_step_is_skipped(hook: str) -> None:
    like, results = parameters(), []
    for skips in (False, True):
        simulated = ranks(hook, 2)
        simulated.step(all_ranks(like, 2, 0), weights=[8, 24])
        if skips:
            step = simulated.step(all_ranks(like, 2, 9), weights=[0, 0])
            assert step.errors == [None, None]
            assert all(not one.any() for found in step.gradients for one in found.values())
            assert simulated.handles[0].stats()["weightless_steps"] == 1.0
        results.append(simulated.step(all_ranks(like, 2, 1), weights=[8, 24]).gradients[0])
        simulated.resolve_step()
        assert [e.state.step for e in simulated.engines] == [2, 2]
    assert not same_bits(*results)


def test_a_joined_rank_weighs_0() -> None:
    simulated, every = ranks("allreduce", 3), all_ranks(parameters(), 3, 0)
    step = simulated.step(every, joined=[2], weights=[1, 2, None])
    assert step.errors == [None] * 3
    assert distance(step.gradients[2], weighted_mean(every[:2], [1, 2])) < 1e-6


# -- errors


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (-1.0, "rank 1 weighs -1"),
        (math.nan, "rank 1 weighs nan"),
        (math.inf, "rank 1 weighs inf"),
        (None, "rank 1 has not called"),
        (1e300, "rank 1 weighs inf"),
    ],
)
def test_a_weight_that_is_not_legal_is_one_error_on_all_ranks(hook: str, weight: float | None, text: str) -> None:
    simulated, like = ranks(hook, 2), parameters()
    for number, second in enumerate((weight, 24)):  # also in the first step, which finds the reference
        step = simulated.step(all_ranks(like, 2, number), weights=[8, second])
        if number == 0:
            assert all(isinstance(e, HookConfigError) and text in str(e) for e in step.errors), step.errors
    assert step.errors == [None, None]  # it is usable
    simulated.resolve_step()
    assert [e.state.step for e in simulated.engines] == [1, 1]
    step = simulated.step(all_ranks(like, 2, 5), weights=[8, weight])
    assert all(isinstance(e, HookConfigError) and text in str(e) for e in step.errors), step.errors


def test_a_rank_that_mixes_means_and_sums_is_an_error_on_all_ranks() -> None:
    simulated = ranks("allreduce", 2)
    simulated.handles[0].weigh(1)
    simulated.handles[0].weigh(1, of="sum")
    simulated.handles[1].weigh(1)
    step = simulated.step(all_ranks(parameters(), 2, 0))
    assert all("rank 0 has called weigh() with of='mean' and with of='sum'" in str(e) for e in step.errors)


@pytest.mark.parametrize("made", [float, torch.tensor])
def test_a_negative_weight_is_not_hidden_by_the_next_backward(made: Any) -> None:
    simulated = ranks("allreduce", 2)
    for first, second in ((-1, 5), (5, -1)):
        simulated.handles[0].weigh(made(first))
        simulated.handles[0].weigh(made(second))
        simulated.handles[1].weigh(1)
        step = simulated.step(all_ranks(parameters(), 2, 0))
        assert all("rank 0 weighs nan" in str(error) for error in step.errors)


def test_no_callback_gets_an_average_that_is_not_known() -> None:
    def body(rank: SimulatedRank) -> tuple[list[Bucket], BaseException | None]:
        engine, seen = rank.engine(Plain()), list[Bucket]()
        engine.set_weighted()
        engine.set_on_reduced(seen.append)
        engine.submit(Bucket.from_tensors({"a": torch.ones(2)}))
        return seen, engine.finish()

    for seen, error in simulate(2, body):
        assert not seen and isinstance(error, HookConfigError)


def test_calls_that_make_no_sense_are_refused_at_once() -> None:
    simulated, plain = ranks("allreduce", 2), ranks("allreduce", 2, weighted=False)
    with pytest.raises(HookConfigError, match="one number"):
        simulated.handles[0].weigh(torch.ones(2))
    with pytest.raises(HookConfigError, match="expected 'mean' or 'sum'"):
        simulated.handles[0].weigh(1, of="total")  # type: ignore[arg-type]
    with pytest.raises(HookNotSupportedError, match=r"attach\(..., weighted=True\)"):
        plain.handles[0].weigh(1)
    with pytest.raises(HookNotSupportedError, match="its own gradient"):
        Reducer("noop", {"w": torch.zeros(2)}, transport=simulated.transports[0], weighted=True)


def test_a_dropped_step_takes_its_weight_with_it_and_not_that_of_the_next() -> None:
    def body(rank: SimulatedRank) -> float:
        engine: Engine = rank.engine(Plain())
        engine.set_weighted()
        assert engine.weighing is not None
        engine.weighing.add(5.0)
        engine.submit(Bucket.from_tensors({"a": torch.ones(2)}, is_last=False))
        engine.weighing.add([1.0, 3.0][rank.rank])  # before the wrapper notices that the backward was interrupted
        engine.abandon()
        return weighed(engine, None, float(rank.rank))

    assert simulate(2, body) == [0.75, 0.75]


def test_fp64_averages_are_exact() -> None:
    def body(rank: SimulatedRank) -> float:
        engine = rank.engine(Plain())
        engine.set_weighted()
        assert engine.weighing is not None
        engine.weighing.add([0.1, 0.7][rank.rank])
        bucket = Bucket.from_tensors({"a": torch.ones(2, dtype=torch.float64)})
        engine.submit(bucket)
        assert engine.finish() is None
        return bucket.storage[0].item()

    assert simulate(2, body) == pytest.approx([1.0, 1.0], rel=1e-14)


def test_figures_of_residuals_do_not_depend_on_the_reference() -> None:
    found = []
    for weights in ([1024.0, 1024.0], [3500.0, 3500.0]):  # the reference stays 1024
        simulated = ranks("quant4(error_feedback=True)", 2)
        simulated.step(all_ranks(parameters(), 2, 0), weights=[1024.0, 1024.0])
        simulated.rollback()
        simulated.step(all_ranks(parameters(), 2, 0), weights=weights)
        stats = simulated.handles[0].stats(detail=True)
        found.append(
            {key: value for key, value in stats.items() if key.startswith(("residual_norm", "relative_error"))}
        )
    assert found[0] and found[1] == pytest.approx(found[0], rel=0.05)


def test_the_report_shows_the_skew() -> None:
    simulated = ranks("quant4(error_feedback=True)", 2)
    simulated.step(all_ranks(parameters(), 2, 0), weights=[1, 3])
    stats = simulated.handles[0].stats()
    assert (stats["weight_skew"], stats["weight_moved"]) == (1.5, 0.25)
    assert "weighted" in str(simulated.handles[0].report())
