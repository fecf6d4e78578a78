"""Parameters by what is done to them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from commhooks.bucket import BucketLayout
from commhooks.reduction import Reduction


@dataclass(frozen=True, slots=True)
class PlanRow:
    """How one parameter is treated.

    Attributes:
        name, shape: the parameter.
        treatment: the reduction's name, or ``"plain"``.
        reason: why it is averaged plainly; empty if it is not.
    """

    name: str
    shape: tuple[int, ...]
    treatment: str
    reason: str = ""


def plan_rows(reduction: Reduction, layout: BucketLayout, step: int) -> list[PlanRow]:
    """How a reduction treats each parameter of a layout at a step, in its order."""
    reasons = reduction.routes(layout, step)
    return [
        PlanRow(p.name, p.shape, "plain" if p.name in reasons else reduction.label(p, step), reasons.get(p.name, ""))
        for p in layout.params
    ]


def grouped(rows: Sequence[PlanRow]) -> list[list[PlanRow]]:
    """Parameters with one treatment and one kind of reason; reasons that differ in numbers alone are one kind."""
    groups: dict[tuple[str, str], list[PlanRow]] = {}
    for row in rows:
        groups.setdefault((row.treatment, re.sub(r"\d+", "#", row.reason)), []).append(row)
    return list(groups.values())


def reason_of(rows: Sequence[PlanRow]) -> str:
    """The reasons of a group, two of them in full.

    >>> reason_of([PlanRow("a", (2,), "plain", "1-D"), PlanRow("b", (3,), "plain", "1-D")])
    '1-D'
    """
    reasons = list(dict.fromkeys(row.reason for row in rows if row.reason))
    return "; ".join(reasons[:2]) + (f"; and {len(reasons) - 2} like it" if len(reasons) > 2 else "")


def patterns(names: Sequence[str]) -> str:
    """Names with the numbers of layers left out, and how many there are of each.

    >>> patterns(["h.0.up.weight", "h.1.up.weight", "wte.weight"])
    'h.*.up.weight (2), wte.weight'
    """
    counts: dict[str, list[str]] = {}
    for name in names:
        counts.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name)
    return ", ".join(f"{one} ({len(of)})" if len(of) > 1 else of[0] for one, of in counts.items())
