"""The documented refusals, each with its cases, its error and its words. Any other error is a failure.

Each row has a condition on the case. Without it a false alarm would pass as a refusal.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.campaign.draw import Case
from tests.campaign.hooks import entry_of


@dataclass(frozen=True)
class Refusal:
    """One documented reason.

    Attributes:
        name: name in the report.
        where: the page that documents it.
        error: the class of the error, by name.
        words: text in its message.
        legal: the cases that may raise it.
    """

    name: str
    where: str
    error: str
    words: str
    legal: Callable[[Case], bool]


def _uneven(case: Case) -> bool:
    """True if the nodes are listed and have different sizes."""
    return case.nodes.startswith("[") and len({len(node) for node in json.loads(case.nodes)}) > 1


REFUSALS = [
    Refusal(
        "nodes of different sizes",
        "docs/several_nodes.md",
        "HookNotSupportedError",
        "the nodes have different numbers of ranks",
        _uneven,
    ),
    Refusal(
        "ranks that fill no whole number of nodes",
        "docs/several_nodes.md",
        "HookConfigError",
        "cannot be cut into nodes",
        lambda case: case.nodes.isdigit() and bool(case.world % int(case.nodes)),
    ),
    Refusal(
        "a residual of half a matrix",
        "docs/packages/fsdp.md",
        "HookNotSupportedError",
        "reduces between replicas, and there is none",
        lambda case: (
            case.kind in {"fsdp2", "gather"} and case.shards == case.world and "shard" not in entry_of(case.hook).places
        ),
    ),
]


def refusal(case: Case, error: str, message: str) -> Refusal | None:
    """Return the documented reason for an error of this case, or None."""
    for row in REFUSALS:
        if row.error == error and re.search(row.words, message) and row.legal(case):
            return row
    return None
