"""The protocol between an engine and its transport: raw collectives on flat tensors."""

from typing import Protocol, runtime_checkable

import torch

from commhooks.requests import Scope
from commhooks.topology import Nodes, Topology


class Work(Protocol):
    """A collective in flight. If it also has ``is_completed()``, the engine polls it for a short time before it waits."""

    def wait(self, timeout: float | None) -> None:
        """Return when the collective is done.

        Raises:
            HookTimeoutError: it was not done after ``timeout`` seconds.
            TransportError: it failed, because a peer was lost or sizes did not match.
        """


class Transport(Protocol):
    """Asynchronous collectives of one group of ranks, on contiguous tensors.

    ``op`` is ``"sum"`` or ``"max"``. The engine makes means, because it divides before any cast.

    Attributes:
        rank: this rank in the group.
        world_size: number of ranks.
        free: True if the engine may replace an all-reduce on a CPU by other collectives. All ranks must run this engine;
            a peer without a hook could not match the messages.
        elastic: True if rank and world size may change between steps, because members come and go under a manager.
    """

    rank: int
    world_size: int
    free: bool
    elastic: bool

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work: ...

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work: ...

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Work: ...

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str) -> Work: ...

    def abort(self) -> None:
        """Start nothing more. Pending work may never end."""


@runtime_checkable
class LeveledTransport(Protocol):
    """A transport that also carries requests among the ranks of a node, and among the peers of a rank.

    Attributes:
        topology: the nodes; ``None`` until :meth:`open_levels`.
    """

    topology: Topology | None

    def open_levels(self, nodes: Nodes | None, timeout: float | None) -> None:
        """Learn the topology and open the sub-groups. All ranks call it at the same place.

        Args:
            nodes: given by the user; ``None`` to ask the ranks.
            timeout: seconds to wait for a missing rank.

        Raises:
            RankMismatchError, HookConfigError, HookNotSupportedError: see :func:`commhooks.topology.learn`.
        """
        ...

    def scoped(self, scope: Scope) -> Transport:
        """Return the transport among the ranks of a scope."""
        ...
