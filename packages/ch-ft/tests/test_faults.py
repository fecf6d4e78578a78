"""Real lighthouse, Managers and processes on gloo. One replica is killed with SIGKILL and starts again.

One of 48 cases (4 places, 3 sizes, 4 hooks) runs in the quick set, four in the full set, the others in `nox -s soak`.
"""

import itertools
import time
from pathlib import Path

import pytest

pytest.importorskip("torchft")

from ch_testing.torchft import member, quorum, scenario
from ch_testing.torchft.member import Log, Task

FIRST = ("first", 2, "allreduce")
FULL = {
    FIRST,
    ("p_and_q", 4, "powersgd(rank=2)"),
    ("buckets", 3, "bf16_compress"),
    ("steps", 3, "powersgd(rank=2)"),
    ("p_and_q", 3, "quant4(error_feedback=True)"),
}


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("place", "replicas", "hook"),
    [
        pytest.param(*case, marks=[] if case == FIRST else pytest.mark.full if case in FULL else pytest.mark.soak)
        for case in itertools.product(scenario.PLACES, scenario.SIZES, scenario.HOOKS)
    ],
)
def test_a_killed_replica_costs_one_attempt(tmp_path: Path, place: str, replicas: int, hook: str) -> None:
    scenario.verify(scenario.killed_and_restarted(tmp_path, place, replicas, hook), place, replicas, hook)


def after_the_first(task: Task, log: Log) -> None:
    """Train, but the others begin when the first replica has committed a step. Alone, they would be a quorum of their own."""
    first = Path(task.folder, "alpha_0.jsonl")
    while task.name != "alpha_0" and not any(line.get("committed") for line in quorum.read(first)):
        time.sleep(0.02)
    member.train(task, log)


@pytest.mark.timeout(60)
def test_a_replica_that_joins_late_meets_a_hook_past_its_warm_up(tmp_path: Path) -> None:
    """One replica is at step 500, past ``start_iter``. The new one has never seen a step."""
    hook = "powersgd(rank=2, start_iter=100)"
    with quorum.lighthouse(heartbeat=1.0, join_timeout=0.2) as address:
        tasks = [
            Task("alpha_0", str(tmp_path), address, hook, first_step=500),
            Task("beta_1", str(tmp_path), address, hook, seed=1),
        ]
        outcome = quorum.run(tmp_path, tasks, body=after_the_first)
    assert outcome.codes == {"alpha_0": 0, "beta_1": 0}
    first = next(r for r in outcome.steps["beta_1"] if r["committed"])
    assert first["step"] > 500
    assert outcome.steps["beta_1"][-1]["compressed"] > 0
    assert outcome.dropped("alpha_0") == 0
    committed = {name: outcome.committed(name) for name in outcome.logs}
    shared = set(committed["alpha_0"]) & set(committed["beta_1"])
    assert len(shared) > 5
    for step in shared:
        mine, theirs = committed["alpha_0"][step], committed["beta_1"][step]
        assert (mine["params"], mine["q"]) == (theirs["params"], theirs["q"])
