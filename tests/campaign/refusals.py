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
    return any(
        nodes.startswith("[") and len({len(node) for node in json.loads(nodes)}) > 1 for nodes, _ in _groups(case)
    )


def _unfilled(case: Case) -> bool:
    """True if the ranks cannot be cut into nodes of the given number."""
    return any(nodes.isdigit() and bool(ranks % int(nodes)) for nodes, ranks in _groups(case))


def _miscounted(case: Case) -> bool:
    """True if ``nodes=`` lists another number of ranks."""
    return any(nodes.startswith("[") and sum(map(len, json.loads(nodes))) != ranks for nodes, ranks in _groups(case))


def _groups(case: Case) -> list[tuple[str, int]]:
    """Return ``nodes=`` and the number of ranks of every group that reduces or gathers over two levels."""
    return [(case.nodes, case.world), (case.gather_nodes, case.shards)]


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
        _unfilled,
    ),
    Refusal(
        "nodes of another number of ranks", "docs/several_nodes.md", "HookConfigError", "lists .* ranks", _miscounted
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
