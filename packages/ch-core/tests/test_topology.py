"""The nodes of a group: reports of the ranks, settings of the user, and refusals."""

import pytest

from ch_core import HookConfigError, HookNotSupportedError, RankMismatchError, Topology
from ch_core.topology import learn, place_key


def told(*texts: str) -> list[bytes]:
    return [f"node of this rank|{text}".encode().ljust(128, b"\0") for text in texts]


def test_torchrun_tells_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GROUP_RANK", raising=False)
    assert place_key().startswith("host ")
    monkeypatch.setenv("GROUP_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert place_key() == "group 3"


def test_ranks_are_grouped_by_key() -> None:
    found = learn(None, 4, lambda mine: told("host a", "host b", "host a", "host b"))
    assert found.nodes == ((0, 2), (1, 3))
    assert (found.node(3), found.place(3), found.peers(2)) == (1, 1, (2, 3))
    assert found.members(1, "node") == (1, 3)
    assert (found.size("all"), found.size("node"), found.size("peers")) == (4, 2, 2)


def test_ranks_that_disagree() -> None:
    with pytest.raises(RankMismatchError, match="Start all ranks with torchrun or none"):
        learn(None, 2, lambda mine: told("host a", "group 1"))
    with pytest.raises(RankMismatchError, match="disagree on their nodes"):
        learn(2, 2, lambda mine: told("given 2", "given 1"))
    with pytest.raises(RankMismatchError, match="different calls"):
        learn(2, 2, lambda mine: [mine, b"x" * 128])


def test_uneven_nodes_are_refused_with_a_fix() -> None:
    with pytest.raises(HookNotSupportedError, match=r"Start the same number of ranks on every node$"):
        Topology.of_keys(["a", "a", "b"])
    with pytest.raises(HookConfigError, match="in one node, once"):
        Topology.given([[0, 1], [1, 2]], 4)
    with pytest.raises(HookConfigError, match="the group has 6"):
        Topology.given([[0, 1], [2, 3]], 6)
    long = [list(range(i, i + 4)) for i in range(0, 400, 4)]
    rows: list[bytes] = []
    learn(long, 400, lambda mine: [mine] * 400 if not rows.append(mine) else [])  # type: ignore[func-returns-value]
    assert len(rows[0]) == 128


def test_bytes_that_leave_a_node() -> None:
    four = Topology.even(4, 2)
    assert four.leaving(0, "all", ring=False) == pytest.approx(2 / 3)
    assert [four.leaving(rank, "all", ring=True) for rank in range(4)] == [0.0, 1.0, 0.0, 1.0]
    assert (four.leaving(0, "peers", ring=True), four.leaving(0, "node", ring=True)) == (1.0, 0.0)
