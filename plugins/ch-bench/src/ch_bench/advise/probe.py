"""What the network and the machine do with messages like those that the hooks send."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from ch_bench.advise.emulated import Sent
from ch_bench.advise.link import Curve, Key, Network
from ch_bench.advise.workload import slowest
from commhooks.adapters import ProcessGroupTransport, Work

SMALLEST, SHORT, FACTOR = 256, 1 << 16, 4  # bytes; each size is so many times the last, of short ones its square
ENOUGH = 1 << 20  # bytes: with less nothing would be known of the bandwidth, so up to it all are tried, late or not
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
    curves, bursts = {}, []
    for key in sorted(largest):
        curves[key], burst = _curve(transport, key, largest[key], device, share)
        bursts += [burst] if burst is not None else []
    burst = median(bursts) if bursts else 0.0
    return Network(curves, _together(transport, device), burst, spare_cores())


def spare_cores() -> float:
    """Cores of this machine for each rank on it, less the one that it computes on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    hosts: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return max(0.0, cores / hosts.count(socket.gethostname()) - torch.get_num_threads())


def _curve(
    transport: ProcessGroupTransport, key: Key, largest: int, device: torch.device, budget: float
) -> tuple[Curve, float | None]:
    """Sizes and times, and the seconds by which a message after a rest is faster; ``None`` if none was long enough."""
    ends = time.perf_counter() + budget
    sizes, seconds, cpu, gains = [], [], [], []
    size, left = SMALLEST, budget
    while True:
        start = _message(transport, key, size, device)
        repeats = (5 if size < 1 << 20 else 3) if left > 0 else 2
        found = [_timed(start, WARM) for _ in range(repeats)]
        rested = [_timed(start, 1, rest=REST)[0] for _ in range(repeats)] if size >= 1 << 17 else [0.0]
        warm, used = median(one[0] for one in found), median(one[1] for one in found)
        # The slowest rank's, so that all of them decide alike what to try next.
        warm, used, rest, left = slowest([warm, used, median(rested), ends - time.perf_counter()], device)
        sizes.append(float(size))
        seconds.append(warm)
        cpu.append(used)
        gains += [max(0.0, warm - rest)] if rest else []
        slow = warm * FACTOR > LONGEST and size >= SHORT  # a short one that was slow was disturbed
        if size >= largest or slow or (left <= 0 and size >= ENOUGH):
            break
        size = min(size * (FACTOR if size >= SHORT else FACTOR**2), max(largest, SMALLEST * FACTOR))
    # A bucket of tokens gives every message that is larger than itself the same; noise gives one of them something.
    burst = min(gains[-2:]) if len(gains) > 1 else None
    sure = burst if burst is None or burst > max(0.002, 0.05 * seconds[-1]) else 0.0
    return Curve(tuple(sizes), _rising(seconds), _rising(cpu)), sure


def _rising(values: Sequence[float]) -> tuple[float, ...]:
    """No message takes longer than a larger one: what was measured so was disturbed.

    >>> _rising([5.0, 1.0, 2.0])
    (1.0, 1.0, 2.0)
    """
    return tuple(min(values[place:]) for place in range(len(values)))


def _timed(start: Callable[[], Work], count: int, rest: float = 0.0) -> tuple[float, float]:
    """Seconds of the last of some messages one after another, and those of this process's cores for it."""
    _meet()
    if rest:
        time.sleep(rest)
    for _ in range(count - 1):
        start().wait(None)
    before, begun = time.process_time(), time.perf_counter()
    start().wait(None)
    return time.perf_counter() - begun, time.process_time() - before


def _meet() -> None:
    if torch.cuda.is_available() and dist.get_backend() == "nccl":
        torch.cuda.synchronize()
    dist.barrier()


def _together(transport: ProcessGroupTransport, device: torch.device) -> float:
    """How much longer two messages of 256 KiB take at once than one."""
    first, second = (_message(transport, ("all_reduce", "float32"), 1 << 18, device) for _ in range(2))
    alone, both = [], []
    for _ in range(5):
        first().wait(None)
        alone.append(_timed(first, 1)[0])
        _meet()
        begun = time.perf_counter()
        works = [first(), second()]
        for work in works:
            work.wait(None)
        both.append(time.perf_counter() - begun)
    one, two = slowest([median(alone), median(both)], device)
    return min(2.0, max(1.0, two / one))


def _message(transport: ProcessGroupTransport, key: Key, size: int, device: torch.device) -> Callable[[], Work]:
    kind, name = key
    dtype = getattr(torch, name) if name else torch.uint8
    world = transport.world_size
    numel = max(1, size // dtype.itemsize)
    numel += -numel % world
    whole = torch.zeros(numel, dtype=dtype, device=device)
    part = torch.zeros(numel // world, dtype=dtype, device=device)
    if kind == "all_reduce":
        return lambda: transport.all_reduce(whole, "sum")
    if kind == "all_gather":
        return lambda: transport.all_gather(whole, part)
    if kind == "reduce_scatter":
        return lambda: transport.reduce_scatter(part, whole, "sum")
    received = torch.empty_like(whole)
    return lambda: transport.all_to_all(received, whole)
