"""FSDP2 inside replica groups, torchft's real Manager between them: a replica is killed with SIGKILL and started again."""

import threading
from pathlib import Path

import pytest
import torch.distributed as dist

import ch_ft
import commhooks

pytest.importorskip("torchft")
pytest.importorskip("ch_fsdp")

from ch_ft.testing import member, quorum, scenario
from ch_ft.testing.member import Task

HOOK = "powersgd(rank=2)"
NAMES = quorum.NAMES[:2]
BUILDING = threading.Lock()  # members are threads here; torch makes meshes on one at a time


@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", ["p_and_q", "steps"])
def test_a_killed_group_of_one_rank_costs_one_attempt(tmp_path: Path, place: str) -> None:
    """Before it dies, after, and when it is back, all have equal parameters and Q; alone, the survivor goes on rightly."""
    with quorum.lighthouse(heartbeat=1.0, join_timeout=0.5) as address:
        tasks = [
            Task(name, str(tmp_path), address, HOOK, "fsdp", die=place if name == scenario.VICTIM else None, replicas=2)
            for name in NAMES
        ]
        outcome = quorum.run(tmp_path, tasks, limit=90)
    scenario.verify(outcome, place, 2, HOOK)
    assert outcome.killed is not None
    survivor, death = outcome.committed(NAMES[0]), outcome.killed["step"]
    back = min(r["step"] for r in outcome.reborn() if r["contributed"])
    assert back > death + 1
    expected = replay(outcome, back - 1)
    for step in range(1, back):
        assert survivor[step]["params"] == expected[step], step


def replay(outcome: quorum.Outcome, last: int) -> dict[int, str]:
    """The same contributions to the same steps over a simulated manager, where nobody dies: parameters after each."""
    born = min((r["t"] for r in outcome.reborn()), default=float("inf"))
    records = {name: {s: r for s, r in outcome.committed(name).items() if r["t"] < born} for name in NAMES}
    records[NAMES[0]] = outcome.committed(NAMES[0])

    def body(manager: ch_ft.SimulatedManager) -> dict[int, str]:
        with BUILDING:
            module = member.sharded(member.net(0))
            commhooks.attach(module, HOOK, manager=manager)
        optimizer, found = ch_ft.OptimizerWrapper(manager, member.sgd(module)), {}
        while (step := manager.current_step()) < last:
            there = records[manager.name].get(step + 1, {"contributed": False})["contributed"]
            manager.is_participating = lambda there=there: there  # type: ignore[method-assign]
            optimizer.zero_grad()
            module(member.batch(manager.name, step)).pow(2).mean().backward()
            assert optimizer.step()
            found[step + 1] = member.checksum(module.parameters())
        return found

    try:
        with ch_ft.SimulatedCluster() as cluster:
            found: dict[int, str] = cluster.run(dict.fromkeys(NAMES, body))[NAMES[0]]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return found
