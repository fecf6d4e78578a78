"""How a message is sent: held back and coalesced, direct or round a ring, whole or in halves, waited for awake or asleep.

Every such decision is made here, from the layout, the sizes and :class:`CpuTuning` alone, so that all ranks decide alike.
On a GPU and over transports that are not ``free`` most of it does not apply: a message is sent as it was asked for.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from commhooks.bucket import Bucket, BucketLayout, ParamLayout
from commhooks.reduction import Reduction
from commhooks.requests import StagePlan, payload_bytes, trip_bytes
from commhooks.transport.base import Work

_give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


@dataclass(frozen=True, slots=True)
class CpuTuning:
    """What a CPU's messages cost, and what is done about it. ``CpuTuning.off()`` sends everything as it was asked for.

    Changing a number changes which collectives are started, so all ranks of a group need the same; the two of spinning
    alone are each rank's own business.
    """

    # Later stages of at most a 16th of the gradient's bytes wait for the drain. Otherwise waiting for the first stage would
    # hold up the backward, whose cores the threads that carry a message take; hiding so few bytes saves less than that.
    held_share: float = 1 / 16
    # First stages are held back until together they are worth a message: 32 KiB take 5 ms at 50 Mbit/s, a quarter of one at
    # 1 Gbit/s. Without it each small bucket pays a message's latency; with more, the backward hides less of them.
    coalesced_bytes: float = 1 << 15
    # Two ranks exchange up to 128 KiB directly, in one message instead of a ring's two, one after the other. On slow links
    # a direct exchange of more takes longer than the ring's two halves, because both directions share the link.
    direct_bytes: int = 1 << 17
    # From three ranks on a direct exchange sends more than a ring: up to 32 KiB more cost less than the 2 (W - 1) messages
    # that the ring needs in turn. Without this limit the traffic of W ranks would grow with W.
    direct_extra_bytes: int = 1 << 15
    # gloo has two threads a group, each busy with one message: without halves, from 4 MiB on, one of them would idle. Not
    # where a later bucket's message keeps it busy: halves then only cost.
    halved_from: float = 4 << 20
    # Waking up from a blocking wait can take longer than a short message, on a virtual machine by milliseconds. Longer
    # messages, or more than 2 ms, would only take the core from those who carry them.
    spin_bytes: int = 1 << 20
    spin_seconds: float = 0.002
    # A bucket goes through its stages in pieces of the reduction's `piece_bytes`. Whole, its arithmetic and its messages
    # would wait for one another.
    cuts: bool = True

    @classmethod
    def off(cls) -> "CpuTuning":
        """Nothing held back, no direct exchange, no halves, no spinning, no pieces."""
        return cls(-1, 0, -1, -1, math.inf, -1, 0.0, False)

    def pieces(self, bucket: Bucket, reduction: Reduction) -> tuple[Bucket, ...]:
        """What goes through the stages by itself; the bucket as it is, where the last message delivers its average."""
        size = reduction.piece_bytes
        if not size or not self.cuts or reduction.delivers or bucket.device.type != "cpu":
            return (bucket,)
        return pieces(bucket, size)

    def direct(self, size: int, world_size: int) -> bool:
        """Whether so many bytes had better be exchanged directly than round a ring. Two ranks send the same number
        either way.
        """
        return world_size > 1 and size <= self.direct_bytes and (world_size - 2) * size <= self.direct_extra_bytes

    def wait(self, work: Work, output: torch.Tensor, timeout: float | None) -> None:
        """Wait for a collective; for a short one on a CPU without going to sleep, if the work can be asked.

        Args:
            work: under way.
            output: where its result goes.
            timeout: seconds; see :meth:`.Work.wait`.
        """
        done: Any = getattr(work, "is_completed", None)
        if done is not None and output.numel() * output.itemsize <= self.spin_bytes and not output.is_cuda:
            until = time.monotonic() + self.spin_seconds
            while not done() and time.monotonic() < until:
                _give_way()  # whoever else wants the core gets it
        work.wait(timeout)


TUNED = CpuTuning()


def pieces(bucket: Bucket, nbytes: int) -> tuple[Bucket, ...]:
    """A bucket as several of about ``nbytes`` over its storage, cut between parameters; itself where it cannot be cut.

    >>> bucket = Bucket.from_tensors({"a": torch.ones(8, 8), "b": torch.ones(8), "c": torch.ones(8, 8)})
    >>> [[p.name for p in piece.params] for piece in pieces(bucket, 256)]
    [['a', 'b'], ['c']]
    """
    made = _cut(bucket.layout, max(1, nbytes // bucket.layout.dtype.itemsize))
    if len(made) == 1:
        return (bucket,)

    def views() -> tuple[Bucket, ...]:
        last = len(made) - 1
        return tuple(
            Bucket(
                layout, bucket.storage.narrow(0, offset, layout.numel), bucket.index, bucket.is_last and number == last
            )
            for number, (offset, layout) in enumerate(made)
        )

    found = bucket.cached((pieces, nbytes), views)
    for piece in found:
        piece.unused = frozenset(p.name for p in piece.params if p.name in bucket.unused)
    return found


@lru_cache(maxsize=256)
def _cut(layout: BucketLayout, numel: int) -> tuple[tuple[int, BucketLayout], ...]:
    """``(offset, layout)`` of each piece of about ``numel`` elements; a parameter's offset is counted from that of its piece."""
    count = round(layout.numel / numel)
    if count < 2 or layout.segments() != ((0, layout.numel),) or any(p.kind != "dense" for p in layout.params):
        return ((0, layout),)
    groups: list[list[ParamLayout]] = [[]]
    for p in sorted(layout.params, key=lambda p: p.offset):
        held = p.offset - groups[-1][0].offset if groups[-1] else 0
        if held and p.numel and held + p.numel / 2 > layout.numel / count:
            groups.append([])
        groups[-1].append(p)
    made = []
    for group in groups:
        start, size = group[0].offset, sum(p.numel for p in group)
        moved = [replace(p, offset=p.offset - start) for p in group]
        made.append((start, BucketLayout(moved, size, layout.dtype, layout.device)))
    return tuple(made)


class BucketPlan:
    """What buckets of one layout go through, and what follows from it: worked out once, not at every step.

    Args:
        plan: the stages.
        layout: of the buckets.
        tuning: what is worth waiting for.

    Attributes:
        volumes: bytes of each stage, as ``(payload, payload times the passes it makes)``.
        waits: whether what is left after the first stage, if anything, waits for the drain.
        coalesces: whether what is asked for first may be sent with what the next buckets ask for. Not where it ends with
            that, nor where it asks for much (which would be copied), nor for anything but all-reduces (which would not
            become one message).
        merges: of each stage, whether others' requests may become one message with it.
        ends_at_once: whether nothing is left after the first stage: such an average is DDP's to the bit.
        opaque: whether what is received shows only when decoded whether it is finite.
    """

    __slots__ = ("coalesces", "ends_at_once", "merges", "opaque", "plan", "volumes", "waits")

    def __init__(self, plan: tuple[StagePlan, ...], layout: BucketLayout, tuning: CpuTuning = TUNED) -> None:
        self.plan = plan
        self.volumes = [(payload_bytes((stage,)), trip_bytes((stage,))) for stage in plan]
        gradient, later = layout.size * layout.dtype.itemsize, payload_bytes(plan[1:])
        self.waits = layout.device.type == "cpu" and later <= tuning.held_share * gradient
        self.merges = [any(request.kind == "all_reduce" for request in stage) for stage in plan]
        self.ends_at_once = len(plan) < 2
        little = not self.ends_at_once and 0 < self.volumes[0][0] < tuning.coalesced_bytes
        self.coalesces = self.waits and little and all(request.kind == "all_reduce" for request in plan[0])
        self.opaque = any(r.kind in ("all_gather", "all_to_all") for stage in plan for r in stage)
