"""The members of a round compare their fingerprints once."""

from ch_testing import SimulatedCluster, SimulatedManager

from .test_replica_groups import COLLECTIVES, POWERSGD, Member, batch, one_rank

__all__ = ["one_rank"]  # a fixture


def test_a_backward_under_fsdp2_compares_once() -> None:
    """The code that runs a bucket at once also submits it. Both places make sure that members have agreed."""
    seen: list[int] = []

    def body(manager: SimulatedManager) -> None:
        member = Member(manager, POWERSGD)
        manager.start_quorum()
        member.model(batch(manager.name, 0)).square().mean().backward()
        manager.should_commit()

    def count(manager: SimulatedManager, n: int) -> None:
        if manager.name == "a":
            seen.append(n)

    with SimulatedCluster() as cluster:
        cluster.on_collective = count
        cluster.run({"a": body, "b": body})
    assert len(seen) == COLLECTIVES
