"""Treatment of each parameter by a hook."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ch_core import (
    LATER,
    TUNED,
    BucketLayout,
    CpuTuning,
    Reduction,
    RequestPlan,
    Scope,
    StagePlan,
    StepContext,
    Topology,
)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Treatment of one parameter.

    Attributes:
        name, shape: of the parameter.
        treatment: the reduction's name, or `"plain"` for exact averaging.
        reason: why the parameter is averaged plainly; empty otherwise.
    """

    name: str
    shape: tuple[int, ...]
    treatment: str
    reason: str = ""


def plan_rows(reduction: Reduction, layout: BucketLayout, step: int) -> list[PlanRow]:
    """Return the treatment of each parameter of a layout at a step, in the layout's order."""
    reasons = reduction.routes(layout, step)
    return [
        PlanRow(p.name, p.shape, "plain" if p.name in reasons else reduction.label(p, step), reasons.get(p.name, ""))
        for p in layout.params
    ]


def grouped(rows: Sequence[PlanRow]) -> list[list[PlanRow]]:
    """Group parameters with one treatment and one kind of reason. Reasons that differ only in numbers are one kind."""
    groups: dict[tuple[str, str], list[PlanRow]] = {}
    for row in rows:
        groups.setdefault((row.treatment, re.sub(r"\d+", "#", row.reason)), []).append(row)
    return list(groups.values())


def reason_of(rows: Sequence[PlanRow]) -> str:
    """Return the reasons of a group, two of them in full.

    >>> reason_of([PlanRow("a", (2,), "plain", "1-D"), PlanRow("b", (3,), "plain", "1-D")])
    '1-D'
    """
    reasons = list(dict.fromkeys(row.reason for row in rows if row.reason))
    return "; ".join(reasons[:2]) + (f"; and {len(reasons) - 2} like it" if len(reasons) > 2 else "")


def patterns(names: Sequence[str]) -> str:
    """Return names with `*` for the numbers of layers, each with its count.

    >>> patterns(["h.0.up.weight", "h.1.up.weight", "wte.weight"])
    'h.*.up.weight (2), wte.weight'
    """
    counts: dict[str, list[str]] = {}
    for name in names:
        counts.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name)
    return ", ".join(f"{one} ({len(of)})" if len(of) > 1 else of[0] for one, of in counts.items())


class NodeBytes(NamedTuple):
    """Bytes that all ranks of one node send in a step.

    Attributes:
        inside: to ranks of the same node.
        leaving: to other nodes, over the link of the node. The largest of all nodes.
    """

    inside: float
    leaving: float


def node_bytes(
    reduction: Reduction,
    layouts: Iterable[BucketLayout],
    topology: Topology,
    step: int = LATER,
    *,
    tuning: CpuTuning = TUNED,
) -> NodeBytes:
    """Return the bytes of a node in a step, from the plan.

    All-reduces, all-gathers and reduce-scatters go round a ring in the order of the ranks, in which only the last rank of a
    node sends to another node. An all-to-all sends a part to every rank. So does an all-reduce that ranks exchange directly.
    The engine may merge short all-reduces of several buckets, which is not planned.

    Args:
        reduction: flat, or with two levels.
        layouts: of the buckets of a step, or of their pieces (:attr:`.Reduction.piece_bytes`).
        topology: the nodes.
        step: number of the step, after every warm-up by default.
        tuning: decides on direct exchanges, as on gloo and CPUs. ``CpuTuning.off()`` for other transports.

    Example:
        >>> from commhooks import Plain
        >>> node_bytes(Plain(), [BucketLayout.of_shapes({"w": (1024,)})], Topology.even(8, 4))
        NodeBytes(inside=21936.0, leaving=7744.0)
    """
    # Ranks with one place plan the same requests. With one level all ranks do.
    places = topology.places if reduction.levels else topology.places[:1]
    contexts = [StepContext(rank, topology.world_size, step, topology=topology, link=tuning.link) for rank in places]
    plans = [[reduction.plan(layout, ctx) for ctx in contexts] for layout in layouts]
    status = RequestPlan("all_reduce", topology.world_size + 1, torch.float32)
    sent_first = _messages(((status,), ()), topology, tuning)
    messages = [
        [*sent_first, *(m for plan in plans for m in _messages(plan[i], topology, tuning))] for i in range(len(places))
    ]
    inside, leaving = 0.0, 0.0
    for node in topology.nodes:
        sent = out = 0.0
        for rank in node:
            for message in messages[topology.place(rank) if reduction.levels else 0]:
                size = topology.size(message.scope)
                mine = message.trip_bytes * (size - 1) / size
                sent += mine
                out += mine * topology.leaving(rank, message.scope, ring=message.ring)
        if out >= leaving:
            inside, leaving = sent - out, out
    return NodeBytes(inside, leaving)


class _Message(NamedTuple):
    """One collective: bytes of its parts for all ranks, times passes; and if it goes round a ring."""

    scope: Scope
    trip_bytes: int
    ring: bool


def _messages(plan: Sequence[StagePlan], topology: Topology, tuning: CpuTuning) -> list[_Message]:
    """Return the messages of one bucket. All-reduces of a stage with equal dtype, op, wire and scope are one message."""
    made = []

    def by_ring(scope: Scope) -> bool:  # far ranks send to each other directly
        return tuning.link is None or scope == "node"

    for stage in plan:
        reduced: dict[object, list[RequestPlan]] = {}
        for request in stage:
            if request.kind == "all_reduce":
                reduced.setdefault((request.dtype, request.op, request.wire, request.scope), []).append(request)
            else:
                ring = request.kind != "all_to_all" and by_ring(request.scope)
                made.append(_Message(request.scope, request.payload_bytes, ring))
        for group in reduced.values():
            first, nbytes = group[0], sum(request.payload_bytes for request in group)
            ranks = topology.size(first.scope)
            # Otherwise ranks add in DDP's order.
            free = len(plan) > 1 or ranks == 2 or first.wire is not None or tuning.link is not None
            direct = free and first.op != "max" and first.dtype.is_floating_point and tuning.direct(nbytes, ranks)
            made.append(_Message(first.scope, nbytes * (ranks if direct else 2), not direct and by_ring(first.scope)))
    return made
