"""Kills one replica in a run, and checks the consequences."""

from pathlib import Path

from ch_testing.torchft import quorum
from ch_testing.torchft.member import Task

HOOKS = ["allreduce", "bf16_compress", "powersgd(rank=2)", "quant4(error_feedback=True)"]
PLACES = ["first", "p_and_q", "buckets", "steps"]
SIZES = [2, 3, 4]
VICTIM = "beta_1"


def killed_and_restarted(folder: Path, place: str, replicas: int, hook: str) -> quorum.Outcome:
    """Train replicas, kill one at ``place``, and restart it with other weights. All stop at the same step.

    Args:
        folder: receives the logs.
        place: key of :data:`.member.PLACES`.
        replicas: number of replicas.
        hook: expression of the hook.
    """
    with quorum.lighthouse(heartbeat=1.0, join_timeout=0.5) as address:
        tasks = [
            Task(name, str(folder), address, hook, seed=i, replicas=replicas, die=place if name == VICTIM else None)
            for i, name in enumerate(quorum.NAMES[:replicas])
        ]
        return quorum.run(folder, tasks)


def verify(outcome: quorum.Outcome, place: str, replicas: int, hook: str) -> None:
    """Check that survivors lose at most one attempt, the victim heals, and all members are equal at every step."""
    names = quorum.NAMES[:replicas]
    assert outcome.raised() == {}
    assert outcome.codes == dict.fromkeys(names, 0), outcome.last_words()
    assert outcome.killed is not None
    assert len(outcome.survivors()) == replicas - 1
    lost = [outcome.dropped(name) for name in outcome.survivors()]
    assert max(lost) <= 1
    assert place == "steps" or min(lost) == 1, "it was killed in the middle of an attempt of all"
    healed = outcome.reborn()
    assert healed[0]["step"] > outcome.killed["step"], "it begins where the others are, not at step 0"
    all_together(outcome, names)
    shared_steps(outcome, names)
    assert all(r["calls"] == 3 * (i + 1) for i, r in enumerate(outcome.steps[names[0]])), "three buckets"
    if hook.startswith("powersgd"):
        assert all(outcome.steps[name][-1]["compressed"] > 0 for name in names)
        assert healed[-1]["q"] != (0.0).hex()


def all_together(outcome: quorum.Outcome, names: list[str]) -> None:
    """Check that all members contribute to each step from the healed member's first contribution to the agreed stop.

    A member that reads late of the stop commits a few more steps, without the members that have stopped.
    """
    assert outcome.stop is not None
    first = min(r["step"] for r in outcome.reborn() if r["contributed"])
    assert first < outcome.stop
    for name in names:
        committed = outcome.committed(name)
        found = {step: committed[step]["participants"] for step in range(first, outcome.stop + 1)}
        assert set(found.values()) == {len(names)}, (name, found)


def shared_steps(outcome: quorum.Outcome, names: list[str]) -> int:
    """Check that members have equal bits of parameters and Q after each common step. Return the number of common steps."""
    committed = {name: outcome.committed(name) for name in names}
    steps = set.union(*(set(c) for c in committed.values()))
    shared = [step for step in sorted(steps) if sum(step in c for c in committed.values()) > 1]
    assert len(shared) > 10
    for step in shared:
        states = {name: (c[step]["params"], c[step]["q"]) for name, c in committed.items() if step in c}
        assert len(set(states.values())) == 1, (step, states)
    return len(shared)
