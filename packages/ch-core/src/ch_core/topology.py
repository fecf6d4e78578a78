"""Topology: which ranks of a group share a node.

A node is a set of ranks with fast links between them. All nodes have the same number of ranks, L. The *place* of a rank is its
position in its node, 0 to L - 1. The *peers* of a rank are the ranks with its place on all nodes, itself included.
"""

import hashlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd

from ch_core.errors import HookConfigError, HookNotSupportedError, RankMismatchError
from ch_core.requests import Scope

Nodes = int | Sequence[Sequence[int]]
"""Ranks per node, for nodes of consecutive ranks; or the ranks of each node."""

PLACE_BYTES = 128
_KIND = "node of this rank"


@dataclass(frozen=True)
class Topology:
    """The nodes of a group of ranks.

    Attributes:
        nodes: ranks of each node in ascending order, counted in the group. Every node has the same number of ranks.

    Raises:
        HookConfigError: the nodes do not hold each rank once.
        HookNotSupportedError: nodes of different sizes.

    Example:
        >>> four = Topology.even(4, 2)
        >>> four, four.place(3), four.peers(3)
        (Topology(nodes=((0, 1), (2, 3))), 1, (1, 3))
    """

    nodes: tuple[tuple[int, ...], ...]
    _where: dict[int, tuple[int, int]] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        # A process group orders its members by their ranks, so places follow that order, too.
        object.__setattr__(self, "nodes", tuple(tuple(sorted(node)) for node in self.nodes))
        where = {rank: (i, place) for i, node in enumerate(self.nodes) for place, rank in enumerate(node)}
        ranks = [rank for node in self.nodes for rank in node]
        if sorted(ranks) != list(range(len(ranks))) or not ranks:
            raise HookConfigError(
                f"nodes={shown(self.nodes)}: every rank of the group from 0 to W - 1 is in one node, once. List the ranks of "
                "each node, such as [[0, 1], [2, 3]], or give the number of ranks per node"
            )
        sizes = [len(node) for node in self.nodes]
        if len(set(sizes)) > 1:
            raise HookNotSupportedError(
                f"the nodes have different numbers of ranks ({_sizes(sizes)}), and the ranks with one place on every node "
                f"reduce together. Start the same number of ranks on every node{_smaller(self.nodes)}"
            )
        object.__setattr__(self, "_where", where)

    @staticmethod
    def even(world_size: int, ranks_per_node: int) -> "Topology":
        """Return nodes of consecutive ranks.

        Raises:
            HookConfigError: ``ranks_per_node`` does not divide ``world_size``.
        """
        if isinstance(ranks_per_node, bool) or ranks_per_node < 1 or world_size % ranks_per_node:
            raise HookConfigError(
                f"nodes={ranks_per_node!r}: {world_size} ranks cannot be cut into nodes of {ranks_per_node!r} ranks. Give a "
                "divisor of the number of ranks, or the ranks of each node"
            )
        starts = range(0, world_size, ranks_per_node)
        return Topology(tuple(tuple(range(start, start + ranks_per_node)) for start in starts))

    @staticmethod
    def given(nodes: Nodes, world_size: int) -> "Topology":
        """Return the topology that a user gives.

        Raises:
            HookConfigError: ``nodes`` does not fit the number of ranks.
        """
        if isinstance(nodes, int):
            return Topology.even(world_size, nodes)
        made = Topology(tuple(tuple(node) for node in nodes))
        if made.world_size != world_size:
            raise HookConfigError(
                f"nodes={shown(nodes)} lists {made.world_size} ranks, and the group has {world_size}. Ranks are counted in the "
                "group that the hook reduces over"
            )
        return made

    @staticmethod
    def of_keys(keys: Sequence[str]) -> "Topology":
        """Return the nodes of ranks that have told their node's key, in rank order.

        >>> Topology.of_keys(["a", "b", "a", "b"]).nodes
        ((0, 2), (1, 3))
        """
        nodes: dict[str, list[int]] = {}
        for rank, key in enumerate(keys):
            nodes.setdefault(key, []).append(rank)
        return Topology(tuple(tuple(node) for node in nodes.values()))

    @property
    def world_size(self) -> int:
        """Number of ranks, W."""
        return len(self._where)

    @property
    def ranks_per_node(self) -> int:
        """Ranks of each node, L."""
        return len(self.nodes[0])

    def node(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return self._where[rank][0]

    def place(self, rank: int) -> int:
        """Return the position of a rank in its node."""
        return self._where[rank][1]

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with this rank's place, in ascending order."""
        place = self.place(rank)
        return tuple(sorted(node[place] for node in self.nodes))

    def members(self, rank: int, scope: Scope) -> tuple[int, ...]:
        """Return the ranks that take part in a request of ``rank`` with this scope."""
        if scope == "node":
            return self.nodes[self.node(rank)]
        return self.peers(rank) if scope == "peers" else tuple(range(self.world_size))

    def size(self, scope: Scope) -> int:
        """Return the number of ranks in a scope."""
        return {"all": self.world_size, "node": self.ranks_per_node, "peers": len(self.nodes)}[scope]

    def leaving(self, rank: int, scope: Scope, *, ring: bool) -> float:
        """Return the share of the bytes that a rank sends in a scope that leaves its node.

        Args:
            rank: that sends.
            scope: of the collective.
            ring: True if the rank sends everything to the next member; False if it sends equal parts to all members.
        """
        if scope != "all":
            return float(scope == "peers")
        if ring:
            return float(self.node(rank) != self.node((rank + 1) % self.world_size))
        return (self.world_size - self.ranks_per_node) / max(self.world_size - 1, 1)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """One rank for each place: the ranks of node 0. They plan every request that some rank plans."""
        return self.nodes[0]

    def __str__(self) -> str:
        return f"{len(self.nodes)} nodes of {self.ranks_per_node} ranks"


def place_key() -> str:
    """Return the key of this process's node: torchrun's group, or the host's name."""
    if "GROUP_RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        return f"group {os.environ['GROUP_RANK']}"
    return f"host {socket.gethostname()}"


def learn(nodes: Nodes | None, world_size: int, gather: Callable[[bytes], list[bytes]]) -> Topology:
    """Return the topology, after a comparison of all ranks.

    Args:
        nodes: given by the user; ``None`` to ask the ranks.
        world_size: number of ranks.
        gather: sends a message of a fixed size, and returns the messages of all ranks in rank order.

    Raises:
        RankMismatchError: ranks have different ``nodes=``, or only some of them were started by torchrun.
        HookConfigError, HookNotSupportedError: see :class:`Topology`.

    Example:
        >>> learn(None, 2, lambda mine: [mine, mine]).ranks_per_node
        2
    """
    mine = place_key() if nodes is None else f"given {nodes!r}"
    rows = [row.rstrip(b"\0").decode(errors="replace") for row in gather(_message(mine))]
    texts = [row.partition("|")[2] for row in rows]
    kinds = {row.partition("|")[0]: rank for rank, row in enumerate(rows)}
    if set(kinds) != {_KIND}:
        raise RankMismatchError(
            "ranks are executing different calls (this rank asks for the nodes of the ranks). Every rank of the group has to "
            "make the same attach() calls, with the same hook"
        )
    words = {text.split(" ")[0]: rank for rank, text in enumerate(texts)}
    if len(words) > 1 or (nodes is not None and len(set(texts)) > 1):
        shown_rows = "; ".join(
            f"rank {rank}: {texts[rank]}" for rank in sorted({texts.index(t) for t in set(texts)})[:8]
        )
        raise RankMismatchError(
            f"the ranks disagree on their nodes ({shown_rows}). Start all ranks with torchrun or none, or give all of them the "
            "same nodes= (ranks per node, or the ranks of each node)"
        )
    return Topology.of_keys(texts) if nodes is None else Topology.given(nodes, world_size)


def _message(text: str) -> bytes:
    made = f"{_KIND}|{text}".encode()
    if len(made) > PLACE_BYTES:  # a long list of nodes: its beginning and a hash
        digest = hashlib.blake2b(made, digest_size=8).hexdigest()
        made = made[: PLACE_BYTES - 18] + b" " + digest.encode()
    return made[:PLACE_BYTES].ljust(PLACE_BYTES, b"\0")


def shown(nodes: object) -> str:
    """Return nodes for an error message, shortened."""
    text = repr(nodes)
    return text if len(text) <= 80 else text[:77] + "..."


def _sizes(sizes: Sequence[int]) -> str:
    some = ", ".join(f"node {i}: {size}" for i, size in enumerate(sizes[:8]))
    return some + (", ..." if len(sizes) > 8 else "")


def _smaller(nodes: Sequence[Sequence[int]]) -> str:
    """Return advice for smaller nodes that fit, if there are any."""
    common = gcd(*(len(node) for node in nodes))
    if common < 2:
        return ""
    cut = [list(node[i : i + common]) for node in nodes for i in range(0, len(node), common)]
    return f", or cut them into smaller ones with nodes={shown(cut)}"
