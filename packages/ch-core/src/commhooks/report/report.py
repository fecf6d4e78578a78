"""The report of an attached hook: what it does to which parameters, what it sends for them, and what it holds back."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from commhooks.adapters.base import Binding
from commhooks.bucket import BucketLayout
from commhooks.engine.engine import Engine
from commhooks.engine.stats import ResidualNorm, combined
from commhooks.reduction import Reduction, StepContext
from commhooks.report.rendering import as_html, as_text
from commhooks.report.rows import PlanRow, grouped, patterns, plan_rows, reason_of
from commhooks.requests import StagePlan
from commhooks.volume import LATER


@dataclass(frozen=True, slots=True)
class ReportRow:
    """Parameters that are treated alike.

    Attributes:
        treatment: the reduction's name, or ``"plain"``.
        why: why they are averaged plainly; empty if they are not.
        names: of the parameters, in model order.
        elements: of all of them.
        gradient_bytes: of their gradients.
        payload_bytes: given to collectives for them in one step, per rank; ``None`` of a foreign hook.
        ratio: how many times fewer bytes cross the network than with plain averaging; ``None`` where nothing does.
        relative_error: ‖residual‖ / ‖gradient + residual‖ of the last step on this rank; ``None`` where there is no
            residual, or the gradient is gone.
        residual_norm: ‖residual‖, unscaled; ``None`` where there is none.
    """

    treatment: str
    why: str
    names: tuple[str, ...]
    elements: int
    gradient_bytes: int
    payload_bytes: int | None = None
    ratio: float | None = None
    relative_error: float | None = None
    residual_norm: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What :meth:`commhooks.CommHook.report` gives: ``print`` it, show it in a notebook, or :meth:`to_dict`.

    Attributes:
        hook: the expression.
        rank, world_size: of the group; a foreign hook's are 0 and 0.
        stats: ``handle.stats()``.
        rows: by treatment.
        total: all rows together.
        warnings: what to know before believing in the hook.
    """

    hook: str
    rank: int
    world_size: int
    stats: Mapping[str, float]
    rows: tuple[ReportRow, ...]
    total: ReportRow
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        return as_text(self.to_dict())

    def _repr_html_(self) -> str:
        return as_html(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
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
        }


def report(hook: str, binding: Binding, rows: Sequence[PlanRow], reduction: Reduction | None) -> Report:
    """The report of a hook in place.

    Args:
        hook: its expression.
        binding: where it is in place.
        rows: ``handle.plan()``.
        reduction: what runs there; ``None`` for a foreign hook, of which nothing is known but what it is given.
    """
    engine, stats = binding.engine, binding.stats()
    if engine is None or reduction is None:
        made = tuple(_foreign(binding.layout, group) for group in grouped(rows))
        return Report(hook, 0, 0, stats, made, _total(made, None, None), ())
    layouts = engine.buckets.layouts or [binding.layout]
    held = engine.residual_norms()
    made = tuple(_row(engine, layouts, group, held) for group in grouped(rows))
    total = _total(made, ratio_of(engine, layouts), combined(held, held))
    world = engine.transport.world_size
    return Report(hook, engine.transport.rank, world, stats, made, total, _warnings(hook, binding, engine, stats))


def ratio_of(engine: Engine, layouts: Sequence[BucketLayout], step: int | None = None) -> float | None:
    """How many times fewer bytes cross the network than with plain averaging; ``None`` where nothing does."""
    gradient = sum(layout.size * layout.dtype.itemsize for layout in layouts)
    trips = sum(request.trip_bytes for layout in layouts for stage in _plan(engine, layout, step) for request in stage)
    return engine.reduction.trips * gradient / trips if trips else None


def never_compresses(hook: str, binding: Binding) -> str | None:
    """Why a lossy hook never sends less than plain averaging on this model, not even after its warm-up; ``None`` if
    it does. From the shapes alone.
    """
    engine = binding.engine
    if engine is None or not engine.reduction.lossy or not binding.layout.params:
        return None
    ratio = ratio_of(engine, [binding.layout], LATER)
    if ratio is None or ratio > 1:
        return None
    plainly = [row for row in plan_rows(engine.reduction, binding.layout, LATER) if row.reason]
    all_plain = len(plainly) == len(binding.layout.params)
    because = "; ".join(f"{patterns([row.name for row in some])}: {reason_of(some)}" for some in grouped(plainly))
    what = "averages every parameter plainly" if all_plain else f"sends {1 / ratio:.2f} times the bytes of allreduce"
    return (
        f"{hook} never compresses this model: it {what}{f' ({because})' if because else ''}. Choose options that fit its "
        "shapes (a lower rank), or allreduce, which costs no more"
    )


def _plan(engine: Engine, layout: BucketLayout, step: int | None) -> tuple[StagePlan, ...]:
    if step is None:
        return engine.plan(layout)
    return engine.reduction.plan(layout, StepContext(engine.transport.rank, engine.transport.world_size, step))


def _row(
    engine: Engine, layouts: Sequence[BucketLayout], group: Sequence[PlanRow], held: Mapping[str, ResidualNorm]
) -> ReportRow:
    names = frozenset(row.name for row in group)
    chosen = [layout.select(names) for layout in layouts if any(p.name in names for p in layout.params)]
    parts = [
        whole if len(part.params) == len(whole.params) else part  # a bucket that is shared equally is padded
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
        ratio_of(engine, parts),
        back.relative if back is not None else None,
        back.residual if back is not None else None,
    )


def _foreign(layout: BucketLayout, group: Sequence[PlanRow]) -> ReportRow:
    part = layout.select(frozenset(row.name for row in group))
    return ReportRow(
        group[0].treatment, "", tuple(row.name for row in group), part.size, part.size * part.dtype.itemsize
    )


def _total(rows: Sequence[ReportRow], ratio: float | None, held: ResidualNorm | None) -> ReportRow:
    payloads = [row.payload_bytes for row in rows if row.payload_bytes is not None]
    return ReportRow(
        "all",
        "",
        tuple(name for row in rows for name in row.names),
        sum(row.elements for row in rows),
        sum(row.gradient_bytes for row in rows),
        sum(payloads) if len(payloads) == len(rows) else None,
        ratio,
        held.relative if held is not None else None,
        held.residual if held is not None else None,
    )


def _warnings(hook: str, binding: Binding, engine: Engine, stats: Mapping[str, float]) -> tuple[str, ...]:
    found = []
    if engine.transport.world_size == 1:
        found.append("one rank: nothing crosses a network, and every figure of the wire is 0")
    never = never_compresses(hook, binding)
    if never is not None:
        found.append(never)
    elif not stats.get("steps"):
        found.append("no step yet: bytes and ratio are planned from the shapes, errors are not known")
    elif ratio_of(engine, [binding.layout], LATER) is None:
        pass  # nothing is ever sent: compressed is no word for it
    elif engine.reduction.lossy and not stats.get("compressed_steps"):
        found.append(f"none of {stats['steps']:.0f} steps was compressed: the warm-up is not over, or was rolled back")
    return (*found, *engine.reduction.cautions(binding.layout, engine.transport.world_size))
