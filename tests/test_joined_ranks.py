"""A joined rank has run out of data. It sends zeros, and its residual stays for its next step."""

import pytest
import torch

import commhooks
from ch_testing import SimulatedRanks
from ch_testing.gradients import all_ranks, distance

EXPRESSIONS = [
    "powersgd(rank=1)",
    "batched_powersgd(rank=1)",
    "error_feedback(bf16_compress)",
    "quant8(error_feedback=True)",
    "topk(density=0.1)",
    "randomk(density=0.1)",
]
LIKE = {"a.weight": torch.zeros(40, 30), "b.weight": torch.zeros(40, 30), "c.weight": torch.zeros(64, 64)}


def residuals(ranks: SimulatedRanks, rank: int) -> dict[str, torch.Tensor]:
    rows = ranks.save()[rank]["entries"]
    return {name: row["residual"].double().reshape(-1) for name, row in rows.items() if "residual" in row}


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_the_average_holds_only_the_others_residual(expr: str) -> None:
    ranks = SimulatedRanks(lambda: commhooks.create(expr), 2, LIKE)
    for step in range(3):
        assert not any(ranks.step(all_ranks(LIKE, 2, step)).errors)
    before = [residuals(ranks, rank) for rank in range(2)]
    assert all(before)
    arrived = {name: torch.zeros(value.numel(), dtype=torch.float64) for name, value in before[0].items()}
    for _ in range(20):
        result = ranks.step([LIKE, LIKE], joined=[1])
        for name, total in arrived.items():
            total += result.gradients[0][name].double().reshape(-1)
    after = [residuals(ranks, rank) for rank in range(2)]
    if "quant8" not in expr:  # its joined rank still owns a part of the average, and keeps the error of its rounding
        for name, value in before[1].items():
            assert torch.equal(after[1][name], value), f"the residual of {name} on the joined rank has changed"
    sent = {n: sum(before[rank][n] - after[rank][n] for rank in range(2)) / 2 for n in arrived}
    assert distance(arrived, sent) < (2e-2 if "bf16" in expr else 1e-5)


@pytest.mark.parametrize("situation", ["joined", "unused by one", "unused by all"])
@pytest.mark.parametrize("expr", ["powersgd(rank=1, residual='averaged')", "batched_powersgd(rank=1)"])
def test_every_rank_owes_its_share_of_the_error_of_an_applied_average(expr: str, situation: str) -> None:
    ranks = SimulatedRanks(lambda: commhooks.create(expr), 2, LIKE)
    wanted = {name: torch.zeros(value.numel(), dtype=torch.float64) for name, value in LIKE.items()}
    applied = {name: value.clone() for name, value in wanted.items()}
    for step in range(4):
        given: list[dict[str, torch.Tensor | None]] = [dict(one) for one in all_ranks(LIKE, 2, step)]
        left = [1] if situation == "joined" and step else []
        if step % 2 and situation != "joined":
            for one in given[1:] if situation == "unused by one" else given:
                one["b.weight"] = None
        result = ranks.step(given, left)
        for name in LIKE:
            found = [one[name] for rank, one in enumerate(given) if rank not in left]
            there = [one.double().reshape(-1) for one in found if one is not None]
            for one in there:
                wanted[name] += one / 2
            if there:  # DDP drops the average of a parameter that no rank has used
                applied[name] += result.gradients[0][name].double().reshape(-1)
    owed = [residuals(ranks, rank) for rank in range(2)]
    for name, total in wanted.items():
        gap = total - applied[name] - (owed[0][name] + owed[1][name]) / 2
        assert float(gap.norm()) < 1e-4 * float(total.norm()), name
