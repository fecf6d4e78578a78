"""Predict a step by replaying the computation and the messages of every rank, with the message times of the probe.

The model, the hook and the engine are real; only the messages are emulated. Each rank notes how long it computes
between posting a message and waiting for one. :class:`Replay` combines the notes of all ranks in virtual time: a message
starts when the last of its ranks has posted it, and a waiting rank resumes when the message has arrived. The program itself
therefore decides which messages overlap with which computation, and a late rank delays the others.

Messages inside a node and between nodes have groups and times of their own. They share the cores of a rank, but no link.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ch_bench.advise.network import Message, Network, Scope
from ch_core import Link, Work
from commhooks import Topology

_EPS = 1e-12


class Note(NamedTuple):
    """One action of a rank: it computes, then posts a message or waits for one.

    Attributes:
        seconds: of computation before the action.
        message: its number, in the order in which messages are posted; -1 at the end of the step.
        sent: the posted message; ``None`` for a wait.
    """

    seconds: float
    message: int
    sent: Message | None


class Recorder:
    """Notes the actions of this rank in a step.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.notes: list[Note] = []
        self._clock = clock
        self._posted, self._since = 0, 0.0

    def begin(self) -> None:
        """Begin a step."""
        self.notes, self._posted = [], 0
        self._since = self._clock()

    def post(self, sent: Message) -> int:
        """Note a posted message and return its number."""
        number = self._posted
        self._posted += 1
        self._note(number, sent)
        return number

    def wait(self, number: int) -> None:
        """Note that the rank waits for a message."""
        self._note(number, None)

    def end(self) -> list[Note]:
        """End the step and return its notes."""
        self._note(-1, None)
        return self.notes

    def _note(self, number: int, sent: Message | None) -> None:
        now = self._clock()
        self.notes.append(Note(now - self._since, number, sent))
        self._since = self._clock()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock: the work inside stands for other processes."""
        stopped = self._clock()
        yield
        self._since += self._clock() - stopped


class _Arrived:
    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self, timeout: float | None) -> None:
        self._wait()


class EmulatedTransport:
    """Transport of one rank in an emulated group, in which all ranks send the same messages.

    Args:
        rank, world_size: in the emulated group.
        recorder: notes messages and waits; ``None`` notes nothing.
        topology: nodes of the ranks, for hooks with two levels.
        link: of the transport that it stands for.

    Attributes:
        sent: every message so far, of all scopes.
    """

    free = True  # offers direct exchanges and halves, like a process group
    elastic = False
    exchanged = 0

    def __init__(
        self,
        rank: int,
        world_size: int,
        recorder: Recorder | None = None,
        topology: Topology | None = None,
        link: Link | None = None,
    ) -> None:
        self.link = link
        self.rank, self.world_size, self.recorder, self.topology = rank, world_size, recorder, topology
        self.sent: list[Message] = []
        self._scope: Scope = "all"

    def open_levels(self, nodes: object, timeout: float | None) -> None:
        """Do nothing: the transport knows the nodes."""

    def scoped(self, scope: Scope) -> "EmulatedTransport":
        """Return the transport among the ranks of a scope. It notes its messages in the same place."""
        if scope == "all" or self.topology is None:
            return self
        members = self.topology.members(self.rank, scope)
        link = self.link if scope != "node" else None
        made = EmulatedTransport(members.index(self.rank), len(members), self.recorder, None, link)
        made.sent, made._scope = self.sent, scope
        return made

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work:
        return self._post("all_reduce", tensor, lambda: None)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        # A gather of weights is in place, so the input is a part of the output.
        return self._post("all_gather", output, lambda: output.view(self.world_size, -1).copy_(input.clone().view(-1)))

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        return self._post("all_to_all", input, lambda: output.copy_(input))

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str) -> Work:
        mine = input.view(self.world_size, -1)[self.rank]
        return self._post("reduce_scatter", input, lambda: output.copy_(mine))

    def abort(self) -> None:
        """Do nothing: no message travels."""

    def _post(self, kind: str, tensor: torch.Tensor, deliver: Callable[[], object]) -> Work:
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)  # the host's clock must include the work of the GPU
        sums = kind in ("all_reduce", "reduce_scatter")
        dtype = str(tensor.dtype).removeprefix("torch.") if sums else ""
        one = Message(kind, dtype, tensor.numel() * tensor.itemsize, self._scope)
        self.sent.append(one)
        recorder = self.recorder
        if recorder is None:
            deliver()
            return _Arrived(lambda: None)
        number = recorder.post(one)
        with recorder.stopped():
            deliver()  # threads of the network would do this
        return _Arrived(lambda: recorder.wait(number))


@dataclass(slots=True, eq=False)
class _Transfer:
    left: float  # seconds of transfer, alone
    latency: float
    load: float
    posted: int = 0  # ranks that have posted the message
    arrives: float | None = None  # time of arrival, known once the last byte is sent


@dataclass(slots=True, eq=False)
class _Rank:
    number: int
    notes: Sequence[Note]
    left: float = 0.0  # seconds to compute until the next note
    place: int = 0
    sent: list[_Transfer] = field(default_factory=list)
    awaits: _Transfer | None = None
    waited: float = 0.0
    ended: float | None = None


@dataclass(slots=True, eq=False)
class _Queue:
    """Messages of one group of ranks, in order. As many travel at a time as the network has lanes."""

    network: Network
    members: tuple[int, ...]
    credit: float
    started: list[_Transfer] = field(default_factory=list)
    messages: list[_Transfer] = field(default_factory=list)
    posts: dict[int, int] = field(default_factory=dict)  # rank -> number of its messages

    @property
    def active(self) -> list[_Transfer]:
        return self.started[: self.network.lanes]

    @property
    def speed(self) -> float:
        """Speed of each message, relative to a message alone."""
        return 1.0 if len(self.active) < 2 else 1.0 / self.network.together

    @property
    def load(self) -> float:
        """Cores of each member that the messages keep busy."""
        return self.speed * sum(transfer.load for transfer in self.active)

    def post(self, rank: int, sent: Message) -> _Transfer:
        """Post the next message of a rank; it starts when all members have posted it."""
        number = self.posts.get(rank, 0)
        self.posts[rank] = number + 1
        if number == len(self.messages):
            curve = self.network.curve(sent.kind, sent.dtype)
            self.messages.append(_Transfer(curve.work(sent.size), curve.latency, curve.load(sent.size)))
        transfer = self.messages[number]
        transfer.posted += 1
        if transfer.posted == len(self.members):
            given = min(self.credit, transfer.left)
            self.credit -= given
            transfer.left -= given
            self.started.append(transfer)
        return transfer


@dataclass(slots=True)
class Replay:
    """Notes of all ranks for one step, in virtual time."""

    network: Network
    ranks: list[_Rank]
    now: float = 0.0
    _queues: dict[tuple[str, tuple[int, ...]], _Queue] = field(default_factory=dict)  # by scope and members

    @classmethod
    def of(cls, network: Network, notes: Sequence[Sequence[Note]]) -> list[tuple[float, float]]:
        """Return for each rank the seconds of the step and the seconds in which it waited.

        Args:
            network: result of the probe.
            notes: of each rank; all ranks of a group post the same messages in the same order.

        Example:
            >>> from ch_bench.advise.network import Curve, Network
            >>> network = Network({("all_reduce", "float32"): Curve((0.0, 1.0), (0.5, 1.5), (0.0, 0.0))}, spare=1.0)
            >>> big = Message("all_reduce", "float32", 1)
            >>> early = [Note(1.0, 0, big), Note(0.0, 0, None), Note(1.0, -1, None)]
            >>> late = [Note(2.0, 0, big), Note(0.0, 0, None), Note(1.0, -1, None)]
            >>> Replay.of(network, [early, late])  # the message takes 1.5 s after both ranks have posted it
            [(4.5, 2.5), (4.5, 1.5)]
        """
        ranks = [_Rank(number, each) for number, each in enumerate(notes)]
        replay = cls(network, ranks)
        for rank in ranks:
            replay._compute(rank)
        replay._run()
        return [(rank.ended or 0.0, rank.waited) for rank in ranks]

    def _run(self) -> None:
        while any(rank.ended is None for rank in self.ranks):
            for rank in self.ranks:
                while rank.ended is None and rank.awaits is None and rank.left <= _EPS:
                    self._act(rank)
            computing = [rank for rank in self.ranks if rank.ended is None and rank.awaits is None]
            slowed, share = self._shares(bool(computing))
            spans = [rank.left / share for rank in computing]
            for queue in self._queues.values():
                spans += [transfer.left / (queue.speed * slowed) for transfer in queue.active]
            awaited = (rank.awaits for rank in self.ranks if rank.awaits is not None)
            spans += [transfer.arrives - self.now for transfer in awaited if transfer.arrives is not None]
            if spans:
                self._advance(max(0.0, min(spans)), slowed, share)

    def _act(self, rank: _Rank) -> None:
        """Carry out the next note of a rank."""
        note = rank.notes[rank.place]
        rank.place += 1
        if note.message < 0:
            rank.ended = self.now
            return
        if note.sent is None:
            transfer = rank.sent[note.message]
            if transfer.arrives is None or transfer.arrives > self.now + _EPS:
                rank.awaits = transfer
        else:
            rank.sent.append(self._queue(rank.number, note.sent.scope).post(rank.number, note.sent))
        if rank.awaits is None:
            self._compute(rank)

    def _compute(self, rank: _Rank) -> None:
        note = rank.notes[rank.place]
        rank.left = note.seconds
        if note.sent is not None:
            rank.left += self.network.at(note.sent.scope).curve(note.sent.kind, note.sent.dtype).start

    def _queue(self, rank: int, scope: Scope) -> _Queue:
        topology = self.network.topology
        members = tuple(range(len(self.ranks))) if topology is None else topology.members(rank, scope)
        if (scope, members) not in self._queues:
            network = self.network.at(scope)
            self._queues[scope, members] = _Queue(network, members, network.burst)
        return self._queues[scope, members]

    def _shares(self, computing: bool) -> tuple[float, float]:
        """Return the speed of messages and of computation, relative to a rank with enough cores for both."""
        loads = [0.0] * len(self.ranks)
        for queue in self._queues.values():
            for member in queue.members:
                loads[member] += queue.load
        wanted, spare = max(loads), self.network.spare
        if not computing or wanted <= spare:
            return 1.0, 1.0
        given = min(wanted, max(spare, (spare + 1.0) / 2))
        return given / wanted, min(1.0, spare + 1.0 - given)

    def _advance(self, span: float, slowed: float, share: float) -> None:
        self.now += span
        for queue in self._queues.values():
            if not queue.started:
                queue.credit = min(queue.network.burst, queue.credit + span)
            speed = queue.speed * slowed
            for transfer in queue.active:
                transfer.left -= span * speed
                if transfer.left <= _EPS:
                    transfer.arrives = self.now + transfer.latency
            queue.started = [transfer for transfer in queue.started if transfer.arrives is None]
        for rank in self.ranks:
            if rank.ended is not None:
                continue
            if rank.awaits is None:
                rank.left -= span * share
                continue
            rank.waited += span
            if rank.awaits.arrives is not None and rank.awaits.arrives <= self.now + _EPS:
                rank.awaits = None
                self._compute(rank)
