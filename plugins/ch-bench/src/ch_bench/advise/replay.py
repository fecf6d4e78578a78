"""Predict a step by replaying the computation and the messages of every rank, with the message times of the probe.

The model, the hook and the engine are real; only the messages are emulated. Each rank notes how long it computes
between posting a message and waiting for one. :class:`Replay` combines the notes of all ranks in virtual time: a message
starts when the last rank has posted it, and a waiting rank resumes when the message has arrived. The program itself
therefore decides which messages overlap with which computation, and a late rank delays the others.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ch_bench.advise.network import Message, Network
from commhooks.adapters import Work

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
    """Notes the actions of this rank in a step."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self._posted, self._since = 0, 0.0

    def begin(self) -> None:
        """Begin a step."""
        self.notes, self._posted = [], 0
        self._since = time.perf_counter()

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
        now = time.perf_counter()
        self.notes.append(Note(now - self._since, number, sent))
        self._since = time.perf_counter()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock: the work inside stands for other processes."""
        stopped = time.perf_counter()
        yield
        self._since += time.perf_counter() - stopped


class _Arrived:
    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self, timeout: float | None) -> None:
        self._wait()


class EmulatedTransport:
    """Transport of one rank in an emulated group, in which every rank sends the same as this one.

    Args:
        rank, world_size: in the emulated group.
        recorder: notes messages and waits; ``None`` notes nothing.

    Attributes:
        sent: every message so far.
    """

    free = True  # offers direct exchanges and halves, like a process group
    elastic = False

    def __init__(self, rank: int, world_size: int, recorder: Recorder | None = None) -> None:
        self.rank, self.world_size, self.recorder = rank, world_size, recorder
        self.sent: list[Message] = []

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
        one = Message(kind, str(tensor.dtype).removeprefix("torch.") if sums else "", tensor.numel() * tensor.itemsize)
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
    notes: Sequence[Note]
    left: float = 0.0  # seconds to compute until the next note
    place: int = 0
    awaits: _Transfer | None = None
    waited: float = 0.0
    ended: float | None = None


@dataclass(slots=True)
class Replay:
    """Notes of all ranks for one step, in virtual time.

    Two messages travel at a time, because gloo has two threads for each group. The others queue in order.
    """

    network: Network
    ranks: list[_Rank]
    now: float = 0.0
    _queue: list[_Transfer] = field(default_factory=list)
    _messages: list[_Transfer] = field(default_factory=list)
    _credit: float = 0.0

    @classmethod
    def of(cls, network: Network, notes: Sequence[Sequence[Note]]) -> list[tuple[float, float]]:
        """Return for each rank the seconds of the step and the seconds in which it waited.

        Args:
            network: result of the probe.
            notes: of each rank; all ranks post the same messages in the same order.

        Example:
            >>> from ch_bench.advise.network import Curve, Network
            >>> network = Network({("all_reduce", "float32"): Curve((0.0, 1.0), (0.5, 1.5), (0.0, 0.0))}, spare=1.0)
            >>> big = Message("all_reduce", "float32", 1)
            >>> early = [Note(1.0, 0, big), Note(0.0, 0, None), Note(1.0, -1, None)]
            >>> late = [Note(2.0, 0, big), Note(0.0, 0, None), Note(1.0, -1, None)]
            >>> Replay.of(network, [early, late])  # the message takes 1.5 s after both ranks have posted it
            [(4.5, 2.5), (4.5, 1.5)]
        """
        ranks = [_Rank(each) for each in notes]
        replay = cls(network, ranks, _credit=network.burst)
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
            speed, share = self._speeds(bool(computing))
            spans = [rank.left / share for rank in computing]
            spans += [transfer.left / speed for transfer in self._queue[:2]]
            awaited = (rank.awaits for rank in self.ranks if rank.awaits is not None)
            spans += [transfer.arrives - self.now for transfer in awaited if transfer.arrives is not None]
            if spans:
                self._advance(max(0.0, min(spans)), speed, share)

    def _act(self, rank: _Rank) -> None:
        """Carry out the next note of a rank."""
        note = rank.notes[rank.place]
        rank.place += 1
        if note.message < 0:
            rank.ended = self.now
            return
        if note.sent is None:
            transfer = self._messages[note.message]
            if transfer.arrives is None or transfer.arrives > self.now + _EPS:
                rank.awaits = transfer
        else:
            self._post(note.message, note.sent)
        if rank.awaits is None:
            self._compute(rank)

    def _compute(self, rank: _Rank) -> None:
        note = rank.notes[rank.place]
        rank.left = note.seconds
        if note.sent is not None:
            rank.left += self.network.curve(note.sent.kind, note.sent.dtype).start

    def _post(self, number: int, sent: Message) -> None:
        """Post a message for one rank; it starts when all ranks have posted it."""
        curve = self.network.curve(sent.kind, sent.dtype)
        if number == len(self._messages):
            self._messages.append(_Transfer(curve.work(sent.size), curve.latency, curve.load(sent.size)))
        transfer = self._messages[number]
        transfer.posted += 1
        if transfer.posted == len(self.ranks):
            given = min(self._credit, transfer.left)
            self._credit -= given
            transfer.left -= given
            self._queue.append(transfer)

    def _speeds(self, computing: bool) -> tuple[float, float]:
        """Return the speed of each message and of computation, relative to undisturbed."""
        active = self._queue[:2]
        speed = 1.0 if len(active) < 2 else 1.0 / self.network.together
        wanted = speed * sum(transfer.load for transfer in active)
        spare = self.network.spare
        if not computing or wanted <= spare:
            return speed, 1.0
        given = min(wanted, max(spare, (spare + 1.0) / 2))
        return speed * given / wanted, min(1.0, spare + 1.0 - given)

    def _advance(self, span: float, speed: float, share: float) -> None:
        self.now += span
        if not self._queue:
            self._credit = min(self.network.burst, self._credit + span)
        for transfer in self._queue[:2]:
            transfer.left -= span * speed
            if transfer.left <= _EPS:
                transfer.arrives = self.now + transfer.latency
        self._queue = [transfer for transfer in self._queue if transfer.arrives is None]
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
