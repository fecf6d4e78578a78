"""A network as measured numbers, and the probe that measures them."""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from ch_bench.advise.workload import slowest
from ch_core import TUNED, FarTransport, Link, ProcessGroupTransport, Work, transport_over
from commhooks import HookNotSupportedError, Topology

Key = tuple[str, str]
"""A collective and the dtype that it sums, ``("all_reduce", "float32")``; ``""`` for collectives that do not sum."""

Scope = Literal["all", "node", "peers"]
SCOPES: tuple[Scope, ...] = ("node", "peers")

SMALLEST, SHORT, FACTOR = 256, 1 << 16, 4  # bytes; the next size is FACTOR times larger, FACTOR**2 below SHORT
ENOUGH = 1 << 20  # bytes: smaller sizes do not show the bandwidth, so the probe tries them even when time is up
RESTED = 1 << 17  # bytes: smaller messages do not show a token bucket
LONGEST = 0.5  # seconds: larger messages are extrapolated
WARM = 3  # messages in a row; the last one is timed, when a token bucket is empty
PAIR_BYTES = 1 << 20  # of the exchange that shows the rate between two ranks
QUIET = 0.3  # seconds in which the ranks sleep, and other programs show
REST = 0.15  # seconds in which a token bucket refills


class Message(NamedTuple):
    """One message that a hook sends.

    Attributes:
        kind, dtype: see :data:`Key`.
        size: bytes of the full-size tensor.
        scope: ranks that take part: all ranks, the ranks of a node, or the ranks with one place on all nodes.
    """

    kind: str
    dtype: str
    size: int
    scope: Scope = "all"


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one message by its size, alone on the network.

    Attributes:
        sizes: bytes of the full-size tensor, ascending.
        seconds: duration of a message that follows others.
        cpu: CPU seconds of this process, without the waiting thread.
        start: seconds that a rank needs to start a message.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    cpu: tuple[float, ...]
    start: float = 0.0

    @property
    def latency(self) -> float:
        """Seconds of the smallest message."""
        return self.seconds[0]

    def work(self, size: float) -> float:
        """Return the seconds for which a message occupies the network, beyond the latency.

        A token bucket may let a short message through for free. A byte of a longer message never costs less.

        >>> Curve((100.0, 1000.0, 2000.0), (1.0, 2.0, 4.0), (0.0, 0.0, 0.0)).work(3000.0)
        5.8
        """
        by_the_byte = _slope(self.sizes, self.seconds) * (size - self.sizes[0])
        return max(_at(self.sizes, self.seconds, size) - self.latency, by_the_byte, 0.0)

    def load(self, size: float) -> float:
        """Return the number of cores that the message occupies while it travels."""
        seconds = _at(self.sizes, self.seconds, size)
        return min(2.0, _at(self.sizes, self.cpu, size) / seconds) if seconds > 0 else 0.0


def _slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the cost of a byte of a large message, from two sizes at least a factor of 2 apart."""
    far = max((place for place, size in enumerate(sizes) if 2 * size <= sizes[-1]), default=None)
    return 0.0 if far is None else max(0.0, (values[-1] - values[far]) / (sizes[-1] - sizes[far]))


def _at(sizes: Sequence[float], values: Sequence[float], size: float) -> float:
    """Interpolate between measured sizes; extrapolate with the slope of large messages."""
    if size <= sizes[0] or len(sizes) < 2:
        return values[0]
    if size > sizes[-1]:
        return values[-1] + _slope(sizes, values) * (size - sizes[-1])
    for (a, left), (b, right) in pairwise(zip(sizes, values, strict=True)):
        if size <= b:
            return left + (right - left) * (size - a) / (b - a)
    raise AssertionError("sizes must ascend")


@dataclass(frozen=True, slots=True)
class Network:
    """Result of a probe.

    Attributes:
        curves: by collective and dtype, of messages among all ranks.
        together: duration of two simultaneous messages relative to one, from 1 to 2.
        burst: seconds of transfer that an idle network gives for free (token bucket).
        spare: cores of a rank in addition to the one that it computes on.
        levels: the link inside nodes (``"node"``) and the one between them (``"peers"``). Each was probed while all nodes, or
            all places of a node, sent at the same time.
        topology: nodes of the ranks; ``None`` if no hook has two levels.
        lanes: messages that travel at a time. gloo has two threads for each group, and NCCL one stream. Between far ranks the
            bytes of one message follow those of another, and the latencies overlap.
        pair: rate and round trip between two ranks; ``None`` on a GPU.
        load: share of the busiest machine's cores that other programs used before the probe.
    """

    curves: Mapping[Key, Curve]
    together: float = 2.0
    burst: float = 0.0
    spare: float = 0.0
    levels: Mapping[Scope, "Network"] = field(default_factory=dict)
    topology: Topology | None = None
    lanes: int = 2
    pair: Link | None = None
    load: float = 0.0

    def at(self, scope: Scope) -> "Network":
        """Return the network among the ranks of a scope."""
        return self if scope == "all" else self.levels[scope]

    def curve(self, kind: str, dtype: str) -> Curve:
        """Return the curve of a collective; for a dtype without a curve, one of the same collective."""
        found = self.curves.get((kind, dtype))
        if found is None:
            found = next((c for (k, _), c in self.curves.items() if k == kind), None)
        return found if found is not None else next(iter(self.curves.values()))


def probe(
    sent: Sequence[Message],
    group: dist.ProcessGroup,
    device: torch.device,
    budget: float,
    leveled: ProcessGroupTransport | None = None,
    link: Link | None = None,
) -> Network:
    """Time every kind of message that hooks send, up to the largest size. Every rank must call this.

    Args:
        sent: messages of all hooks.
        group: process group of the messages.
        device: of the tensors.
        budget: seconds; the probe skips sizes when they are used up.
        leveled: transport whose levels are open, for messages inside nodes and between them.
        link: with which the hooks are attached, if the ranks are far apart.
    """
    largest: dict[Scope, dict[Key, int]] = {"all": {("all_reduce", "float32"): SMALLEST * FACTOR}}
    for one in sent:
        found, key = largest.setdefault(one.scope, {}), (one.kind, one.dtype)
        found[key] = max(found.get(key, 0), one.size)
    largest = _largest_anywhere(largest)  # places of a node may send different sizes, and all ranks try the same
    count = sum(map(len, largest.values()))
    share = slowest([budget], device)[0] / (count + 1)  # equal on all ranks, which must try the same sizes
    spare = spare_cores()

    def level(scope: Scope) -> Network:
        assert leveled is not None  # a message of this scope came from it
        return _level(leveled.scoped(scope), largest[scope], device, share, spare)

    whole = _level(transport_over(group, link), largest["all"], device, share, spare)
    levels: dict[Scope, Network] = {scope: level(scope) for scope in SCOPES if scope in largest}
    return replace(whole, levels=levels, topology=None if leveled is None else leveled.topology)


def _level(
    transport: ProcessGroupTransport, largest: Mapping[Key, int], device: torch.device, share: float, spare: float
) -> Network:
    curves = {key: _curve(transport, key, largest[key], device, share) for key in sorted(largest)}
    if isinstance(transport, FarTransport):
        return Network(curves, spare=spare, lanes=1)
    return Network(curves, _together(transport, curves, device), _burst(transport, curves, device), spare)


def pair_link(group: dist.ProcessGroup, device: torch.device) -> Link | None:
    """Measure the rate and the round trip of the slowest link between two ranks. Every rank must call this.

    Ranks exchange a few bytes and a megabyte directly. Before each exchange they rest until the peers have learned that the
    receive is posted, so that it takes half a round trip and the time of its bytes.

    Returns:
        The link, in three digits and the same on all ranks; ``None`` on a GPU, or without gloo.
    """
    if device.type != "cpu":
        return None
    try:
        transport = FarTransport(group, Link(1e9, 1e-3))  # exchanges of the transport do not depend on the link
    except HookNotSupportedError:
        return None
    few, many = (_exchange_of(transport, size) for size in (8, PAIR_BYTES))
    [most] = slowest([_timed(few, WARM, gap=0.0)[0]], device)  # half a round trip, or a whole one
    short, long = slowest([min(_timed(one, WARM, gap=2 * most)[0] for _ in range(3)) for one in (few, many)], device)
    sent = PAIR_BYTES * (transport.world_size - 1)
    return Link(float(f"{8 * sent / max(long - short, 1e-6):.3g}"), float(f"{2 * short:.3g}"))


def _exchange_of(transport: FarTransport, size: int) -> "_Prepared":
    mine = torch.zeros(size, dtype=torch.uint8, device="cpu")
    every = torch.zeros(size * transport.world_size, dtype=torch.uint8, device="cpu")
    return _Prepared(lambda: transport.all_gather(every, mine), every)


def _largest_anywhere(mine: Mapping[Scope, Mapping[Key, int]]) -> dict[Scope, dict[Key, int]]:
    every: list[Mapping[Scope, Mapping[Key, int]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    made: dict[Scope, dict[Key, int]] = {}
    for one in every:
        for scope, sizes in one.items():
            found = made.setdefault(scope, {})
            for key, size in sizes.items():
                found[key] = max(found.get(key, 0), size)
    return made


def used_by_others(device: torch.device) -> float:
    """Return the share of the busiest machine's cores that programs use while all ranks sleep. Every rank must call this.

    A load average would count the start of the ranks themselves. It is 0 where the kernel has no ``/proc/stat``.
    """
    _meet()
    before = _core_times()
    time.sleep(QUIET)
    busy, idle = (after - earlier for after, earlier in zip(_core_times(), before, strict=True))
    return slowest([busy / max(busy + idle, 1.0)], device)[0]


def _core_times() -> tuple[float, float]:
    """Return the ticks in which cores were busy and idle."""
    try:
        user, nice, system, idle, wait, *others = map(float, Path("/proc/stat").read_text().split()[1:9])
    except (OSError, ValueError):
        return 0.0, 0.0
    return user + nice + system + sum(others), idle + wait


def spare_cores() -> float:
    """Return the cores of this machine per rank, minus the core on which the rank computes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    hosts: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return max(0.0, cores / hosts.count(socket.gethostname()) - torch.get_num_threads())


def _curve(transport: ProcessGroupTransport, key: Key, largest: int, device: torch.device, budget: float) -> Curve:
    """Time messages by size.

    When time is up, sizes in the middle are skipped, but not the largest: it carries most of a step's bytes.
    """
    ends = time.perf_counter() + budget
    # In training, a step's computation gives the peers time to learn that the next receive is posted.
    gap = transport.link.round_trip if isinstance(transport, FarTransport) and transport.link is not None else None
    sizes, seconds, cpu = [], [], []
    size = SMALLEST
    while True:
        message = _prepare(transport, key, size, device)
        found = [_timed(message, WARM, gap=gap) for _ in range(5 if size < ENOUGH else 3)]
        late = ends - time.perf_counter() <= 0 and size >= ENOUGH
        # The slowest rank's numbers, so that all ranks choose the same next size.
        warm, used, late_somewhere = slowest([*map(median, zip(*found, strict=True)), float(late)], device)
        sizes.append(float(size))
        seconds.append(warm)
        cpu.append(used)
        further = largest if late_somewhere else min(largest, size * (FACTOR if size >= SHORT else FACTOR**2))
        if warm > 0 and size >= SHORT:  # a slow short message was disturbed
            further = min(further, int(size * LONGEST / warm))
        if 2 * further > largest > further and (warm * largest / size <= LONGEST or size < SHORT):
            further = largest  # avoid two nearly equal sizes
        if further < min(2 * size, largest) or size >= largest:
            break
        size = max(further, SMALLEST * FACTOR)
    [start] = slowest([_starting(_prepare(transport, key, SHORT, device))], device)
    return Curve(tuple(sizes), _rising(seconds), _rising(cpu), start)


def _burst(transport: ProcessGroupTransport, curves: Mapping[Key, Curve], device: torch.device) -> float:
    """Return the seconds that a message gains after a rest. A token bucket gives every size the same; noise does not."""
    key = max(curves, key=lambda key: (curves[key].sizes[-1], key))
    gains = []
    for size in (RESTED, 2 * RESTED):
        message = _prepare(transport, key, size, device)
        times = [(_timed(message, WARM)[0], _timed(message, 1, rest=REST)[0]) for _ in range(3)]
        warm, rested = slowest([median(column) for column in zip(*times, strict=True)], device)
        gains.append(max(0.0, warm - rested))
    burst = min(gains)
    return burst if burst > max(0.002, 0.05 * warm) else 0.0


def _rising(values: Sequence[float]) -> tuple[float, ...]:
    """Make values ascend: a message that took longer than a larger one was disturbed.

    >>> _rising([5.0, 1.0, 2.0])
    (1.0, 1.0, 2.0)
    """
    return tuple(min(values[place:]) for place in range(len(values)))


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A message to start, waited for as the engine does."""

    start: Callable[[], Work]
    output: torch.Tensor

    def wait(self, work: Work) -> None:
        TUNED.wait(work, self.output, None)


def _prepare(transport: ProcessGroupTransport, key: Key, size: int, device: torch.device) -> _Prepared:
    kind, name = key
    dtype = getattr(torch, name) if name else torch.uint8
    world = transport.world_size
    numel = max(1, size // dtype.itemsize)
    numel += -numel % world
    whole = torch.zeros(numel, dtype=dtype, device=device)
    part = torch.zeros(numel // world, dtype=dtype, device=device)
    if kind == "all_reduce":
        return _Prepared(lambda: transport.all_reduce(whole, "sum"), whole)
    if kind == "all_gather":
        return _Prepared(lambda: transport.all_gather(whole, part), whole)
    if kind == "reduce_scatter":
        return _Prepared(lambda: transport.reduce_scatter(part, whole, "sum"), part)
    received = torch.empty_like(whole)
    return _Prepared(lambda: transport.all_to_all(received, whole), received)


def _timed(message: _Prepared, count: int, rest: float = 0.0, gap: float | None = None) -> tuple[float, float]:
    """Return the seconds of the last of ``count`` messages, and the CPU seconds of other threads meanwhile.

    Args:
        message: to send.
        count: messages in a row.
        rest: seconds before the first one.
        gap: seconds before each timed message, between far ranks. They do not leave the barrier together, which makes one
            exchange longer and the next one shorter by as much, so the result is the mean of two.
    """
    _meet()
    if rest:
        time.sleep(rest)
    timed = 1 if gap is None else 2
    for _ in range(count - timed):
        message.wait(message.start())
    seconds = cpu = 0.0
    for _ in range(timed):
        if gap:
            time.sleep(gap)
        before, begun = _other_threads(), time.perf_counter()
        message.wait(message.start())
        seconds += time.perf_counter() - begun
        cpu += max(0.0, _other_threads() - before)
    return seconds / timed, cpu / timed


def _starting(message: _Prepared) -> float:
    """Return the seconds that a rank needs to start a message."""
    taken = []
    for _ in range(9):
        begun = time.perf_counter()
        work = message.start()
        taken.append(time.perf_counter() - begun)
        message.wait(work)
    return median(taken)


def _other_threads() -> float:
    """Return the CPU seconds of all threads but this one, which may spin while it waits."""
    return time.process_time() - time.thread_time()


def _meet() -> None:
    if torch.cuda.is_available() and "nccl" in dist.get_backend():
        torch.cuda.synchronize()
    dist.barrier()


def _together(transport: ProcessGroupTransport, curves: Mapping[Key, Curve], device: torch.device) -> float:
    """Return how much longer two simultaneous messages take than one, latency excluded."""
    key = max(curves, key=lambda key: (curves[key].sizes[-1], key))
    curve = curves[key]
    short = [size for size, taken in zip(curve.sizes, curve.seconds, strict=True) if taken < LONGEST / 4]
    first, second = (_prepare(transport, key, int(max(short, default=SHORT)), device) for _ in range(2))
    alone, both = [], []
    for _ in range(5):
        first.wait(first.start())
        alone.append(_timed(first, 1)[0])
        _meet()
        begun = time.perf_counter()
        works = [(first, first.start()), (second, second.start())]
        for message, work in works:
            message.wait(work)
        both.append(time.perf_counter() - begun)
    one, two = slowest([median(alone), median(both)], device)
    if one <= curve.latency:
        return 2.0
    return min(2.0, max(1.0, (two - curve.latency) / (one - curve.latency)))
