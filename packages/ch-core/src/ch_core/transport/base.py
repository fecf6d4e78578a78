"""The protocol between an engine and its transport: raw collectives on flat tensors."""

import time
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from ch_core.link import Link
from ch_core.requests import Scope
from ch_core.topology import Nodes, Topology


class Work(Protocol):
    """A collective in flight.

    It may have two further methods. ``is_completed()`` lets the engine poll it for a short time before it waits. ``future()``
    returns torch's future of the work, which lets the thread that receives a result decode it.
    """

    def wait(self, timeout: float | None) -> None:
        """Return when the collective is done.

        Raises:
            HookTimeoutError: it was not done after ``timeout`` seconds.
            TransportError: it failed, because a peer was lost or sizes did not match.
        """


def has_ended(work: Work) -> bool:
    """True if a collective writes to its memory no more. False if it cannot tell."""
    completed: Any = getattr(work, "is_completed", None)
    return completed is not None and bool(completed())


class SeveralWorks:
    """Works that carry one message. They count as one work, with one deadline."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self, timeout: float | None) -> None:
        """See :meth:`.Work.wait`."""
        ends = None if timeout is None else time.monotonic() + timeout
        for work in self._works:
            work.wait(None if ends is None else max(ends - time.monotonic(), 0.001))

    def future(self) -> Any:
        """Return a future that completes with the last work, and fails if one of them failed."""
        works: Any = self._works
        return torch.futures.collect_all([work.future() for work in works])

    def is_completed(self) -> bool:
        """True if all works are done."""
        return all(map(has_ended, self._works))


class Transport(Protocol):
    """Asynchronous collectives of one group of ranks, on contiguous tensors.

    ``op`` is ``"sum"`` or ``"max"``. The engine makes means, because it divides before any cast.

    Attributes:
        rank: this rank in the group.
        world_size: number of ranks.
        free: True if the engine may replace an all-reduce on a CPU by other collectives. All ranks must run this engine;
            a peer without a hook could not match the messages.
        elastic: True if rank and world size may change between steps, because members come and go under a manager.
        link: slowest link between two ranks, if the user has named it.
    """

    rank: int
    world_size: int
    free: bool
    elastic: bool
    link: Link | None

    @property
    def exchanged(self) -> int:
        """Exchanges started so far, if only their order tells which message of a peer belongs to which; otherwise 0.

        All ranks must have the same number. Otherwise one of them has dropped a step alone.
        """

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
            RankMismatchError, HookConfigError, HookNotSupportedError: see :func:`ch_core.topology.learn`.
        """
        ...

    def scoped(self, scope: Scope) -> Transport:
        """Return the transport among the ranks of a scope."""
        ...
