"""Simulates N ranks in one process, with the same engine over a transport of threads.

A collective happens when all ranks have asked for it. Ranks add in rank order in the dtype of the tensor, as real
collectives do. Ranks that ask for different collectives get a typed error. If a rank never asks, its peers get a time-out.

Ranks take turns. One rank runs until it waits for a collective that is not done. If all threads ran at once, they would pass
Python's lock around at every tensor operation, and four ranks would take several times as long.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from ch_core.engine.engine import Engine
from ch_core.engine.schedule import TUNED, CpuTuning
from ch_core.errors import HookTimeoutError, TransportError
from ch_core.link import Link
from ch_core.reduction import Reduction
from ch_core.requests import Scope
from ch_core.state import HookState
from ch_core.topology import Nodes, Topology
from ch_core.transport.base import Work

__all__ = ["SimulatedGroup", "SimulatedRank", "SimulatedTransport", "perform", "simulate", "together"]

T = TypeVar("T")


@dataclass(slots=True)
class _Meeting:
    """One collective: the tensors of each rank so far, and its end."""

    posts: dict[int, tuple[tuple[object, ...], tuple[torch.Tensor, ...]]] = field(default_factory=dict)
    done: bool = False
    error: str | None = None


class SimulatedGroup:
    """A group of simulated ranks.

    Args:
        world_size: number of ranks.
        nodes: ranks per node, or the ranks of each node; ``None`` for one rank per node.
    """

    def __init__(self, world_size: int, nodes: Nodes | None = None) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.topology = Topology.given(1 if nodes is None else nodes, world_size)
        self.changed = threading.Condition()
        self.meetings: dict[tuple[Scope, tuple[int, ...], int], _Meeting] = {}  # by scope, members and number
        self.aborted: str | None = None
        self._turn = threading.Lock()
        self._running: int | None = None  # the rank whose turn it is

    @contextmanager
    def turn(self, rank: int) -> Iterator[None]:
        """Run this rank alone until it waits for a collective."""
        with self._turn:
            self._running = rank
            try:
                yield
            finally:
                self._running = None

    @contextmanager
    def waiting(self, rank: int) -> Iterator[None]:
        """Let another rank run while this one waits for it. Without turns it does nothing."""
        mine = self._running == rank
        if mine:
            self._running = None
            self._turn.release()
        try:
            yield
        finally:
            if mine:
                self._turn.acquire()
                self._running = rank

    def post(
        self,
        rank: int,
        scope: Scope,
        members: tuple[int, ...],
        number: int,
        key: tuple[object, ...],
        tensors: tuple[torch.Tensor, ...],
    ) -> _Meeting:
        """Bring a rank's tensors to a collective of some ranks. The last one carries it out."""
        with self.changed:
            meeting = self.meetings.setdefault((scope, members, number), _Meeting())
            meeting.posts[rank] = (key, tensors)
            if len(meeting.posts) == len(members):
                del self.meetings[scope, members, number]
                self._carry_out(meeting)
                self.changed.notify_all()
            return meeting

    def abort(self, why: str) -> None:
        """End every wait of every rank with a TransportError."""
        with self.changed:
            self.aborted = self.aborted or why
            self.changed.notify_all()

    def _carry_out(self, meeting: _Meeting) -> None:
        keys = {rank: key for rank, (key, _) in sorted(meeting.posts.items())}
        if len(set(keys.values())) > 1:
            meeting.error = (
                f"the ranks asked for different collectives: {keys}. All ranks must ask for the same, in one order"
            )
        else:
            key = next(iter(keys.values()))
            kind, op = str(key[0]), str(key[1])
            perform(kind, op, [meeting.posts[r][1] for r in sorted(meeting.posts)])
        meeting.done = True


def perform(kind: str, op: str, ranks: list[tuple[torch.Tensor, ...]]) -> None:
    """Carry out one collective on the tensors of all ranks."""
    world = len(ranks)
    if kind == "all_reduce":
        total = _reduce(op, [t for (t,) in ranks])
        for (tensor,) in ranks:
            tensor.copy_(total)
    elif kind == "all_gather":
        everything = torch.cat([source.reshape(-1) for _, source in ranks])
        for output, _ in ranks:
            output.view(-1).copy_(everything)
    elif kind == "all_to_all":
        parts = [source.clone().view(world, -1) for _, source in ranks]
        for r, (output, _) in enumerate(ranks):
            output.view(world, -1).copy_(torch.stack([p[r] for p in parts]))
    else:
        total = _reduce(op, [source for _, source in ranks]).view(world, -1)
        for r, (output, _) in enumerate(ranks):
            output.view(-1).copy_(total[r])


def _reduce(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = torch.maximum(total, tensor) if op == "max" else total.add_(tensor)
    return total


class _SimulatedWork:
    def __init__(
        self, group: SimulatedGroup, rank: int, members: tuple[int, ...], meeting: _Meeting, what: str
    ) -> None:
        self._group, self._rank, self._members, self._meeting, self._what = group, rank, members, meeting, what

    def wait(self, timeout: float | None) -> None:
        group, meeting = self._group, self._meeting
        if not meeting.done:
            with group.waiting(self._rank), group.changed:
                group.changed.wait_for(lambda: meeting.done or group.aborted is not None, timeout)
        with group.changed:
            if meeting.error is not None:
                raise TransportError(meeting.error)
            if not meeting.done:
                if group.aborted is not None:
                    raise TransportError(f"{self._what}: {group.aborted}")
                absent = sorted(set(self._members) - set(meeting.posts))
                raise HookTimeoutError(f"{self._what}: ranks {absent} did not take part within {timeout:g} s")


class SimulatedTransport:
    """The transport of one rank of a :class:`SimulatedGroup`.

    Args:
        group: the group.
        rank: of the group.
        scope: ranks that take part in collectives.
    """

    free = False
    elastic = False
    link: Link | None = None
    exchanged = 0

    def __init__(self, group: SimulatedGroup, rank: int, scope: Scope = "all") -> None:
        self.group = group
        self.members = group.topology.members(rank, scope)
        self.rank, self.world_size = self.members.index(rank), len(self.members)
        self.topology: Topology | None = group.topology
        self._scope, self._number = scope, 0
        self._scoped: dict[Scope, SimulatedTransport] = {scope: self}

    def open_levels(self, nodes: Nodes | None, timeout: float | None) -> None:
        """See :meth:`.LeveledTransport.open_levels`. The simulation knows its nodes, unless the user gives others."""
        if nodes is not None:
            self.group.topology = self.topology = Topology.given(nodes, self.world_size)

    def scoped(self, scope: Scope) -> "SimulatedTransport":
        """Return the transport among the ranks of a scope."""
        if scope not in self._scoped:
            self._scoped[scope] = type(self)(self.group, self.rank, scope)
        return self._scoped[scope]

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work:
        return self._post("all_reduce", op, tensor)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        return self._post("all_gather", "", output, input)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        return self._post("all_to_all", "", output, input)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str) -> Work:
        return self._post("reduce_scatter", op, output, input)

    def abort(self) -> None:
        self.group.abort(f"rank {self.members[self.rank]} gave up")

    def _post(self, kind: str, op: str, *tensors: torch.Tensor) -> Work:
        key = (kind, op, *((t.numel(), t.dtype) for t in tensors))
        rank = self.members[self.rank]
        meeting = self.group.post(rank, self._scope, self.members, self._number, key, tensors)
        self._number += 1
        what = f"{kind} {self._number}" + ("" if self._scope == "all" else f" of scope {self._scope}")
        return _SimulatedWork(self.group, rank, self.members, meeting, what)


@dataclass(frozen=True, slots=True)
class SimulatedRank:
    """One rank of a simulated group, as the body of a simulation receives it."""

    rank: int
    world_size: int
    transport: SimulatedTransport

    def engine(self, reduction: Reduction, state: HookState | None = None, *, tuning: CpuTuning = TUNED) -> Engine:
        """Return an engine of this rank."""
        return Engine(reduction, self.transport, state, timeout=60.0, tuning=tuning)


def simulate(
    world_size: int | None = None,
    body: Callable[[SimulatedRank], T] | None = None,
    *,
    nodes: int | None = None,
    ranks_per_node: int = 1,
) -> list[T]:
    """Run ``body`` once per rank, each on a thread, and return the results in rank order.

    Args:
        world_size: number of ranks; it may be left out with ``nodes``.
        body: called with each rank.
        nodes: number of nodes, for reductions over the ranks of a node.
        ranks_per_node: ranks of each node.

    If one rank raises, the simulation ends the others and raises the exception. Ranks take turns, so a body that waits for
    another rank without a collective must wait inside ``with rank.transport.group.waiting(rank.rank):``.

    Example:
        >>> import torch
        >>> from ch_core import Bucket, Plain
        >>> def one_step(rank):
        ...     bucket = Bucket.from_tensors({"w": torch.full((2,), float(rank.rank))})
        ...     engine = rank.engine(Plain())
        ...     engine.submit(bucket)
        ...     engine.finish()
        ...     return bucket.buffer.tolist()
        >>> simulate(4, one_step)
        [[1.5, 1.5], [1.5, 1.5], [1.5, 1.5], [1.5, 1.5]]
        >>> simulate(body=one_step, nodes=2, ranks_per_node=2) == simulate(4, one_step)
        True
    """
    if body is None or (world_size is None and nodes is None):
        raise ValueError(
            "simulate() takes a number of ranks, or nodes= and ranks_per_node=, and a body to run on each rank"
        )
    ranks = world_size if world_size is not None else (nodes or 1) * ranks_per_node
    if nodes is not None and ranks != nodes * ranks_per_node:
        raise ValueError(f"{ranks} ranks are not {nodes} nodes of {ranks_per_node}: leave out the number of ranks")
    group, run = SimulatedGroup(ranks, ranks_per_node), body
    return together(group, lambda rank: run(SimulatedRank(rank, ranks, SimulatedTransport(group, rank))))


def together(group: SimulatedGroup, body: Callable[[int], T]) -> list[T]:
    """Run ``body(rank)`` for every rank of a group, each on a thread. See :func:`simulate`."""
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []

    def rank_main(rank: int) -> None:
        try:
            with group.turn(rank):
                results[rank] = body(rank)
        except BaseException as error:  # otherwise its peers would wait
            errors.append((rank, error))
            group.abort(f"rank {rank} raised {type(error).__name__}: {error}")

    ranks = range(group.world_size)
    threads = [threading.Thread(target=rank_main, args=(r,), name=f"rank {r}", daemon=True) for r in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0][1]
    return [results[r] for r in ranks]
