"""What the network and the machine do with messages like those that the hooks send."""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from ch_bench.advise.link import Curve, Key, Network
from ch_bench.advise.replay import Sent
from ch_bench.advise.workload import slowest
from commhooks.adapters import TUNED, ProcessGroupTransport, Work

SMALLEST, SHORT, FACTOR = 256, 1 << 16, 4  # bytes; each size is so many times the last, of short ones its square
ENOUGH = 1 << 20  # bytes: with less nothing would be known of the bandwidth, so up to it all are tried, late or not
RESTED = 1 << 17  # bytes from which on a token bucket shows
LONGEST = 0.5  # seconds: a larger message is not tried if it would take longer, but extrapolated
WARM = 3  # messages one after another, of which the last is timed: a token bucket is empty by then
REST = 0.15  # seconds in which one fills up again


def probe(sent: Sequence[Sent], group: dist.ProcessGroup, device: torch.device, budget: float) -> Network:
    """Time every kind of message that was sent, from the smallest to the largest, or to the largest that may be tried.

    Args:
        sent: by all candidates.
        group: over which; every rank makes this call.
        device: of the tensors.
        budget: seconds; sizes are left out when they are used up.
    """
    transport = ProcessGroupTransport(group)
    largest: dict[Key, int] = {}
    for one in sent:
        key = (one.kind, one.dtype)
        largest[key] = max(largest.get(key, 0), one.size)
    largest.setdefault(("all_reduce", "float32"), SMALLEST * FACTOR)
    share = slowest([budget], device)[0] / (len(largest) + 1)  # or one rank would try again where another is late
    curves = {key: _curve(transport, key, largest[key], device, share) for key in sorted(largest)}
    return Network(curves, _together(transport, curves, device), _burst(transport, curves, device), spare_cores())


def spare_cores() -> float:
    """Cores of this machine for each rank on it, less the one that it computes on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    hosts: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return max(0.0, cores / hosts.count(socket.gethostname()) - torch.get_num_threads())


def _curve(transport: ProcessGroupTransport, key: Key, largest: int, device: torch.device, budget: float) -> Curve:
    """Seconds by size. When the time is used up, sizes between are left out, not the largest that may be tried: beyond it,
    and below, lines are drawn, and most of a step's bytes are in its largest messages.
    """
    ends = time.perf_counter() + budget
    sizes, seconds, cpu = [], [], []
    size = SMALLEST
    while True:
        message = _message(transport, key, size, device)
        found = [_timed(message, WARM) for _ in range(5 if size < ENOUGH else 3)]
        # The slowest rank's, so that all of them decide alike what to try next.
        late = ends - time.perf_counter() <= 0 and size >= ENOUGH
        warm, used, late_somewhere = slowest([*map(median, zip(*found, strict=True)), float(late)], device)
        sizes.append(float(size))
        seconds.append(warm)
        cpu.append(used)
        further = largest if late_somewhere else min(largest, size * (FACTOR if size >= SHORT else FACTOR**2))
        if warm > 0 and size >= SHORT:  # a short one that was slow was disturbed
            further = min(further, int(size * LONGEST / warm))
        if 2 * further > largest > further and (warm * largest / size <= LONGEST or size < SHORT):
            further = largest  # not two sizes that are nearly the same
        if further < min(2 * size, largest) or size >= largest:
            break
        size = max(further, SMALLEST * FACTOR)
    [start] = slowest([_starting(_message(transport, key, SHORT, device))], device)
    return Curve(tuple(sizes), _rising(seconds), _rising(cpu), start)


def _burst(transport: ProcessGroupTransport, curves: Mapping[Key, Curve], device: torch.device) -> float:
    """Seconds by which a message after a rest is faster than one that follows others: the same for every size if a bucket
    of tokens gives them; noise gives one of them something.
    """
    key = max(curves, key=lambda key: (curves[key].sizes[-1], key))
    gains = []
    for size in (RESTED, 2 * RESTED):
        message = _message(transport, key, size, device)
        times = [(_timed(message, WARM)[0], _timed(message, 1, rest=REST)[0]) for _ in range(3)]
        warm, rested = slowest([median(column) for column in zip(*times, strict=True)], device)
        gains.append(max(0.0, warm - rested))
    burst = min(gains)
    return burst if burst > max(0.002, 0.05 * warm) else 0.0


def _rising(values: Sequence[float]) -> tuple[float, ...]:
    """No message takes longer than a larger one: what was measured so was disturbed.

    >>> _rising([5.0, 1.0, 2.0])
    (1.0, 1.0, 2.0)
    """
    return tuple(min(values[place:]) for place in range(len(values)))


def _timed(message: "_Message", count: int, rest: float = 0.0) -> tuple[float, float]:
    """Seconds of the last of some messages one after another, and those of this process's other threads for it."""
    _meet()
    if rest:
        time.sleep(rest)
    for _ in range(count - 1):
        message.wait(message.start())
    before, begun = _others(), time.perf_counter()
    message.wait(message.start())
    return time.perf_counter() - begun, max(0.0, _others() - before)


def _starting(message: "_Message") -> float:
    """Seconds in which a message is started."""
    taken = []
    for _ in range(9):
        begun = time.perf_counter()
        work = message.start()
        taken.append(time.perf_counter() - begun)
        message.wait(work)
    return median(taken)


def _others() -> float:
    """CPU seconds of all threads but this one, which may wait awake."""
    return time.process_time() - time.thread_time()


def _meet() -> None:
    if torch.cuda.is_available() and dist.get_backend() == "nccl":
        torch.cuda.synchronize()
    dist.barrier()


def _together(transport: ProcessGroupTransport, curves: Mapping[Key, Curve], device: torch.device) -> float:
    """How much longer two messages take at once than one, what they take besides the latency: of long ones, whose time is
    not mostly latency, if they are not too long to be tried often.
    """
    key = max(curves, key=lambda key: (curves[key].sizes[-1], key))
    curve = curves[key]
    short = [size for size, taken in zip(curve.sizes, curve.seconds, strict=True) if taken < LONGEST / 4]
    first, second = (_message(transport, key, int(max(short, default=SHORT)), device) for _ in range(2))
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


@dataclass(frozen=True, slots=True)
class _Message:
    """A kind of message, and how an engine waits for one."""

    start: Callable[[], Work]
    output: torch.Tensor

    def wait(self, work: Work) -> None:
        TUNED.wait(work, self.output, None)


def _message(transport: ProcessGroupTransport, key: Key, size: int, device: torch.device) -> _Message:
    kind, name = key
    dtype = getattr(torch, name) if name else torch.uint8
    world = transport.world_size
    numel = max(1, size // dtype.itemsize)
    numel += -numel % world
    whole = torch.zeros(numel, dtype=dtype, device=device)
    part = torch.zeros(numel // world, dtype=dtype, device=device)
    if kind == "all_reduce":
        return _Message(lambda: transport.all_reduce(whole, "sum"), whole)
    if kind == "all_gather":
        return _Message(lambda: transport.all_gather(whole, part), whole)
    if kind == "reduce_scatter":
        return _Message(lambda: transport.reduce_scatter(part, whole, "sum"), part)
    received = torch.empty_like(whole)
    return _Message(lambda: transport.all_to_all(received, whole), received)
