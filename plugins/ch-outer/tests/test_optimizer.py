"""The outer optimizer as an optimizer among others: resume, scaling, clipping, failures, refusals."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import commhooks
from ch_core import SimulatedRank, simulate
from ch_outer import (
    FixedRanks,
    OuterOptimizer,
    Schedule,
    diloco,
    muloco,
    nesterov,
    plain_sgd,
    sparseloco,
    streaming_diloco,
)
from commhooks import HookConfigError, Plain, RankMismatchError, StateError

from .outer_kit import BUILDING, adam, alone, batch, by_options, make, same, train, values

pytestmark = pytest.mark.timeout(90)


EXCHANGES = [
    "allreduce",
    "quant8(error_feedback=True, exempt=False)",
    "powersgd(rank=1, min_compression_rate=1, start_iter=0)",
]


@pytest.mark.parametrize("stop", [4, *(pytest.param(stop, marks=pytest.mark.full) for stop in (1, 6, 7, 8, 11))])
@pytest.mark.parametrize("mix", [0.5, "carry"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_it_resumes_to_the_bit_at_any_step(exchange: str, mix: float | str, stop: int) -> None:
    """Steps within a round, at its end, and with exchanges in flight. Saving does not affect a rank that continues."""
    options: dict[str, Any] = {"every": 6, "fragments": 2, "overlap": 3, "mix": mix, "exchange": exchange}

    def body(rank: SimulatedRank, save: bool) -> list[list[torch.Tensor]]:
        model = make()
        optimizer = by_options(adam(model), model, ranks=FixedRanks(transport=rank.transport), **options)
        train(model, optimizer, rank.rank, range(stop))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict())) if save else None
        if saved is not None and exchange != "allreduce" and stop > 4:
            assert any(
                fragment["reducer"]["entries"] for fragment in saved[1]["fragments"]
            )  # a residual exists that could be lost
        train(model, optimizer, rank.rank, range(stop, 15))
        found = [values(model)]
        if saved is not None:
            again = make(seed=5)
            again.load_state_dict(make().state_dict())
            resumed = by_options(adam(again), again, ranks=FixedRanks(transport=rank.transport), **options)
            again.load_state_dict(saved[0])
            resumed.load_state_dict(saved[1])
            assert resumed.count == stop
            train(again, resumed, rank.rank, range(stop, 15))
            found.append(values(again))
        return found

    through = [found[0] for found in simulate(2, lambda rank: body(rank, False))]
    for found, wanted in zip(simulate(2, lambda rank: body(rank, True)), through, strict=True):
        assert same(found[0], wanted)
        assert same(found[1], wanted)


def test_another_number_of_ranks_continues_from_one_rank_s_state() -> None:
    options: dict[str, Any] = {"every": 3, "exchange": "quant8(error_feedback=True, exempt=False)"}

    def save(rank: SimulatedRank) -> tuple[Any, Any]:
        model = make()
        optimizer = by_options(adam(model), model, ranks=FixedRanks(transport=rank.transport), **options)
        train(model, optimizer, rank.rank, range(6))
        return model.state_dict(), optimizer.state_dict()

    weights, state = simulate(2, save)[0]

    def resume(rank: SimulatedRank) -> tuple[int, list[torch.Tensor]]:
        model = make()
        optimizer = by_options(adam(model), model, ranks=FixedRanks(transport=rank.transport), **options)
        model.load_state_dict(weights)
        with pytest.raises(StateError):
            optimizer.load_state_dict(copy.deepcopy(state))
        optimizer.load_state_dict(copy.deepcopy(state), world_change="reset")
        train(model, optimizer, rank.rank, range(6, 9))
        return optimizer.count, values(model)

    (count, first), *others = simulate(4, resume)
    assert count == 9
    assert all(same(first, other) for _, other in others)
    assert not same(first, [t.detach() for t in weights.values()])


def test_a_state_of_something_else_is_refused_and_changes_nothing() -> None:
    model = make()
    optimizer = OuterOptimizer(
        adam(model), model, Schedule(every=2), exchange=Plain(), ranks=FixedRanks(transport=alone())
    )
    train(model, optimizer, 0, range(3))
    saved, before = optimizer.state_dict(), values(model)
    with pytest.raises(StateError, match="not the state of an OuterOptimizer"):
        optimizer.load_state_dict(optimizer.optim.state_dict())
    other = OuterOptimizer(adam(model), model, Schedule(every=3), exchange=Plain(), ranks=FixedRanks(transport=alone()))
    with pytest.raises(StateError, match=r"every=2, .* has every=3, "):
        other.load_state_dict(saved)
    carrying = Schedule(every=2, mix="carry")  # needs each parameter as it was when an exchange under way started
    with pytest.raises(StateError, match=r"mix=0\.0, .* mix='carry'"):
        OuterOptimizer(adam(model), model, carrying, ranks=FixedRanks(transport=alone())).load_state_dict(saved)
    before = values(model)
    small = nn.Linear(6, 2)
    with pytest.raises(StateError, match="differ in"):
        OuterOptimizer(
            adam(small), small, Schedule(every=2), exchange=Plain(), ranks=FixedRanks(transport=alone())
        ).load_state_dict(saved)
    assert same(values(model), before)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)


def test_a_damaged_state_changes_nothing_in_the_middle_of_an_exchange() -> None:
    """The first fragment's residual is loaded before the second's is refused. The load must restore the first."""
    options: dict[str, Any] = {
        "every": 6,
        "fragments": 2,
        "overlap": 3,
        "exchange": "quant8(error_feedback=True, exempt=False)",
    }

    def body(rank: SimulatedRank, disturbed: bool) -> list[torch.Tensor]:
        model = make()
        optimizer = by_options(adam(model), model, ranks=FixedRanks(transport=rank.transport), **options)
        train(model, optimizer, rank.rank, range(7))
        saved = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, rank.rank, range(7, 13))
        if disturbed:
            _, row = next(iter(saved["fragments"][1]["reducer"]["entries"].items()))
            row["residual"] = torch.full((1,), torch.nan)
            with pytest.raises(StateError):
                optimizer.load_state_dict(saved)
        train(model, optimizer, rank.rank, range(13, 22))
        return values(model)

    for found, wanted in zip(simulate(2, lambda r: body(r, True)), simulate(2, lambda r: body(r, False)), strict=True):
        assert same(found, wanted)


def test_a_skipped_step_of_a_scaler_counts_so_that_ranks_stay_together() -> None:
    """One rank overflows and the other does not. Both reach the exchange at the same call."""

    def body(rank: SimulatedRank) -> tuple[int, list[torch.Tensor], float]:
        model = make()
        inner = adam(model)
        optimizer = OuterOptimizer(
            inner, model, Schedule(every=2), exchange=Plain(), ranks=FixedRanks(transport=rank.transport)
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(4):
            optimizer.zero_grad()
            x, y = batch(rank.rank, step)
            loss = (model(x) - y).square().mean() * (torch.inf if rank.rank == 1 and step == 1 else 1.0)
            scaler.scale(loss).backward()
            if step > 1:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        return optimizer.count, values(model), next(iter(inner.state.values()))["step"].item()

    (count, first, steps), (other_count, second, other_steps) = simulate(2, body)
    assert count == other_count == 4
    assert same(first, second)
    assert (steps, other_steps) == (4, 3)


def test_unscaling_inside_is_the_scaler_s_own() -> None:
    found = []
    for wrap in (False, True):
        model = make()
        inner = adam(model)
        optimizer: torch.optim.Optimizer = inner
        if wrap:
            optimizer = OuterOptimizer(
                inner, model, Schedule(every=50), exchange=Plain(), ranks=FixedRanks(transport=alone())
            )
        scaler = torch.amp.GradScaler("cpu", init_scale=3.0)
        for step in range(3):
            optimizer.zero_grad()
            x, y = batch(0, step)
            scaler.scale((model(x) - y).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(values(model))
    assert same(*found)


def test_a_closure_and_several_inner_optimizers() -> None:
    """LBFGS needs a closure. Muon takes matrices, and another optimizer, which steps first, takes the rest."""
    model = make()
    optimizer = OuterOptimizer(
        torch.optim.LBFGS(model.parameters()),
        model,
        Schedule(every=1),
        exchange=Plain(),
        ranks=FixedRanks(transport=alone()),
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        x, y = batch(0, 0)
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    assert optimizer.step(closure).item() < first

    def body(rank: SimulatedRank) -> list[torch.Tensor]:
        model = make()
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01)
        muon = torch.optim.Muon(matrices, lr=0.01)
        optimizer = muloco(muon, model, every=3, exchange=Plain(), transport=rank.transport)
        for step in range(6):
            rest.zero_grad()
            optimizer.zero_grad()
            x, y = batch(rank.rank, step)
            (model(x) - y).square().mean().backward()
            rest.step()
            optimizer.step()
        return values(model)

    assert same(*simulate(2, body))


def test_buffers_are_averaged_or_stay() -> None:
    def body(rank: SimulatedRank, buffers: str) -> tuple[list[float], int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        optimizer = OuterOptimizer(
            adam(model),
            model,
            Schedule(every=2, fragments=2),
            exchange=Plain(),
            buffers=buffers,
            ranks=FixedRanks(transport=rank.transport),
        )
        train(model, optimizer, rank.rank, range(2))
        return model[1].running_mean.tolist(), int(model[1].num_batches_tracked)

    here, there = simulate(2, lambda rank: body(rank, "average"))
    own, other = simulate(2, lambda rank: body(rank, "local"))
    assert here == there == ([(a + b) / 2 for a, b in zip(own[0], other[0], strict=True)], 2) or torch.allclose(
        torch.tensor(here[0]), (torch.tensor(own[0]) + torch.tensor(other[0])) / 2
    )
    assert here[0] == there[0]
    assert own[0] != other[0]


def test_a_failed_exchange_is_made_up_for_by_the_next() -> None:
    """All ranks raise. Start, momentum and parameters stay, and no inner step is lost."""

    class Once(commhooks.Reduction):
        name = "once"
        rounds = 0

        def run(self, bucket: commhooks.Bucket, ctx: commhooks.StepContext) -> commhooks.Stages:
            yield commhooks.AllReduce(bucket.buffer)
            if not bucket.buffer.is_meta:
                self.rounds += 1
                if self.rounds == 2 and ctx.rank == 1:
                    raise ArithmeticError("a cosmic ray")

    def body(rank: SimulatedRank) -> tuple[int, list[torch.Tensor], list[torch.Tensor]]:
        model = make()
        optimizer = OuterOptimizer(
            adam(model),
            model,
            Schedule(every=2),
            exchange=Once(),
            outer=plain_sgd(1.0),
            ranks=FixedRanks(transport=rank.transport),
        )
        failures = 0
        for step in range(6):
            try:
                train(model, optimizer, rank.rank, range(step, step + 1))
            except (ArithmeticError, commhooks.RemoteHookError):
                failures += 1
                with optimizer.global_parameters():
                    at_failure = values(model)
        return failures, values(model), at_failure

    (failures, here, start), (others, there, other_start) = simulate(2, body)
    assert failures == others == 1
    assert same(start, other_start)
    assert same(here, there)
    assert not same(here, start)


def test_refusals_and_ranks_that_differ() -> None:
    model, single = make(), alone()
    inner = adam(model)
    for wrong in (
        {"every": 0}, {"every": 2, "fragments": 3}, {"every": 2, "overlap": 3}, {"every": 2, "mix": 1.5},
        {"every": 2, "overlap": 1, "mix": "keep"},
        {"every": 2, "buffers": "sum"}, {"every": 2, "fragments": [["0.weight"]]}, {"every": 50, "fragments": 7},
    ):  # fmt: skip
        with pytest.raises(HookConfigError):
            by_options(inner, model, ranks=FixedRanks(transport=single), exchange=Plain(), **wrong)
    with pytest.raises(HookConfigError, match="not parameters of the model"):
        OuterOptimizer(inner, make(), Schedule(every=2), exchange=Plain(), ranks=FixedRanks(transport=single))

    def differs(rank: SimulatedRank, seed: int, rate: float) -> str:
        model = make(seed)
        with pytest.raises(RankMismatchError) as caught:
            OuterOptimizer(
                adam(model),
                model,
                Schedule(every=2),
                exchange=Plain(),
                outer=nesterov(rate),
                ranks=FixedRanks(transport=rank.transport),
            )
        return str(caught.value)

    assert "parameters at the start" in simulate(2, lambda r: differs(r, r.rank, 0.7))[0]
    assert "'lr': 0.5" in simulate(2, lambda r: differs(r, 0, 0.5 + r.rank / 4))[1]


def test_bf16_parameters_have_an_fp32_start() -> None:
    def body(rank: SimulatedRank) -> tuple[torch.dtype, list[float]]:
        model = nn.Linear(4, 1, bias=False).to(torch.bfloat16)
        nn.init.ones_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = diloco(inner, model, every=1, exchange=Plain(), outer=plain_sgd(1e-3), transport=rank.transport)
        for _ in range(40):  # steps of 1e-4, which bf16 cannot add to 1
            optimizer.zero_grad()
            model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        return model.weight.dtype, [
            s.item() for f in optimizer.rounds.shared.fragments for s in f.starts["weight"].flatten()
        ]

    for dtype, start in simulate(2, body):
        assert dtype == torch.bfloat16
        assert all(0.9955 < value < 0.9965 for value in start)


def test_the_presets_train_and_the_schedule_tells() -> None:
    def body(rank: SimulatedRank) -> list[float]:
        model = make()
        optimizer = streaming_diloco(
            adam(model),
            model,
            every=8,
            overlap=2,
            exchange="quant8(error_feedback=True, exempt=False)",
            transport=rank.transport,
        )
        losses = []
        for steps in (range(0), range(48)):
            train(model, optimizer, rank.rank, steps)
            with optimizer.global_parameters(), torch.no_grad():
                every = [batch(2, n) for n in range(20)]
                losses.append(sum((model(x) - y).square().mean().item() for x, y in every))
        assert optimizer.stats()["steps"] == 4 * 6 - 1  # the last fragment's last exchange is still in flight
        return losses

    here, there = simulate(2, body)
    assert here == there
    assert here[1] < here[0]


def test_finishing_leaves_all_ranks_the_same_parameters() -> None:
    def body(rank: SimulatedRank) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = make()
        optimizer = streaming_diloco(
            adam(model), model, every=8, overlap=3, exchange=Plain(), outer=plain_sgd(1.0), transport=rank.transport
        )
        train(model, optimizer, rank.rank, range(9))
        before = values(model)
        assert optimizer.under_way == 1  # in flight since step 8, and the exchange of step 6 has just landed
        optimizer.finish()
        assert optimizer.under_way == 0
        with optimizer.global_parameters():
            assert same(values(model), [p.detach() for p in model.parameters()])
        return before, values(model)

    (here_before, here), (there_before, there) = simulate(2, body)
    assert same(here, there)
    assert not same(here_before, there_before)


@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"overlap": 2}, {"overlap": 3, "mix": "carry"}])
@pytest.mark.parametrize("steps", [8, 10])
def test_a_second_finish_changes_nothing(steps: int, options: dict[str, Any]) -> None:
    """The first one has exchanged every move, and a round without moves would repeat the momentum."""

    def body(rank: SimulatedRank) -> bool:
        model, outer = make(), nesterov(0.7, 0.9)
        optimizer = by_options(
            adam(model), model, ranks=FixedRanks(transport=rank.transport), every=4, outer=outer, **options
        )
        train(model, optimizer, rank.rank, range(steps))
        optimizer.finish()
        first, rounds = values(model), optimizer.landed
        optimizer.finish()
        return same(first, values(model)) and optimizer.landed == rounds

    assert simulate(2, body) == [True, True]


def test_finish_after_a_round_leaves_the_model_of_that_round() -> None:
    def body(rank: SimulatedRank) -> bool:
        model = make()
        optimizer = OuterOptimizer(
            adam(model),
            model,
            Schedule(every=4),
            exchange=Plain(),
            outer=nesterov(0.7, 0.9),
            ranks=FixedRanks(transport=rank.transport),
        )
        train(model, optimizer, rank.rank, range(8))
        after = values(model)
        resumed, saved = make(), optimizer.state_dict()
        again = OuterOptimizer(
            adam(resumed),
            resumed,
            Schedule(every=4),
            exchange=Plain(),
            outer=nesterov(0.7, 0.9),
            ranks=FixedRanks(transport=rank.transport),
        )
        resumed.load_state_dict(model.state_dict())
        again.load_state_dict(saved)
        optimizer.finish()
        again.finish()
        return same(after, values(model)) and same(after, values(resumed)) and optimizer.landed == 2

    assert simulate(2, body) == [True, True]


def test_finish_exchanges_moves_that_a_failed_round_left() -> None:
    def body(rank: SimulatedRank) -> list[torch.Tensor]:
        model = make()
        optimizer = OuterOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            Schedule(every=4),
            outer=plain_sgd(1.0),
            ranks=FixedRanks(transport=rank.transport),
        )
        train(model, optimizer, rank.rank, range(3))
        shape = model[0].bias.data
        model[0].bias.data = torch.zeros(1) if rank.rank else shape
        with pytest.raises(commhooks.CommHooksError):
            optimizer.after_step()
        model[0].bias.data = shape
        moved = [p.detach().clone() for p in model.parameters()]
        optimizer.finish()
        return [*moved, *(p.detach().clone() for p in model.parameters())]

    here, there = simulate(2, body)
    count = len(here) // 2
    for number in range(count):
        mean = (here[number] + there[number]) / 2
        assert torch.allclose(here[count + number], mean, atol=1e-6)


def test_sparseloco_is_top_k_with_a_decaying_residual() -> None:
    pytest.importorskip("ch_sparse")

    def body(rank: SimulatedRank) -> tuple[list[torch.Tensor], float]:
        model = make()
        optimizer = sparseloco(adam(model), model, every=4, density=0.2, transport=rank.transport)
        train(model, optimizer, rank.rank, range(12))
        return values(model), optimizer.stats()["compressed_steps"]

    (here, steps), (there, _) = simulate(2, body)
    assert same(here, there)
    assert steps == 3


def change_model(kind: str, model: nn.Module, optimizer: OuterOptimizer) -> None:
    with BUILDING:
        torch.manual_seed(1)
        if kind == "added":
            model.append(nn.Linear(2, 2))
            optimizer.add_param_group({"params": list(model[-1].parameters())})
        elif kind == "replaced":
            nn.utils.parametrizations.weight_norm(model[2])
            optimizer.add_param_group({"params": [p for n, p in model[2].named_parameters() if "original" in n]})
        elif kind == "foreign":
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        else:
            model[4].bias.data = torch.zeros(1)


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["on all ranks", "on one rank"])
@pytest.mark.parametrize("kind", ["added", "replaced", "foreign", "resized"])
def test_a_parameter_that_would_not_be_exchanged_is_an_error_on_all_ranks(kind: str, ranks: tuple[int, ...]) -> None:
    def body(rank: SimulatedRank) -> list[str]:
        model = make()
        model[4].weight.requires_grad_(False)
        optimizer = OuterOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            Schedule(every=2),
            ranks=FixedRanks(transport=rank.transport, timeout=5.0),
        )
        errors = []
        for step in range(4):
            if step == 2 and rank.rank in ranks:
                change_model(kind, model, optimizer)
            try:
                train(model, optimizer, rank.rank, range(step, step + 1))
            except commhooks.CommHooksError as error:
                errors.append(f"{step} {type(error).__name__}")
        with pytest.raises(commhooks.CommHooksError):
            optimizer.finish()
        return errors

    for number, errors in enumerate(simulate(2, body)):
        assert errors == [f"3 {'HookConfigError' if number in ranks else 'RemoteHookError'}"]


class Thawed:
    """A run in which a layer thaws. It keeps the layer's weight of each step, before and after the rounds of the step."""

    def __init__(self, rank: SimulatedRank, at: int | None, steps: int = 8, **schedule: int) -> None:
        self.model = make()
        self.model[4].requires_grad_(False)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = OuterOptimizer(
            inner,
            self.model,
            Schedule(every=4, **schedule),
            outer=plain_sgd(1.0),
            ranks=FixedRanks(transport=rank.transport, timeout=5.0),
        )
        self.before, self.after = list[torch.Tensor](), list[torch.Tensor]()
        self.errors = list[str]()
        inner.register_step_post_hook(lambda *_: self.before.append(values(self.model[4])[0]))
        for step in range(steps):
            if step == at:
                self.model[4].requires_grad_(True)
            try:
                train(self.model, self.optimizer, rank.rank, range(step, step + 1))
            except commhooks.CommHooksError as error:
                self.errors.append(f"{step} {type(error).__name__}: {error}")
            self.after.append(values(self.model[4])[0])


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("at", [1, 3, 4])
def test_parameters_that_all_ranks_thaw_are_exchanged_from_that_round_on(at: int, fragments: int, overlap: int) -> None:
    def body(rank: SimulatedRank) -> Thawed:
        run = Thawed(rank, at, 11, fragments=fragments, overlap=overlap)
        with pytest.raises(StateError, match="Unfreeze them in the same rounds"):
            Thawed(rank, None, 0, fragments=fragments, overlap=overlap).optimizer.load_state_dict(
                run.optimizer.state_dict()
            )
        run.optimizer.finish()
        return run

    here, there = simulate(2, body)
    assert not here.errors and not there.errors
    assert same(values(here.model), values(there.model)) and here.optimizer.stats()["rounds_done"] == 3.0
    first = (3 if at < 4 else 7) + overlap  # step that ends the round of the thaw
    assert not torch.equal(here.before[first], there.before[first])
    assert torch.equal(here.after[first], there.after[first])
    assert torch.allclose(here.after[first], (here.before[first] + there.before[first]) / 2, atol=1e-6)


def test_parameters_that_one_rank_thaws_are_an_error_on_all_ranks_in_the_round() -> None:
    for run in simulate(2, lambda rank: Thawed(rank, 2 if rank.rank == 1 else None, 4)):
        [said] = run.errors
        assert said.startswith("3 RankMismatchError: the ranks have different starts of this round")


def test_an_outer_step_that_fails_on_one_rank_reaches_the_peers_in_the_next_round() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ArithmeticError("a cosmic ray")

    def body(rank: SimulatedRank) -> list[str]:
        model = make()
        optimizer = OuterOptimizer(
            adam(model),
            model,
            Schedule(every=1),
            outer=plain_sgd(1.0),
            ranks=FixedRanks(transport=rank.transport, timeout=5.0),
        )
        errors = []
        for step in range(3):
            if step == 1 and rank.rank == 1:
                optimizer.outer.__class__ = Failing
            try:
                train(model, optimizer, rank.rank, range(step, step + 1))
            except (ArithmeticError, commhooks.CommHooksError) as error:
                errors.append(f"{step} {type(error).__name__}")
        return errors

    assert simulate(2, body) == [["2 RemoteHookError"], ["1 ArithmeticError", "2 StateError"]]
