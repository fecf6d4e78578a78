"""Finds accesses to memory of a GPU that no event, stream wait or host wait puts in order.

Each stream and the host have a vector clock. An operation joins the clock of the host, which starts it, to the clock of its
stream. An event keeps a copy of a clock, and a wait joins it. Two accesses of one range of memory, at least one a write, must
be ordered by these clocks. ``torch.cuda._sanitizer`` uses the same rule on a real GPU.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

HOST = "host"
Clock = dict[str, int]


@dataclass(frozen=True, slots=True)
class Access:
    """One access: a range of bytes of a storage, on a stream at a time."""

    low: int
    high: int
    writes: bool
    stream: str
    time: int
    what: str


@dataclass(frozen=True, slots=True)
class Use:
    """The last use of freed memory on a stream that the allocator does not wait for."""

    stream: str
    time: int
    what: str


@dataclass(slots=True)
class Memory:
    """Accesses to one storage since it was allocated.

    Attributes:
        stream: the stream that was current at the allocation. The allocator gives the memory back to it.
        earlier: uses of freed memory that the allocator may have handed out again for this storage.
        recorded: streams of ``record_stream``.
        last: the last use on each stream.
    """

    stream: str
    earlier: list[Use] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)
    last: dict[str, Use] = field(default_factory=dict)


class StreamOrder:
    """Clocks of all streams, and accesses of all storages.

    Attributes:
        races: descriptions of what no wait puts in order.

    Example:
        >>> order, memory = StreamOrder(), torch.empty(4, device="meta")
        >>> order.access("side", memory, "a kernel", writes=True)
        >>> order.access("main", memory, "a copy", writes=False)
        >>> order.races
        ['a copy on stream main reads memory that a kernel on stream side writes to: no wait between them']
    """

    def __init__(self) -> None:
        self.races: list[str] = []
        self._clocks: dict[str, Clock] = {HOST: {}}
        self._memory: dict[int, Memory] = {}
        self._freed_uses: dict[str, list[Use]] = {}  # by the stream that gets the memory back

    def clock(self, stream: str) -> Clock:
        """Return the clock of a stream."""
        return self._clocks.setdefault(stream, {})

    def stamp(self, stream: str) -> Clock:
        """Return a copy of the clock of a stream, as an event records it."""
        return dict(self.clock(stream))

    def join(self, stream: str, stamp: Clock) -> None:
        """Let a stream, or the host, wait for a stamp."""
        mine = self.clock(stream)
        for other, time in stamp.items():
            mine[other] = max(mine.get(other, 0), time)

    def allocate(self, stream: str, tensor: torch.Tensor) -> None:
        """Note the stream of a new storage."""
        self._of(stream, tensor)

    def access(self, stream: str, tensor: torch.Tensor, what: str, *, writes: bool) -> None:
        """Check an access of a stream or of the host."""
        if not tensor.numel() or tensor.is_sparse:
            return
        if stream != HOST:
            self.join(stream, self.clock(HOST))
        clock = self.clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        memory = self._of(stream, tensor)
        if stream not in memory.last and stream != HOST:
            for use in memory.earlier:
                if clock.get(use.stream, 0) < use.time:
                    self._report(
                        f"memory of stream {memory.stream} is handed back while {use.what} on stream {use.stream} uses it, and "
                        f"{what} on stream {stream} may get it next: no wait between them"
                    )
        low = int(tensor.storage_offset()) * tensor.itemsize
        span = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        made = Access(low, low + (span + 1) * tensor.itemsize, writes, stream, clock[stream], what)
        kept = []
        for old in memory.accesses:
            overlaps = old.low < made.high and made.low < old.high
            before = old.time <= clock.get(old.stream, 0)
            if overlaps and not before and (old.writes or writes):
                self._report(
                    f"{what} on stream {stream} {'writes to' if writes else 'reads'} memory that {old.what} on stream "
                    f"{old.stream} {'writes to' if old.writes else 'reads'}: no wait between them"
                )
            inside = made.low <= old.low and old.high <= made.high
            if not (before and inside and (writes or (not old.writes and old.stream == stream))):
                kept.append(old)  # a later access that is ordered behind the new one need not look at a covered one
        memory.accesses = [*kept, made]
        memory.last[stream] = Use(stream, clock[stream], what)

    def record(self, stream: str, tensor: torch.Tensor) -> None:
        """Take ``tensor.record_stream(stream)``."""
        self._of(stream, tensor).recorded.add(stream)

    def _of(self, stream: str, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        found = self._memory.get(key)
        if found is None:
            # The stream itself waits for uses that its clock has.
            uses = [u for u in self._freed_uses.get(stream, []) if self.clock(stream).get(u.stream, 0) < u.time]
            self._freed_uses[stream] = uses
            found = self._memory[key] = Memory(stream, list(uses))
            weakref.finalize(storage, self._freed, key).atexit = False
        return found

    def _freed(self, key: int) -> None:
        """Note uses that may still run when the allocator hands the memory to its stream again."""
        memory = self._memory.pop(key, None)
        if memory is None:
            return
        # The allocator waits for all that the recorded streams have so far.
        clocks = [self.clock(stream) for stream in (memory.stream, *memory.recorded)]
        for stream, use in memory.last.items():
            ordered = any(clock.get(stream, 0) >= use.time for clock in clocks)
            if stream not in (memory.stream, HOST, *memory.recorded) and not ordered:
                self._freed_uses.setdefault(memory.stream, []).append(use)

    def _report(self, text: str) -> None:
        if text not in self.races:
            self.races.append(text)


def accesses(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield the tensors that an operation of torch is given, and True if it writes to them."""
    named = [*zip(func._schema.arguments, args, strict=False)]
    named += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
    for argument, given in named:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for each in given if isinstance(given, list | tuple) else (given,):
            if isinstance(each, torch.Tensor):
                yield each, writes
