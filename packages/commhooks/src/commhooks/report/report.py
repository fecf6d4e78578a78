"""The report of an attached hook: treatment, bytes, error and residual of each group of parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ch_core import (
    LATER,
    BucketLayout,
    CpuTuning,
    Engine,
    Plain,
    RankCheck,
    Reduction,
    RequestPlan,
    ResidualNorm,
    StagePlan,
    combined,
    residual_norms,
    trip_bytes,
)
from commhooks.adapters.base import Binding
from commhooks.report.plan_table import NodeBytes, PlanRow, grouped, node_bytes, patterns, plan_rows, reason_of
from commhooks.report.text import as_html, as_text

_LESS = 1.02  # times fewer bytes than plain averaging, from which on a hook compresses


@dataclass(frozen=True, slots=True)
class ReportRow:
    """Parameters with one treatment.

    Attributes:
        treatment: the reduction's name, or ``"plain"``.
        why: reason for plain averaging; empty otherwise.
        names: of the parameters, in model order.
        elements: in all of them.
        gradient_bytes: of their gradients.
        payload_bytes: given to collectives for them in one step, per rank; None for a foreign hook.
        wire_bytes: that this rank then sends in one step, if all-reduces go round a ring; None for a foreign hook.
        ratio: bytes on the network with plain averaging, divided by bytes with this hook; None if nothing is sent.
        relative_error: ‖residual‖ / ‖gradient + residual‖ of the last step on this rank; None without a residual, or
            if the gradient is gone.
        residual_norm: ‖residual‖, unscaled; None without a residual.
    """

    treatment: str
    why: str
    names: tuple[str, ...]
    elements: int
    gradient_bytes: int
    payload_bytes: int | None = None
    wire_bytes: float | None = None
    ratio: float | None = None
    relative_error: float | None = None
    residual_norm: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Result of :meth:`commhooks.CommHook.report`. Print it, show it in a notebook, or call :meth:`to_dict`.

    Attributes:
        hook: expression.
        rank, world_size: of the group; 0 and 0 for a foreign hook.
        stats: `handle.stats()`.
        rows: by treatment.
        total: all rows together.
        warnings: sentences on problems, e.g. that the hook never compresses this model, or that ranks have drifted apart.
        node: planned bytes of this rank's node in a step; None without a hook of two levels, which knows the nodes.
        rank_checks: sentence on the comparisons of parameters across ranks; empty if they are off.
        link: between ranks that are far apart; empty if they are near.
        seconds: since the hook was attached.
    """

    hook: str
    rank: int
    world_size: int
    stats: Mapping[str, float]
    rows: tuple[ReportRow, ...]
    total: ReportRow
    warnings: tuple[str, ...]
    node: NodeBytes | None = None
    rank_checks: str = ""
    link: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return as_text(self.to_dict())

    def _repr_html_(self) -> str:
        return as_html(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        rows = [{**asdict(row), "names": list(row.names), "pattern": patterns(row.names)} for row in self.rows]
        total = asdict(self.total)
        return {
            "hook": self.hook,
            "rank": self.rank,
            "world_size": self.world_size,
            "stats": dict(self.stats),
            "groups": rows,
            "total": {key: total[key] for key in total if key not in ("names", "treatment", "why")},
            "warnings": list(self.warnings),
            "node": self.node._asdict() if self.node is not None else None,
            "rank_checks": self.rank_checks,
            "link": self.link,
            "seconds": self.seconds,
        }


def report(
    hook: str,
    binding: Binding,
    rows: Sequence[PlanRow],
    reduction: Reduction | None,
    check: RankCheck | None = None,
    seconds: float = 0.0,
) -> Report:
    """Return the report of an attached hook.

    Args:
        hook: expression.
        binding: of the hook.
        rows: `handle.plan()`.
        reduction: that runs; None for a foreign hook, because its bytes are unknown.
        check: comparison of parameters across ranks, if it is on.
        seconds: since the hook was attached.
    """
    engine, stats = binding.engine, binding.stats()
    drift = () if check is None or check.drift is None else (f"ranks have drifted apart. {check.drift}",)
    checks = "" if check is None else _checks(check)
    if engine is None or reduction is None:
        made = tuple(_foreign(binding.layouts, group) for group in grouped(rows))
        return Report(hook, 0, 0, stats, made, _total(made, None, None), drift, None, checks, seconds=seconds)
    layouts = engine.step.layouts or binding.layouts
    held = residual_norms(engine)
    made = tuple(_row(engine, layouts, group, held) for group in grouped(rows))
    total = _total(made, ratio_of(engine, layouts), combined(held, held))
    world = engine.transport.world_size
    warnings = (*drift, *_warnings(hook, binding, engine, stats))
    rank, node = engine.transport.rank, _node(engine, layouts)
    link = str(engine.transport.link or "")
    return Report(hook, rank, world, stats, made, total, warnings, node, checks, link, seconds)


def _node(
    engine: Engine, layouts: Sequence[BucketLayout], step: int | None = None, plain: bool = False
) -> NodeBytes | None:
    context = engine.context()
    if context.topology is None or context.topology.ranks_per_node == 1:
        return None
    tuning = engine.messenger.tuning if engine.transport.free else CpuTuning.off()
    reduction = Plain() if plain else engine.reduction
    return node_bytes(reduction, layouts, context.topology, context.step if step is None else step, tuning=tuning)


def ratio_of(engine: Engine, layouts: Sequence[BucketLayout], step: int | None = None) -> float | None:
    """Return bytes on the network with plain averaging, divided by bytes with the hook; None if nothing is sent."""
    gradient = sum(layout.size * layout.dtype.itemsize for layout in layouts)
    each = engine.context().size("node")
    trips = sum(trip_bytes(_plan(engine, layout, step), each) for layout in layouts)
    return engine.reduction.trips * gradient / trips if trips else None


def planned_bytes(engine: Engine, layouts: Sequence[BucketLayout], step: int) -> tuple[float, float]:
    """Return the bytes that a rank sends in a step with the hook, and with plain averaging of the same axis."""
    world = engine.transport.world_size
    gradient = sum(layout.size * layout.dtype.itemsize for layout in layouts)
    requests = [request for layout in layouts for stage in _plan(engine, layout, step) for request in stage]
    return _sent(engine, requests), engine.reduction.trips * gradient * (world - 1) / world


def planned_node_bytes(engine: Engine, layouts: Sequence[BucketLayout], step: int) -> tuple[float, float] | None:
    """Return the bytes that leave a node in a step with the hook, and with plain averaging; None without known nodes."""
    found, plain = (_node(engine, layouts, step, plain) for plain in (False, True))
    if found is None or plain is None:
        return None
    return found.leaving, plain.leaving * engine.reduction.trips / Plain.trips


def _sent(engine: Engine, requests: Sequence[RequestPlan]) -> float:
    """Return the bytes that this rank sends for some requests, if all-reduces go round a ring."""
    context = engine.context()
    return sum(r.trip_bytes * (context.size(r.scope) - 1) / context.size(r.scope) for r in requests)


def never_compresses(hook: str, binding: Binding) -> str | None:
    """Return why a lossy hook never sends less than plain averaging on this model, even after its warm-up.

    A model may have a few parameters of a wider dtype, which the hook shortens. That does not count as less below 2 %.

    Returns:
        A sentence derived from the shapes and the nodes, or None if the hook sends less.
    """
    engine = binding.engine
    if engine is None or not engine.reduction.lossy or not binding.layout.params:
        return None
    topology = engine.context().topology
    if engine.reduction.levels and topology is not None and len(topology.nodes) == 1 < topology.world_size:
        return (
            f"{hook} has nothing to send between nodes: all {topology.world_size} ranks are on one node. It pays on several "
            "nodes. Use the hook inside it on this node, or tell the nodes by nodes="
        )
    ratio = ratio_of(engine, binding.layouts, LATER)
    if ratio is None or ratio > _LESS:
        return None
    plainly = [row for row in plan_rows(engine.reduction, binding.layout, LATER) if row.reason]
    all_plain = len(plainly) == len(binding.layout.params)
    because = "; ".join(f"{patterns([row.name for row in some])}: {reason_of(some)}" for some in grouped(plainly))
    does = "averages every parameter plainly" if all_plain else f"sends {1 / ratio:.2f} times the bytes of allreduce"
    return (
        f"{hook} never compresses this model: it {does}{f' ({because})' if because else ''}. Choose options that fit its "
        "shapes (a lower rank), or allreduce, which costs no more"
    )


def _plan(engine: Engine, layout: BucketLayout, step: int | None) -> tuple[StagePlan, ...]:
    if step is None:
        return engine.plan(layout)
    return engine.reduction.plan(layout, engine.context(step))


def _row(
    engine: Engine, layouts: Sequence[BucketLayout], group: Sequence[PlanRow], held: Mapping[str, ResidualNorm]
) -> ReportRow:
    names = frozenset(row.name for row in group)
    chosen = [layout.select(names) for layout in layouts if any(p.name in names for p in layout.params)]
    parts = [
        whole if len(part.params) == len(whole.params) else part  # a bucket that all ranks share equally is padded
        for whole, part in ((layout, layout.select(names)) for layout in layouts)
        if part.params
    ]
    plans = [request for part in parts for stage in engine.plan(part) for request in stage]
    back = combined(held, [row.name for row in group])
    return ReportRow(
        group[0].treatment,
        reason_of(group),
        tuple(row.name for row in group),
        sum(part.size for part in chosen),
        sum(part.size * part.dtype.itemsize for part in chosen),
        sum(request.payload_bytes for request in plans),
        _sent(engine, plans),
        ratio_of(engine, parts),
        back.relative if back is not None else None,
        back.residual if back is not None else None,
    )


def _foreign(layouts: Sequence[BucketLayout], group: Sequence[PlanRow]) -> ReportRow:
    names = frozenset(row.name for row in group)
    parts = [layout.select(names) for layout in layouts]
    return ReportRow(
        group[0].treatment,
        "",
        tuple(row.name for row in group),
        sum(part.size for part in parts),
        sum(part.size * part.dtype.itemsize for part in parts),
    )


def _total(rows: Sequence[ReportRow], ratio: float | None, held: ResidualNorm | None) -> ReportRow:
    payloads = [row.payload_bytes for row in rows if row.payload_bytes is not None]
    sent = [row.wire_bytes for row in rows if row.wire_bytes is not None]
    return ReportRow(
        "all",
        "",
        tuple(name for row in rows for name in row.names),
        sum(row.elements for row in rows),
        sum(row.gradient_bytes for row in rows),
        sum(payloads) if len(payloads) == len(rows) else None,
        sum(sent) if len(sent) == len(rows) else None,
        ratio,
        held.relative if held is not None else None,
        held.residual if held is not None else None,
    )


def _checks(check: RankCheck) -> str:
    if check.note:
        return f"parameters are not compared across ranks: {check.note}"
    times = f"{check.checks} time{'s' * (check.checks != 1)}, every {check.every} steps"
    return f"parameters compared across ranks {times}: " + ("equal" if check.drift is None else "not always equal")


def _warnings(hook: str, binding: Binding, engine: Engine, stats: Mapping[str, float]) -> tuple[str, ...]:
    found = []
    never = never_compresses(hook, binding)
    if never is not None:
        found.append(never)
    elif not stats.get("steps"):
        found.append("no step yet: bytes and ratio are planned from the shapes, errors are unknown")
    elif ratio_of(engine, binding.layouts, LATER) is None:
        pass  # nothing is ever sent, so no step is a compressed one
    elif engine.reduction.lossy and not stats.get("compressed_steps"):
        found.append(f"none of {stats['steps']:.0f} steps was compressed: the warm-up is not over, or was rolled back")
    return (*found, *cautions(engine.reduction, binding.layouts, engine.compressing_ranks))


def cautions(reduction: Reduction, layouts: Sequence[BucketLayout], world_size: int) -> list[str]:
    """Return the warnings of a reduction on a model over ``world_size`` ranks, each once."""
    return list(dict.fromkeys(line for layout in layouts for line in reduction.cautions(layout, world_size)))
