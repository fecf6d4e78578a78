"""Decides how buckets are cut, and how each message is sent: coalesced or alone, direct or ring, whole or in halves.

Every decision follows from the layout, the sizes and :class:`CpuTuning` alone, so all ranks decide equally. On a GPU, and on
transports that are not ``free``, most of them do not apply. A message is then sent as the reduction asked for it.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from ch_core.bucket import Bucket, BucketLayout, ParamLayout
from ch_core.errors import HookNotSupportedError, HookResultError
from ch_core.link import Link
from ch_core.reduction import Reduction, StepContext
from ch_core.requests import StagePlan, payload_bytes, trip_bytes
from ch_core.topology import Topology
from ch_core.transport.base import LeveledTransport, Transport, Work

_yield_core: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


@dataclass(frozen=True, slots=True)
class CpuTuning:
    """Limits for messages of a CPU. ``CpuTuning.off()`` sends every message as the reduction asked for it.

    All ranks of a group need the same limits, because the limits decide which collectives start. Only the two limits of
    spinning may differ.
    """

    # Later stages of at most a 16th of the gradient's bytes wait for the drain. To wait for the first stage earlier would
    # delay the backward, because threads that carry a message take its cores. Hiding so few bytes saves less.
    deferred_share: float = 1 / 16
    # First stages are collected until they are worth a message. 32 KiB take 5 ms at 50 Mbit/s, and 0.25 ms at 1 Gbit/s.
    # Without this limit each small bucket pays the latency of a message. A higher one hides less behind the backward.
    coalesced_bytes: float = 1 << 15
    # Two ranks exchange up to 128 KiB directly, in one message. A ring needs two, one after the other. On slow links a
    # direct exchange of more bytes takes longer than the ring's two halves, because both directions share the link.
    direct_bytes: int = 1 << 17
    # From three ranks on, a direct exchange sends more bytes than a ring. Up to 32 KiB more cost less than the 2 (W - 1)
    # sequential messages of the ring. Without this limit the traffic of W ranks would grow with W.
    direct_extra_bytes: int = 1 << 15
    # gloo has two threads per group, and each carries one message. From 4 MiB on, halves keep both busy. If a message of a
    # later bucket follows, halves only cost.
    halved_from: float = 4 << 20
    # To wake up from a blocking wait can take longer than a short message, on a virtual machine by milliseconds. For
    # longer messages, or after 2 ms, spinning only takes the core from the threads that carry them.
    spin_bytes: int = 1 << 20
    spin_seconds: float = 0.002
    # A bucket is cut into pieces of the reduction's `piece_bytes`. Arithmetic and messages of a whole bucket would wait for
    # each other.
    cuts: bool = True
    # The link between ranks that are far apart. The engine then waits for no message before the drain, and adds in rank
    # order. Without it a step would take a round trip for each of its buckets.
    link: Link | None = None

    @classmethod
    def off(cls) -> "CpuTuning":
        """Return limits that coalesce, halve, cut and spin nothing, and exchange nothing directly."""
        return cls(-1, 0, -1, -1, math.inf, -1, 0.0, False)

    @classmethod
    def over(cls, link: Link | None) -> "CpuTuning":
        """Return the limits for ranks on this link; the default ones without a link.

        A further message costs half a round trip. So first stages are collected until they take as long, and a message is sent
        whole to every rank unless the additional bytes take longer.
        """
        if link is None:
            return TUNED
        return cls(
            deferred_share=math.inf,
            coalesced_bytes=link.bytes_on_the_way,
            direct_bytes=sys.maxsize,
            direct_extra_bytes=int(link.bytes_on_the_way),
            halved_from=math.inf,
            link=link,
        )

    def direct(self, size: int, world_size: int) -> bool:
        """True if a direct exchange of this many bytes costs less than a ring. Two ranks send the same bytes in both."""
        return world_size > 1 and size <= self.direct_bytes and (world_size - 2) * size <= self.direct_extra_bytes

    def wait(self, work: Work, output: torch.Tensor, timeout: float | None) -> None:
        """Wait for a collective. Spin for a short one on a CPU, if the work has ``is_completed()``.

        Args:
            work: the collective.
            output: receives its result.
            timeout: seconds; see :meth:`.Work.wait`.
        """
        done: Any = getattr(work, "is_completed", None)
        if done is not None and output.numel() * output.itemsize <= self.spin_bytes and output.is_cpu:
            until = time.monotonic() + self.spin_seconds
            while not done() and time.monotonic() < until:
                _yield_core()  # a loop that does not yield takes the core from the thread that carries the message
        work.wait(timeout)  # also after the spin, because it raises the error of a lost message


TUNED = CpuTuning()


def pieces(bucket: Bucket, nbytes: int) -> tuple[Bucket, ...]:
    """Return a bucket as views of about ``nbytes`` each, cut between parameters; the bucket itself if it cannot be cut.

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
    """Return ``(offset, layout)`` of each piece of about ``numel`` elements. Offsets of parameters start at their piece."""
    count = round(layout.numel / numel)
    if count < 2 or layout.segments() != ((0, layout.numel),) or any(p.kind != "dense" for p in layout.params):
        return ((0, layout),)
    groups: list[list[ParamLayout]] = [[]]
    for p in sorted(layout.params, key=lambda p: p.offset):
        taken = p.offset - groups[-1][0].offset if groups[-1] else 0
        if taken and p.numel and taken + p.numel / 2 > layout.numel / count:
            groups.append([])
        groups[-1].append(p)
    made = []
    for group in groups:
        start, size = group[0].offset, sum(p.numel for p in group)
        moved = [replace(p, offset=p.offset - start) for p in group]
        made.append((start, BucketLayout(moved, size, layout.dtype, layout.device)))
    return tuple(made)


class BucketPlan:
    """The stages of buckets with one layout, and the decisions that follow. The engine computes it once per layout.

    Args:
        plan: the stages.
        layout: layout of the buckets.
        tuning: the limits.
        others: plans of the same buckets on the other ranks of a node, if they may differ. All ranks of a node must decide
            equally, so decisions follow from all plans.
        ranks_per_node: see :func:`~ch_core.requests.trip_bytes`.

    Attributes:
        volumes: ``(payload bytes, payload bytes times passes)`` of each stage.
        first_bytes: payload bytes of the first stage, the largest of all ranks.
        deferred: True if later stages wait for the drain.
        coalesces: True if the first stage may be sent together with the next buckets' first stages. False for large requests,
            because merging copies them, for collectives other than all-reduces, which cannot be merged, and for buckets
            with one stage.
        merges: for each stage, True if requests of other buckets may be merged with it.
        one_stage: True if nothing follows the first stage. Such an average equals DDP's to the bit.
        opaque: True if finiteness can be checked only after decoding.
    """

    __slots__ = ("coalesces", "deferred", "first_bytes", "merges", "one_stage", "opaque", "plan", "volumes")

    def __init__(
        self,
        plan: tuple[StagePlan, ...],
        layout: BucketLayout,
        tuning: CpuTuning = TUNED,
        others: Sequence[tuple[StagePlan, ...]] = (),
        ranks_per_node: int = 1,
    ) -> None:
        self.plan = plan
        self.volumes = [(payload_bytes((stage,)), trip_bytes((stage,), ranks_per_node)) for stage in plan]
        plans = (plan, *others)
        if len(counts := {len(one) for one in plans}) > 1:
            raise HookResultError(
                f"the ranks of a node plan {sorted(counts)} stages for one bucket, so their collectives have no common order. A "
                "composition around two_level must yield the same number of stages on all ranks, with an empty one where a "
                "rank asks for nothing; or give it to two_level as the hook between nodes"
            )
        gradient, later = layout.size * layout.dtype.itemsize, max(payload_bytes(one[1:]) for one in plans)
        self.deferred = layout.device.type == "cpu" and later <= tuning.deferred_share * gradient
        stages = [sum(together, ()) for together in zip(*plans, strict=True)]  # requests of all ranks
        self.merges = [any(request.kind == "all_reduce" for request in stage) for stage in stages]
        self.one_stage = len(plan) < 2
        self.first_bytes = max(payload_bytes(one[:1]) for one in plans)
        little = not self.one_stage and 0 < self.first_bytes < tuning.coalesced_bytes
        self.coalesces = self.deferred and little and all(request.kind == "all_reduce" for request in stages[0])
        self.opaque = any(r.kind in ("all_gather", "all_to_all") for stage in stages for r in stage)


class Schedule:
    """Plans of one reduction over one group of ranks, and the decisions that follow from its layouts.

    Args:
        reduction: the reduction.
        transport: of the group.
        tuning: the limits.

    Attributes:
        transport: as given, or the one of the last :meth:`move`.
    """

    def __init__(self, reduction: Reduction, transport: Transport, tuning: CpuTuning) -> None:
        self._reduction, self.transport, self._tuning = reduction, transport, tuning
        self._plans: dict[tuple[BucketLayout, int, Hashable], BucketPlan] = {}
        self._opened = False  # True if the transport knows the nodes that the reduction wants

    @property
    def topology(self) -> Topology | None:
        """The nodes of the ranks; ``None`` if the reduction does not ask for them, or before :meth:`open_levels`."""
        found: Topology | None = getattr(self.transport, "topology", None) if self._reduction.levels else None
        return found

    def move(self, transport: Transport) -> None:
        """Use another group of ranks."""
        self.transport, self._opened = transport, False
        self._plans.clear()  # they may depend on the number of ranks

    def open_levels(self, timeout: float | None) -> None:
        """Learn the nodes of the ranks, if the reduction asks for them. All ranks call it at the same place.

        Args:
            timeout: seconds to wait for a missing rank.

        Raises:
            HookNotSupportedError: the transport has no nodes, or nodes of different sizes.
            RankMismatchError, HookConfigError: see :func:`ch_core.topology.learn`.
        """
        reduction, transport = self._reduction, self.transport
        if self._opened or not reduction.levels:
            return
        if not isinstance(transport, LeveledTransport):
            members = "members join and leave" if transport.elastic else f"its transport is {type(transport).__name__}"
            raise HookNotSupportedError(
                f"{reduction.name} needs ranks that stay on their nodes, and here {members}. Use the hook inside alone"
            )
        if transport.topology is None or (reduction.nodes is not None and not self._opened):
            transport.open_levels(reduction.nodes, timeout)
        self._opened = True

    def context(self, step: int) -> StepContext:
        """Return a step of this rank without state, for plans."""
        transport = self.transport
        return StepContext(transport.rank, transport.world_size, step, topology=self.topology, link=self._tuning.link)

    def plan(self, layout: BucketLayout, ctx: StepContext) -> BucketPlan:
        """Return the plan of buckets with this layout at this step.

        With two levels, ranks of one node may plan different requests to their peers. How messages are sent must not differ
        in a node, so it follows from the plans of all its ranks.
        """
        key = (layout, ctx.world_size, self._reduction.phase(ctx.step))  # a manager changes the number of ranks
        found = self._plans.get(key)
        if found is None:
            own = self._reduction.plan(layout, ctx)
            others = [self._reduction.plan(layout, one) for one in ctx.places() if one.rank != ctx.rank]
            found = self._plans[key] = BucketPlan(own, layout, self._tuning, others, ctx.size("node"))
        return found

    def pieces(self, bucket: Bucket) -> tuple[Bucket, ...]:
        """Return the pieces that pass the stages separately.

        A bucket stays whole if its last message delivers its average, because no arithmetic remains to overlap.
        """
        size = self._reduction.piece_bytes
        if not size or not self._tuning.cuts or self._reduction.delivers or not bucket.storage.is_cpu:
            return (bucket,)
        return pieces(bucket, size)
