"""Collectives between ranks that are far apart: each takes half a round trip, because its receives are posted ahead.

gloo's sender asks the receiver if it is ready, unless the receive is posted already, and its collectives pass on messages
from rank to rank. On a link of 80 ms an all-reduce of three numbers takes 160 ms, and a message whose receive is posted 40 ms.
So every rank sends to every other one directly. From the second message of a length on, it posts the next receive as soon as it
has read the last one.
"""

import os
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store
from torch.utils.weak import WeakIdKeyDictionary

from ch_core.errors import HookNotSupportedError
from ch_core.link import Link
from ch_core.requests import Scope
from ch_core.transport.base import Work
from ch_core.transport.process_group import WHERE, ProcessGroupTransport, group_timeout, loss_of, refuse_lost

_LONGEST = (1 << 31) - 1  # bytes of a message, because its length is its tag
# Bytes of messages for which a further receive is posted. The next one of this length may follow at once, as PowerSGD's second
# message does, and a receive that is posted only then takes half a round trip to be known.
_WITH_SPARE = 1 << 20
_END, _PATIENCE = 0, 5.0  # tag of the last message to a peer, and seconds that the end of this rank waits for it


Receives = dict[int, tuple[torch.Tensor, dist.Work]]
"""Posted receives of one message from each other rank: memory of the library, and the work that fills it."""


class _Exchange:
    """Messages to and from all other ranks. They end in :meth:`wait`, which alone writes to the output."""

    def __init__(
        self,
        posted: "PostedReceives",
        what: str,
        receives: Receives,
        sends: list[dist.Work],
        read: Callable[[dict[int, torch.Tensor]], None],
    ) -> None:
        self.receives = receives
        self._posted, self._what, self._sends, self._read = posted, what, sends, read

    def wait(self, timeout: float | None) -> None:
        """See :meth:`.Work.wait`."""
        begun = time.monotonic()
        ends = begun + (self._posted.limit if timeout is None else timeout)
        try:
            for work in [*(work for _, work in self.receives.values()), *self._sends]:
                work.wait(timedelta(seconds=max(ends - time.monotonic(), 0.001)))
        except RuntimeError as error:
            raise loss_of(self._what, begun, timeout, error) from error
        self._read({peer: buffer for peer, (buffer, _) in self.receives.items()})
        self._posted.end(self)

    def is_completed(self) -> bool:
        """True, because no message writes to the output before :meth:`wait`."""
        return True


class PostedReceives:
    """Direct messages between all ranks of a group, with receives that are posted ahead.

    The ranks start the same exchanges in the same order. So the n-th message of a length from a peer belongs to the n-th
    receive of that length, whichever exchange it was posted for.

    Args:
        group: in which nobody else sends.
        limit: see the attribute.

    Attributes:
        limit: seconds that an exchange may take if its ``wait`` gets no deadline.
        started: number of exchanges.
    """

    def __init__(self, group: Any, limit: float) -> None:  # torch's stub lacks send and recv
        self.limit = limit
        rank, world = group.rank(), group.size()
        # Begin with the next rank, or all ranks would send to rank 0 first.
        self._group, self._peers = group, [(rank + step) % world for step in range(1, world)]
        # length of a message -> receives that no exchange has taken yet, in the order of posting
        self._ready: defaultdict[int, deque[Receives]] = defaultdict(deque)
        # length -> exchanges in the order of their starts. Dropped ones stay here until a later one of this length has ended,
        # and so all before it. gloo never ends a message whose memory is gone, nor any message after it.
        self._running: defaultdict[int, deque[_Exchange]] = defaultdict(deque)
        # Lengths that have come again. A receive cannot be taken back, and DDP's first step has buckets that never come again.
        self._recurring: set[int] = set()
        self.started = 0
        byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._left = [group.send([byte], peer, _END) for peer in self._peers]  # for the end of each peer
        weakref.finalize(self, _wait_until_read, group, self._peers, os.getpid())

    def exchange(
        self, what: str, parts: Sequence[torch.Tensor], read: Callable[[dict[int, torch.Tensor]], None]
    ) -> Work:
        """Send a part to each other rank, and receive as many bytes from it.

        Args:
            what: for texts of errors.
            parts: contiguous CPU tensors of equal length, one for each rank. They must not change before the work ends.
            read: copies the received bytes, by rank. The work calls it in ``wait``.
        """
        nbytes = parts[0].nbytes
        if nbytes in self._running:
            self._recurring.add(nbytes)
        ready = self._ready[nbytes]
        while len(ready) < (2 if nbytes <= _WITH_SPARE and nbytes in self._recurring else 1):
            ready.append(
                self._post({peer: torch.empty(nbytes, dtype=torch.uint8, device="cpu") for peer in self._peers})
            )
        sent = {peer: parts[peer].view(-1).view(torch.uint8) for peer in self._peers}
        sends = [self._group.send([flat], peer, nbytes) for peer, flat in sent.items()]
        made = _Exchange(self, what, ready.popleft(), sends, read)
        self._running[nbytes].append(made)
        self.started += 1
        return made

    def end(self, exchange: _Exchange) -> None:
        """Post the receives of an exchange for the next one of a length that recurs, now that their bytes have been read."""
        buffers = {peer: buffer for peer, (buffer, _) in exchange.receives.items()}
        nbytes = next(iter(buffers.values())).numel()
        running = self._running[nbytes]
        if exchange in running:  # otherwise a later one has ended before
            while running.popleft() is not exchange:
                pass
        if nbytes in self._recurring:
            with suppress(RuntimeError):  # a peer has ended after its last exchange, which was this one
                self._ready[nbytes].append(self._post(buffers))

    def _post(self, buffers: dict[int, torch.Tensor]) -> Receives:
        return {peer: (buffer, self._group.recv([buffer], peer, buffer.numel())) for peer, buffer in buffers.items()}


def _wait_until_read(group: Any, peers: Sequence[int], process: int) -> None:
    """Return when the peers have read all bytes of this rank, or have ended. Its connections may then close.

    A closed connection drops what is on the way to a slower peer. The peer need not call anything: gloo's thread there reads
    what arrived before the question, and then sends the byte that the peer has left for it.

    Args:
        group: of the messages.
        peers: all other ranks.
        process: that has sent the messages. A fork of it has no thread for an answer.
    """
    if os.getpid() != process:
        return
    ends, asked = time.monotonic() + _PATIENCE, []
    for peer in peers:
        with suppress(RuntimeError):
            asked.append(group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, _END))
    for work in asked:
        with suppress(RuntimeError):
            work.wait(timedelta(seconds=max(ends - time.monotonic(), 0.001)))


class FarTransport(ProcessGroupTransport):
    """Collectives over a process group whose ranks are far apart. On a CPU they take half a round trip each.

    The ranks add in rank order. An all-reduce of the transport takes two halves, because parts are added where they belong.

    Args:
        group: the group, whose CPU tensors gloo carries; ``None`` is the default group.
        link: the slowest link.
        where: as for :class:`.ProcessGroupTransport`.
        timeout: seconds that the first exchange waits until all ranks have started it; by default the time-out of the group.

    Raises:
        TransportError: there is no process group.
        HookNotSupportedError: gloo does not carry its tensors.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, link: Link, where: str = "", timeout: float | None = None
    ) -> None:
        super().__init__(group, free=True, where=where)
        if not self._gloo:
            raise HookNotSupportedError(
                "link= changes how tensors of a CPU travel over gloo, and this group has no gloo"
            )
        self.link: Link = link
        self._timeout = timeout
        self._halfway: deque[weakref.ref[_ScatterThenGather]] = deque()  # in the order of their starts

    @property
    def exchanged(self) -> int:
        """Exchanges among all ranks of this group that any transport has started.

        Those among peers do not count. Their number depends on the place of a rank, which may own no parameter.
        """
        mine: PostedReceives | None = _POSTED.get(self.group)
        return 0 if mine is None else mine.started

    def among(self, group: dist.ProcessGroup, scope: Scope) -> ProcessGroupTransport:
        if scope == "node":  # its ranks are near
            return super().among(group, scope)
        return FarTransport(group, self.link, WHERE[scope], self._timeout)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        if not self._direct(input.nbytes, output):
            return super().all_gather(output, input)
        rows, mine = output.view(self.world_size, -1), input.view(-1)
        if rows[self.rank].data_ptr() != mine.data_ptr():
            rows[self.rank].copy_(mine)
        return self._exchange("all-gather", [mine] * self.world_size, _write_to(rows))

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        if not self._direct(input.nbytes // self.world_size, output):
            return super().all_to_all(output, input)
        rows, parts = output.view(self.world_size, -1), input.view(self.world_size, -1)
        rows[self.rank].copy_(parts[self.rank])
        return self._exchange("all-to-all", parts.unbind(), _write_to(rows))

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str) -> Work:
        if op != "sum" or not self._direct(output.nbytes, output):
            return super().reduce_scatter(output, input, op)
        parts = input.view(self.world_size, -1).unbind()

        def add(received: dict[int, torch.Tensor]) -> None:
            rows = {peer: row.view(input.dtype) for peer, row in received.items()}
            # Without a reference to the transport. A dropped exchange would keep its group for ever.
            first, second, *others = (rows.get(rank, part) for rank, part in enumerate(parts))
            total = first + second  # not into the output, which may be this rank's part
            for row in others:
                total.add_(row)
            output.view(-1).copy_(total)

        return self._exchange("reduce-scatter", parts, add)

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work:
        if op != "sum" or tensor.is_sparse or not self._direct(tensor.nbytes, tensor):
            return super().all_reduce(tensor, op)
        made = _ScatterThenGather(self, tensor)
        self._halfway.append(weakref.ref(made))
        return made

    def start_second_halves(self, timeout: float | None) -> None:
        """Start the second exchange of each all-reduce when its first one has arrived.

        All of them together then take two halves of a round trip. One after the other they would take one more for each.

        Args:
            timeout: seconds that each first exchange may take.
        """
        while self._halfway:
            one = self._halfway.popleft()()
            if one is not None:
                one.start_gather(timeout)

    def _direct(self, nbytes: int, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu and self.world_size > 1 and 0 < nbytes <= _LONGEST

    def _exchange(
        self, what: str, parts: Sequence[torch.Tensor], read: Callable[[dict[int, torch.Tensor]], None]
    ) -> Work:
        assert self.group is not None  # noqa: S101 - set by __init__
        refuse_lost(self.group)
        what, begun = what + self._where, time.monotonic()
        try:
            return _posted(self.group, self._timeout).exchange(what, parts, read)
        except RuntimeError as error:
            raise loss_of(what, begun, self._timeout, error) from error


class _ScatterThenGather:
    """An all-reduce in two exchanges. The second one starts in ``wait``, which all ranks call at the same point of a step."""

    def __init__(self, transport: FarTransport, tensor: torch.Tensor) -> None:
        self._transport, self._tensor = transport, tensor
        self._gather: Work | None = None
        world, numel = transport.world_size, tensor.numel()
        self._padded = torch.zeros(-(-numel // world) * world, dtype=tensor.dtype, device="cpu")
        self._padded[:numel].copy_(tensor.view(-1))
        self._mine = self._padded.view(world, -1)[transport.rank]
        self._scatter = transport.reduce_scatter(self._mine, self._padded, "sum")

    def start_gather(self, timeout: float | None) -> None:
        """Wait for the first exchange, and start the second one."""
        self._scatter.wait(timeout)
        self._whole = torch.empty_like(self._padded)
        self._gather = self._transport.all_gather(self._whole, self._mine)

    def wait(self, timeout: float | None) -> None:
        """See :meth:`.Work.wait`."""
        self._transport.start_second_halves(timeout)
        if self._gather is None:  # the first exchange was lost while the work waited for another one
            self.start_gather(timeout)
        assert self._gather is not None  # noqa: S101 - started
        self._gather.wait(timeout)
        self._tensor.view(-1).copy_(self._whole[: self._tensor.numel()])

    def is_completed(self) -> bool:
        """True, because no message writes to the tensor before :meth:`wait`."""
        return True


def _write_to(rows: torch.Tensor) -> Callable[[dict[int, torch.Tensor]], None]:
    def write(received: dict[int, torch.Tensor]) -> None:
        for peer, row in received.items():
            rows[peer].copy_(row.view(rows.dtype))

    return write


def transport_over(
    group: dist.ProcessGroup | None, link: Link | None = None, *, free: bool = False, timeout: float | None = None
) -> ProcessGroupTransport:
    """Return the transport over a process group: a far one if the user has named the link, otherwise one that may be ``free``.

    Args:
        group: the group; ``None`` is the default group.
        link: the slowest link; ``None`` if the ranks are near.
        free: see :class:`.ProcessGroupTransport`.
        timeout: see :class:`FarTransport`.
    """
    return ProcessGroupTransport(group, free=free) if link is None else FarTransport(group, link, timeout=timeout)


_POSTED = WeakIdKeyDictionary()  # process group -> PostedReceives


def _posted(group: dist.ProcessGroup, timeout: float | None) -> PostedReceives:
    """Return the direct messages of a group, over a gloo group of the same ranks.

    The first message opens it, after the ranks have agreed on the link. ``dist.new_group`` would name it by the number of a
    rank's groups, in which ranks may differ, and would keep it until it is destroyed by name.
    """
    found: PostedReceives | None = _POSTED.get(group)
    if found is None:
        store = PrefixStore("commhooks/direct messages", _get_process_group_store(group))
        limit = group_timeout(group)
        deadline = timedelta(seconds=limit if timeout is None else timeout)  # the constructor waits for all ranks
        gloo = dist.ProcessGroupGloo(store, group.rank(), group.size(), deadline)
        found = _POSTED[group] = PostedReceives(gloo, limit)
    return found
