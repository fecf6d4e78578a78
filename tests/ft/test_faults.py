"""Real lighthouse, real Managers, real processes, gloo: one replica is killed with SIGKILL and started again.

Four cases run in CI; the full matrix, 4 places x 3 sizes x 3 hooks, is `nox -s ft-matrix`.
"""

from pathlib import Path

import pytest

pytest.importorskip("torchft")

import quorum
from member import Task

HOOKS = ["allreduce", "bf16_compress", "powersgd(rank=2)"]
PLACES = ["first", "p_and_q", "buckets", "steps"]


def check(tmp_path: Path, place: str, replicas: int, hook: str) -> None:
    with quorum.lighthouse(heartbeat=1.0, join_timeout=0.5) as address:
        names = quorum.NAMES[:replicas]
        tasks = [
            Task(name, str(tmp_path), address, hook, seed=i, replicas=replicas, die=place if i == 1 else None)
            for i, name in enumerate(names)
        ]
        outcome = quorum.run(tmp_path, tasks)
    raised = {name: r["error"] for name, lines in outcome.logs.items() for r in lines if r["event"] == "raised"}
    assert raised == {}
    assert outcome.codes == dict.fromkeys(names, 0), "survivors go on, and so does the restarted one"
    assert outcome.killed is not None
    assert len(outcome.survivors()) == replicas - 1
    for name in outcome.survivors():
        assert outcome.dropped(name) <= 1
    healed = [r for r in outcome.steps["beta_1"] if r["t"] > outcome.killed["t"] and r["committed"]]
    assert healed[0]["step"] > outcome.killed["step"], "it begins where the others are, not at step 0"
    assert any(r["contributed"] and r["participants"] == replicas for r in healed), "all together again"
    assert_equal_at_shared_steps(outcome, names)
    assert all(r["calls"] == 3 * (i + 1) for i, r in enumerate(outcome.steps[names[0]])), "three buckets"
    if hook.startswith("powersgd"):
        assert all(outcome.steps[name][-1]["compressed"] > 0 for name in names)
        assert healed[-1]["q"] != (0.0).hex()


def assert_equal_at_shared_steps(outcome: quorum.Outcome, names: list[str]) -> None:
    committed = {name: outcome.committed(name) for name in names}
    steps = set.union(*(set(c) for c in committed.values()))
    shared = [step for step in sorted(steps) if sum(step in c for c in committed.values()) > 1]
    assert len(shared) > 10
    for step in shared:
        states = {name: (c[step]["params"], c[step]["q"]) for name, c in committed.items() if step in c}
        assert len(set(states.values())) == 1, (step, states)


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("place", "replicas", "hook"),
    [
        ("first", 2, "allreduce"),
        ("p_and_q", 4, "powersgd(rank=2)"),
        ("buckets", 3, "bf16_compress"),
        ("steps", 3, "powersgd(rank=2)"),
    ],
)
def test_a_killed_replica_costs_one_attempt(tmp_path: Path, place: str, replicas: int, hook: str) -> None:
    check(tmp_path, place, replicas, hook)


@pytest.mark.soak
@pytest.mark.timeout(120)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("place", PLACES)
def test_matrix(tmp_path: Path, place: str, replicas: int, hook: str) -> None:
    check(tmp_path, place, replicas, hook)


@pytest.mark.timeout(60)
def test_a_replica_that_joins_late_meets_a_hook_past_its_warm_up(tmp_path: Path) -> None:
    """One replica is at step 500, past ``start_iter``; the newcomer has never seen a step."""
    hook = "powersgd(rank=2, start_iter=100)"
    with quorum.lighthouse(heartbeat=1.0, join_timeout=0.2) as address:
        tasks = [
            Task("alpha_0", str(tmp_path), address, hook, first_step=500),
            Task("beta_1", str(tmp_path), address, hook, seed=1),
        ]
        outcome = quorum.run(tmp_path, tasks)
    assert outcome.codes == {"alpha_0": 0, "beta_1": 0}
    first = next(r for r in outcome.steps["beta_1"] if r["committed"])
    assert first["step"] > 500
    assert outcome.steps["beta_1"][-1]["compressed"] > 0
    assert outcome.dropped("alpha_0") == 0
    committed = {name: outcome.committed(name) for name in outcome.logs}
    shared = set(committed["alpha_0"]) & set(committed["beta_1"])
    assert len(shared) > 5
    for step in shared:
        assert [committed[n][step][k] for n in committed for k in ("params", "q")][::2].count(
            committed["alpha_0"][step]["params"]
        ) == 2
        assert committed["alpha_0"][step]["q"] == committed["beta_1"][step]["q"]
