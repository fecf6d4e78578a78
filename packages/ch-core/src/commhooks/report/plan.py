"""Treatment of each parameter by a hook."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from commhooks.bucket import BucketLayout
from commhooks.reduction import Reduction, StepContext
from commhooks.report.text import size
from commhooks.requests import trip_bytes
from commhooks.volume import LATER


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


USUAL_SHAPES = {"linear.weight": (4096, 1024), "conv.weight": (256, 128, 3, 3), "norm.weight": (1024,)}


def plan_shapes(reduction: Reduction, world_size: int = 2) -> list[str]:
    """Return one line for each of some usual fp32 parameters: its treatment, and its wire bytes with the hook and without.

    Wire bytes are those of a ring, in which a rank sends (W - 1) / W of the payload in each pass over the network.

    Args:
        reduction: planned at a step after its warm-up.
        world_size: ranks.
    """
    lines = []
    for name, shape in USUAL_SHAPES.items():
        layout = BucketLayout.of_shapes({name: shape})
        [row] = plan_rows(reduction, layout, LATER)
        stages = reduction.plan(layout, StepContext(0, world_size, LATER))
        sent, plain = (trips * (world_size - 1) / world_size for trips in (trip_bytes(stages), 2 * layout.size * 4))
        reason = f" ({row.reason})" if row.reason else ""
        lines.append(f"{name:<14} {shape!s:<18} {row.treatment}{reason}: {size(sent)} of {size(plain)}")
    return lines
