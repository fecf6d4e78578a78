"""Runs real ranks over a network that the explorer controls, in every order that the network allows.

Each rank is a thread, and one thread runs at a time. A rank stops before each call of its transport: *post* (start a
collective) and *wait*. The explorer chooses the rank that continues, and how its wait ends. A run is a list of such choices.
The explorer repeats runs from the beginning, depth first, until no choice is left.

**State.** A rank's future depends only on its own past: the ends of its waits and the numbers that it received. The numbers
follow from the posts of its peers. So the pasts of all ranks identify the state, and a state that was reached before is not
continued again. The past contains a digest of every posted number, so two ranks that computed different numbers have
different pasts.

**Messages in flight.** A message is read at some time after its post, and its result is written at some time before its wait
ends. The explorer need not try these times if no operation of the rank touches the memory in between. It proves that for
every run: results in flight hold a poison (NaN, or 0xA5) until the wait ends, a changed input or result is a violation, and
with ``guard`` each operation of torch is checked against the memory in flight.

**Reduction.** Most choices of different ranks commute, so one order stands for all. ``reduced`` explores a persistent set of
the choices in each state: posts, and waits that can end in one way only, are explored alone. :func:`Explorer._persistent`
gives the reasons. Tests compare the results with those of the full search.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from ch_core import perform
from ch_core.transport.loan import Loan, take_back
from commhooks import HookTimeoutError, TransportError

Choice = tuple[int, str]
"""A rank, and what happens to it: ``post``, ``ok``, ``lost``, ``timeout``, ``die``.

If messages are explored too, the network *reads* the rank's part of a collective, and *delivers* or *fails* its result.
"""


class Stop(BaseException):
    """Ends the thread of a rank whose run is not continued."""


@dataclass(frozen=True)
class Fault:
    """A fault of the network, at a time that the explorer chooses.

    Attributes:
        kind: ``none``; ``die``, rank ``rank`` is lost before one of its calls; ``late``, rank ``rank`` may be later than the
            deadlines of its peers; ``message``, collective ``number`` is lost on one or more ranks.
        rank: the rank.
        number: the collective, counted from 0.
    """

    kind: Literal["none", "die", "late", "message"] = "none"
    rank: int = -1
    number: int = -1


@dataclass(slots=True)
class Post:
    """One rank's part of a collective."""

    key: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]
    inputs: tuple[torch.Tensor, ...]  # of the caller's tensors
    poison: torch.Tensor | None  # content of the output until the wait ends
    done: bool = False
    read: bool = False
    ended: str = ""  # "deliver" or "fail"
    future: "Arrival | None" = None


class Arrival(torch.futures.Future[None]):
    """The future of a work. An exception of a callback is a violation; torch would only log it."""

    def __init__(self, violate: Callable[[Exception], None]) -> None:
        super().__init__()
        self.violate = violate

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        def guarded(future: Any) -> None:
            try:
                callback(future)
            except Exception as error:
                self.violate(error)

        super().add_done_callback(guarded)


class Rank:
    """One rank: a thread that stops before each call of its transport."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pending: tuple[str, int] | None = None  # the next call: ("post" or "wait", number of the collective)
        self.past: list[str] = []
        self.posts: list[Post] = []
        self.ended = self.dead = self.gave_up = self.stopping = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.answer = ""
        self.go, self.back = threading.Lock(), threading.Lock()
        self.go.acquire()
        self.back.acquire()

    def call(self, kind: str, number: int) -> str:
        """Stop until the explorer chooses how this call ends."""
        if self.stopping:
            raise Stop
        self.pending = (kind, number)
        self.back.release()
        self.go.acquire()
        self.pending = None
        if self.stopping:
            raise Stop
        return self.answer


class Threads:
    """Threads for ranks, reused from run to run."""

    def __init__(self, count: int) -> None:
        self.tasks: list[Callable[[], None] | None] = [None] * count
        self.start = [threading.Lock() for _ in range(count)]
        for number in range(count):
            self.start[number].acquire()
            threading.Thread(target=self._main, args=(number,), daemon=True, name=f"rank {number}").start()

    def _main(self, number: int) -> None:
        while True:
            self.start[number].acquire()
            task = self.tasks[number]
            if task is None:
                return
            task()

    def close(self) -> None:
        for number, lock in enumerate(self.start):
            self.tasks[number] = None
            lock.release()


class ExplorerWork:
    """A collective in flight on one rank."""

    def __init__(self, transport: "ExplorerTransport", number: int) -> None:
        self.transport, self.number = transport, number

    def wait(self, timeout: float | None) -> None:
        rank, number = self.transport.me, self.number
        post = rank.posts[number]
        if post.done:
            return
        end = rank.call("wait", number)
        if end == "lost":
            raise TransportError(f"collective {number} failed: connection closed by peer")
        if end == "timeout":
            raise HookTimeoutError(f"collective {number} was not done")
        if self.transport.run.order is None:
            self.transport.run.complete(rank, number)
        post.done = True

    def future(self) -> Arrival:
        """Return a future. Its callbacks run on the network's thread, between two calls of the rank."""
        future = self.transport.me.posts[self.number].future
        if future is None:
            raise RuntimeError("callbacks of messages need a search of their order")
        return future


class ExplorerTransport:
    """The transport of one rank."""

    elastic = False
    link = None
    exchanged = 0

    def __init__(self, run: "Run", me: Rank, *, free: bool) -> None:
        self.run, self.me, self.free = run, me, free
        self.rank, self.world_size = me.number, run.world_size

    def all_reduce(self, tensor: torch.Tensor, op: str) -> ExplorerWork:
        return self._post("all_reduce", op, tensor)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> ExplorerWork:
        return self._post("all_gather", "", output, input)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> ExplorerWork:
        return self._post("all_to_all", "", output, input)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str) -> ExplorerWork:
        return self._post("reduce_scatter", op, output, input)

    def abort(self) -> None:
        self.me.gave_up = True

    def _post(self, kind: str, op: str, *tensors: torch.Tensor) -> ExplorerWork:
        if self.me.gave_up:
            raise TransportError("a collective over this process group failed or was given up earlier")
        number = len(self.me.posts)
        self.me.call("post", number)
        self.run.posted(self.me, (kind, op, *((t.numel(), t.dtype) for t in tensors)), tensors)
        return ExplorerWork(self, number)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


class Guard(TorchDispatchMode):
    """Refuses an operation that touches memory of a message in flight."""

    def __init__(self, run: "Run", me: Rank) -> None:
        super().__init__()
        self.run, self.me, self.off = run, me, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.off and not func.is_view:
            busy = [post for post in self.me.posts if not post.done]
            if busy:
                self._check(func, args, kwargs or {}, busy)
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any, args: Any, kwargs: Any, busy: list[Post]) -> None:
        for argument, given in zip(func._schema.arguments, args, strict=False):
            self._touch(func, argument, given, busy)
        for argument in func._schema.arguments:
            if argument.name in kwargs:
                self._touch(func, argument, kwargs[argument.name], busy)

    def _touch(self, func: Any, argument: Any, given: Any, busy: list[Post]) -> None:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in given if isinstance(given, list | tuple) else (given,):
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.is_sparse or not tensor.numel():
                continue
            low, high = _range(tensor) if tensor.is_contiguous() else _extent(tensor)
            for post in busy:
                for number, other in enumerate(post.tensors):
                    start, end = _range(other)
                    if low < end and start < high and (writes or number == 0):
                        what = "writes to" if writes else "reads"
                        self.run.violate(f"rank {self.me.number}: {func} {what} memory of {post.key} in flight")


def take_back_unguarded(loans: Iterable[Loan]) -> None:
    """Act as :func:`take_back`, which copies memory in flight. What it copies there is not used."""
    guard: Any = _get_current_dispatch_mode()
    if guard is None:
        take_back(loans)
        return
    guard.off = True
    take_back(loans)
    guard.off = False


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def poison(tensor: torch.Tensor) -> None:
    """Fill a result in flight."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.view(torch.uint8).fill_(0xA5) if tensor.numel() else None


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


class Run:
    """One run of all ranks along one list of choices."""

    def __init__(self, world_size: int, fault: Fault, order: str | None, *, reads: bool) -> None:
        self.world_size, self.fault, self.order, self.reads = world_size, fault, order, reads
        self.ranks = [Rank(number) for number in range(world_size)]
        self.guards: list[Guard | None] = [None] * world_size
        self.violations: list[str] = []
        self.results: dict[int, list[torch.Tensor]] = {}

    def violate(self, text: str) -> None:
        """Record a broken rule. The run continues."""
        if text not in self.violations:
            self.violations.append(text)

    def posted(self, me: Rank, key: tuple[Any, ...], tensors: tuple[torch.Tensor, ...]) -> None:
        """Take a rank's part of a collective, and poison its result."""
        number = len(me.posts)
        for peer in self.ranks:
            if len(peer.posts) > number and peer.posts[number].key != key:
                theirs = peer.posts[number].key
                self.violate(f"collective {number}: rank {me.number} posts {key}, rank {peer.number} posted {theirs}")
        guard = self.guards[me.number]
        if guard is not None:
            guard.off = True
        for tensor in tensors:
            low, high = _range(tensor)
            for other in me.posts:
                if not other.done:
                    for index, busy in enumerate(other.tensors):
                        start, end = _range(busy)
                        if low < end and start < high and (index == 0 or tensor is tensors[0]):
                            self.violate(f"rank {me.number}: {key} shares memory with {other.key}, which is in flight")
        inputs = tuple(tensor.clone() for tensor in tensors[-1:])
        me.past.append(hashlib.blake2b(repr(key).encode() + _bytes(inputs[0]), digest_size=8).hexdigest())
        if self.order is None or len(tensors) > 1:
            poison(tensors[0])
        me.posts.append(Post(key, tensors, inputs, tensors[0].clone()))
        if self.order is not None:
            me.posts[number].future = Arrival(partial(self._callback_raised, me))
        if self.order is not None and not self.reads:
            self.read(me, number)
        if guard is not None:
            guard.off = False

    def complete(self, me: Rank, number: int) -> None:
        """Write the result of a collective on one rank."""
        guard, post = self.guards[me.number], me.posts[number]
        if guard is not None:
            guard.off = True
        if post.poison is not None and _bytes(post.tensors[0]) != _bytes(post.poison):
            self.violate(f"rank {me.number} wrote to the result of {post.key} in flight")
        if len(post.tensors) > 1 and _bytes(post.tensors[1]) != _bytes(post.inputs[0]):
            self.violate(f"rank {me.number} wrote to the input of {post.key} in flight")
        self.write(me, number)
        post.done = True
        if guard is not None:
            guard.off = False

    def read(self, me: Rank, number: int) -> None:
        """Read a rank's part of a collective, as a thread of gloo or a kernel of NCCL does."""
        post = me.posts[number]
        post.read, post.inputs = True, (post.tensors[-1].clone(),)
        digest = hashlib.blake2b(_bytes(post.inputs[0]), digest_size=8).hexdigest()
        me.past.append(f"read {number} {digest}")
        poison(post.tensors[0])

    def end(self, me: Rank, number: int, how: str) -> None:
        """Deliver the result of a collective to a rank, or fail, and run the callbacks."""
        post = me.posts[number]
        post.ended = how
        me.past.append(f"{how} {number}")
        assert post.future is not None
        if how == "deliver":
            self.write(me, number)
            post.future.set_result(None)
        else:
            post.future.set_exception(RuntimeError("connection closed by peer"))

    def _callback_raised(self, me: Rank, error: Exception) -> None:
        self.violate(f"rank {me.number}: a callback raised {type(error).__name__}: {error}")

    def write(self, me: Rank, number: int) -> None:
        """Write the result of a collective to a rank's tensor."""
        post = me.posts[number]
        parts = [peer.posts[number] for peer in self.ranks]
        if all(part.key == post.key for part in parts):
            if number not in self.results:
                given = [(*(torch.empty_like(t) for t in p.tensors[:-1]), p.inputs[0].clone()) for p in parts]
                perform(str(post.key[0]), str(post.key[1]), given)
                self.results[number] = [row[0] for row in given]
            post.tensors[0].copy_(self.results[number][me.number])


Body = Callable[[int, ExplorerTransport], Any]
"""What each rank runs. It returns a record of what the rank saw."""


@dataclass
class Found:
    """Result of a search.

    Attributes:
        runs: complete runs.
        states: different states.
        orders: different orders from the first state to an end; a run that reached a known state stands for all that follow.
        steps: calls that were carried out, with repetitions.
        seconds: of the search.
        complete: False if a limit ended the search.
        violations: broken rules, each with the schedule that shows it first.
        outcomes: the records of the ranks at the end, and the number of runs with each.
    """

    runs: int = 0
    states: int = 0
    orders: int = 0
    steps: int = 0
    seconds: float = 0.0
    complete: bool = True
    violations: dict[str, str] = field(default_factory=dict)
    outcomes: dict[Any, int] = field(default_factory=dict)


class Explorer:
    """Explores all orders of one scenario.

    Args:
        world_size: number of ranks.
        body: runs on each rank.
        check: called with the records of all ranks, their ``dead`` and ``gave_up`` flags, after each complete run; returns
            broken rules.
        summary: reduces a record to the part that runs are compared by.
        fault: the fault of the network.
        free: see :class:`ch_core.transport.base.Transport`.
        reduced: explore persistent sets only.
        order: ``None``: the time at which a message is read and delivered cannot matter, and ``guard`` proves it. Otherwise
            explore these times too: ``gloo`` (each rank has two threads, which take messages in order) or ``nccl`` (one
            message after the other).
        reads: False to read each message when it is posted, and explore deliveries only.
        guard: check every operation of torch against the memory in flight.
        stop: end at the first violation.
        limit: largest number of runs.
    """

    def __init__(
        self,
        world_size: int,
        body: Body,
        check: Callable[[Sequence[Rank]], Iterator[str]],
        *,
        summary: Callable[[Rank], Any] = lambda rank: None,
        fault: Fault = Fault(),
        free: bool = False,
        reduced: bool = True,
        order: Literal["gloo", "nccl"] | None = None,
        reads: bool = True,
        guard: bool = True,
        stop: bool = True,
        limit: int = 1_000_000,
    ) -> None:
        self.world_size, self.body, self.check, self.summary, self.fault = world_size, body, check, summary, fault
        self.free, self.stop, self.limit, self.order = free, stop, limit, order
        self.reads = reads
        self.reduced, self.guard = reduced and order is None, guard and order is None

    def search(self) -> Found:
        """Explore all orders and return the result."""
        begun, found, seen = time.perf_counter(), Found(), {}
        stack: list[list[Choice]] = [[]]
        self.threads = Threads(self.world_size)
        try:
            while stack:
                if found.runs >= self.limit or (self.stop and found.violations):
                    found.complete = False
                    break
                self._run(stack.pop(), stack, seen, found)
        finally:
            self.threads.close()
        found.states, found.orders, found.seconds = len(seen), _orders(seen), time.perf_counter() - begun
        return found

    def _run(self, prefix: list[Choice], stack: list[list[Choice]], seen: dict[Any, list[Any]], found: Found) -> None:
        run = Run(self.world_size, self.fault, self.order, reads=self.reads)
        for rank in run.ranks:
            self._start(run, rank)
        path: list[Choice] = []
        complete, before = True, None
        while True:
            key = self._state(run) if len(path) >= len(prefix) - 1 else None
            if before is not None:
                seen[before].append(key)
            before = key
            choices = self._enabled(run)
            if not choices:
                seen.setdefault(key, [])
                break
            if len(path) < len(prefix):
                choice = prefix[len(path)]
            else:
                if key in seen:
                    complete = False
                    break
                seen[key] = []
                if self.reduced:
                    choices = self._persistent(run, choices)
                choice = choices[0]
                stack.extend([*path, other] for other in choices[1:])
            path.append(choice)
            found.steps += 1
            self._carry_out(run, choice)
            if run.violations and self.stop:
                break
        if complete:
            found.runs += 1
            stuck = [rank.number for rank in run.ranks if not (rank.ended or rank.dead)]
            if stuck and not run.violations:
                at = {r: f"{run.ranks[r].pending} of {_posted(run.ranks[r])}" for r in stuck}
                run.violate(f"ranks {at} wait for ever")
            if not run.violations or not self.stop:
                for rank in run.ranks:
                    if rank.error is not None:
                        run.violate(f"rank {rank.number} raised {type(rank.error).__name__}: {rank.error}")
                if not stuck and not any(rank.error for rank in run.ranks):
                    for text in self.check(run.ranks):
                        run.violate(text)
                    outcome = tuple("dead" if rank.dead else self.summary(rank) for rank in run.ranks)
                    found.outcomes[outcome] = found.outcomes.get(outcome, 0) + 1
            for text in run.violations:
                found.violations.setdefault(text, schedule(path, run))
        self._stop(run)

    # -- ranks as threads

    def _start(self, run: Run, rank: Rank) -> None:
        def main() -> None:
            guard = Guard(run, rank) if self.guard else None
            run.guards[rank.number] = guard
            try:
                transport = ExplorerTransport(run, rank, free=self.free)
                if guard is None:
                    rank.result = self.body(rank.number, transport)
                else:
                    with guard:
                        rank.result = self.body(rank.number, transport)
            except Stop:
                pass
            except BaseException as error:
                rank.error = error
            rank.ended = True
            rank.back.release()

        self.threads.tasks[rank.number] = main
        self.threads.start[rank.number].release()
        rank.back.acquire()

    def _carry_out(self, run: Run, choice: Choice) -> None:
        number, what = choice
        rank = run.ranks[number]
        if " " in what:
            verb, collective = what.split()
            if verb == "read":
                run.read(rank, int(collective))
            else:
                run.end(rank, int(collective), verb)
            return
        if what == "die":
            rank.dead = True
            rank.past.append("dies")
            return
        if what != "post":
            rank.past.append(what)
        rank.answer = what
        rank.go.release()
        rank.back.acquire()

    def _stop(self, run: Run) -> None:
        for rank in run.ranks:
            rank.stopping = True
            while not rank.ended:
                rank.go.release()
                rank.back.acquire()

    # -- choices

    def _state(self, run: Run) -> Any:
        return tuple((tuple(rank.past), rank.ended, rank.dead) for rank in run.ranks)

    def _enabled(self, run: Run) -> list[Choice]:
        found: list[Choice] = []
        for rank in run.ranks:
            if self.order is not None:
                found += [(rank.number, what) for what in self._messages(run, rank)]
            if rank.dead or rank.ended:
                continue
            assert rank.pending is not None
            kind, number = rank.pending
            if kind == "post":
                found.append((rank.number, "post"))
            else:
                found += [(rank.number, end) for end in self._ends(run, rank, number)]
            if self.fault.kind == "die" and self.fault.rank == rank.number:
                found.append((rank.number, "die"))
        return found

    def _ends(self, run: Run, me: Rank, number: int) -> Iterator[str]:
        """Return the ways in which a wait may end now."""
        fault, missing = self.fault, [rank for rank in run.ranks if len(rank.posts) <= number]
        if self.order is not None:
            yield from {"deliver": ["ok"], "fail": ["lost"], "": []}[me.posts[number].ended]
            if any(rank.gave_up for rank in missing):
                yield "timeout"
            return
        if not missing:
            yield "ok"
        dead = fault.kind == "die" and run.ranks[fault.rank].dead
        if dead or (fault.kind == "message" and fault.number == number and not missing):
            yield "lost"
        if any(rank.gave_up or (fault.kind == "late" and rank.number == fault.rank) for rank in missing):
            yield "timeout"

    def _messages(self, run: Run, me: Rank) -> Iterator[str]:
        """Return the actions of the network that are possible for a rank now."""
        width = 2 if self.order == "gloo" else 1
        active = 0
        for number, post in enumerate(me.posts):
            if post.ended:
                continue
            active += 1
            if active > width:
                return
            if not post.read:
                yield f"read {number}"
            elif all(len(rank.posts) > number and rank.posts[number].read for rank in run.ranks):
                yield f"deliver {number}"
                if self.fault.kind == "message" and self.fault.number == number:
                    yield f"fail {number}"

    def _persistent(self, run: Run, choices: list[Choice]) -> list[Choice]:
        """Return choices that must be explored here. All others commute with them, and remain possible afterwards.

        A post adds to its rank's queue only. No choice of another rank disables it. It enables waits, and, of a late rank
        only, it disables time-outs. A wait that can end in one way, now and later, commutes with everything. The choices of
        the faulty rank conflict with its peers' waits: they are explored together with these waits once every other rank
        is at such a wait.
        """
        fault = self.fault
        first = [rank for rank in run.ranks if rank.number == fault.rank and fault.kind in ("die", "late")]
        mine = [c for c in choices if first and c[0] == first[0].number]
        if fault.kind == "die" and not first[0].dead and not first[0].ended:
            # Before the death all waits of peers can end in one way, and this end remains possible after the death.
            if any(what != "die" for _, what in mine):
                return mine
            for choice in choices:
                if choice[0] != fault.rank:
                    return [choice, *mine]  # it may release the rank, and the death may come first
            return mine
        alone = [c for c in choices if c[1] == "post" and not (first and c[0] == first[0].number)]
        if alone:
            return alone[:1]
        ends: dict[int, list[Choice]] = {}
        for choice in choices:
            ends.setdefault(choice[0], []).append(choice)
        done = [rows for rank, rows in ends.items() if any(what == "ok" for _, what in rows)]
        for rows in done:
            if fault.kind != "late" or len(rows) == 1:
                return rows
        if fault.kind == "late":
            return choices
        return next(iter(ends.values()))  # no rank posts again unless its wait fails, so no wait can succeed any more


def _orders(graph: dict[Any, list[Any]]) -> int:
    """Return the number of paths from the first state to an end. Keys are in the order in which they were found."""
    if not graph:
        return 0
    first, counts = next(iter(graph)), dict[Any, int]()
    stack = [first]
    while stack:
        key = stack[-1]
        missing = [after for after in graph.get(key, []) if after not in counts]
        if missing:
            stack += missing
            continue
        stack.pop()
        counts[key] = sum(counts[after] for after in graph.get(key, [])) or 1
    return counts[first]


def _posted(rank: Rank) -> list[Any]:
    return [post.key[0] for post in rank.posts]


def schedule(path: Sequence[Choice], run: Run | None = None) -> str:
    """Return a list of choices as text, neighbours of one rank together."""
    words: list[str] = []
    last = -1
    for rank, what in path:
        if rank != last:
            words.append(f"rank {rank}:")
        words.append(what)
        last = rank
    return " ".join(words)
