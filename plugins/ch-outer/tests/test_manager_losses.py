"""Torchft's own Manager on gloo. A process is killed, the others continue, and it returns."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ch_core import SimulatedRank, simulate
from ch_outer import FixedRanks, Members, OuterOptimizer

from .outer_kit import adam, by_options, make, same, train, values

pytest.importorskip("torchft")
ch_ft = pytest.importorskip("ch_ft")

from ch_testing.torchft import quorum, scenario  # noqa: E402 - they need torchft
from ch_testing.torchft.member import Task  # noqa: E402

from .outer_member import rounds  # noqa: E402

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(150)]
QUANT = "quant4(block=16, error_feedback=True, exempt=False)"
VICTIM = "beta_1"


@pytest.mark.parametrize(
    ("place", "replicas", "exchange", "async_quorum"),
    [
        ("inside", 2, QUANT, False),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("inner step", 3, "allreduce", True),
                ("before", 3, QUANT, True),
                ("inside", 3, "allreduce", True),
                ("inside", 4, QUANT, True),
                ("after", 3, QUANT, False),
            )
        ),
    ],
)
def test_survivors_continue_and_lose_one_round_at_most(
    place: str, replicas: int, exchange: str, async_quorum: bool, tmp_path: Path
) -> None:
    """No process rebuilds a group by hand. Start and momentum keep their bits, and the killed process heals."""
    names = quorum.NAMES[:replicas]
    with quorum.lighthouse(heartbeat=0.8, join_timeout=2.0) as address:
        tasks = [
            Task(
                name,
                str(tmp_path),
                address,
                exchange,
                seed=i,
                replicas=replicas,
                die=place if name == VICTIM else None,
                die_step=2,
                group_timeout=5.0,
                async_quorum=async_quorum,
            )
            for i, name in enumerate(names)
        ]
        outcome = quorum.run(tmp_path, tasks, extra=3, limit=90.0, body=rounds)
    assert outcome.raised() == {}
    assert outcome.codes == dict.fromkeys(names, 0), outcome.last_words()
    assert outcome.killed is not None
    assert len(outcome.survivors()) == replicas - 1
    assert max(outcome.dropped(name) for name in outcome.survivors()) <= 1
    assert place != "inside" or min(outcome.dropped(name) for name in outcome.survivors()) == 1
    scenario.all_together(outcome, names)
    by_round: dict[int, set[tuple[str, str]]] = {}
    for name in names:
        for landed, line in outcome.committed(name).items():
            by_round.setdefault(landed, set()).add((line["params"], line["q"]))
            assert line["finite"]
    assert all(len(held) == 1 for held in by_round.values())
    assert outcome.reborn()[0]["step"] > outcome.killed["step"]
    assert outcome.reborn()[0]["contributed"] is not async_quorum


@pytest.mark.soak
@pytest.mark.parametrize("number", range(20))
def test_a_kill_at_a_random_moment_costs_at_most_one_round(number: int, tmp_path: Path) -> None:
    """The victim kills itself up to a second after the second round. KILLS_OUT names a file for a line about each kill."""
    replicas, exchange = 2 + number % 3, ("allreduce", QUANT)[number % 2]
    names = quorum.NAMES[:replicas]
    with quorum.lighthouse(heartbeat=0.8, join_timeout=2.0) as address:
        common: dict[str, Any] = {"replicas": replicas, "die_step": 2, "group_timeout": 5.0}
        tasks = [
            Task(name, str(tmp_path), address, exchange, seed=i, die="random" if name == VICTIM else None, **common)
            for i, name in enumerate(names)
        ]
        outcome = quorum.run(tmp_path, tasks, extra=3, limit=90.0, body=rounds)
    assert outcome.raised() == {} and outcome.killed is not None
    lost = max(outcome.dropped(name) for name in outcome.survivors())
    by_round: dict[int, set[tuple[str, str]]] = {}
    for name in names:
        for landed, line in outcome.committed(name).items():
            by_round.setdefault(landed, set()).add((line["params"], line["q"]))
    equal = all(len(held) == 1 for held in by_round.values())
    if path := os.environ.get("KILLS_OUT"):
        with Path(path).open("a") as file:
            back = outcome.reborn()[0]["step"] if outcome.reborn() else None
            file.write(
                f"{replicas} replicas, {exchange.partition('(')[0]}: killed after round {outcome.killed['step']}, "
                f"rounds lost {lost}, back in round {back}, {len(by_round)} rounds, equal bits {equal}\n"
            )
    assert outcome.codes == dict.fromkeys(names, 0), outcome.last_words()
    assert lost <= 1 and equal
    assert outcome.reborn()[0]["step"] >= outcome.killed["step"]


@pytest.mark.parametrize("exchange", ["allreduce", QUANT])
def test_without_failures_it_equals_training_over_fixed_ranks(exchange: str) -> None:
    options: dict[str, Any] = {"every": 4, "fragments": 2, "overlap": 2, "mix": 0.5, "exchange": exchange}

    def body(optimizer: OuterOptimizer, model: torch.nn.Module, rank: int) -> list[torch.Tensor]:
        train(model, optimizer, rank, range(11))
        optimizer.finish()
        return values(model)

    def fixed(rank: SimulatedRank) -> list[torch.Tensor]:
        model = make()
        return body(
            by_options(adam(model), model, ranks=FixedRanks(transport=rank.transport), **options), model, rank.rank
        )

    def managed(rank: int) -> list[torch.Tensor]:
        model = make()
        with ch_ft.local(lighthouse=address, replica=f"replica_{rank}", min_replicas=2, quorum_timeout=15) as member:
            return body(by_options(adam(model), model, ranks=Members(member.manager), **options), model, rank)

    wanted = simulate(2, fixed)
    with (
        quorum.lighthouse(min_replicas=2, heartbeat=2.0, join_timeout=1.0) as address,
        ThreadPoolExecutor(2) as pool,
    ):
        found = list(pool.map(managed, range(2), timeout=60))
    for one, other in zip(found, wanted, strict=True):
        assert same(one, other)
