"""The refusals that are documented: which case, which error, which words. Any other error is a failure.

A row without a condition on the case would let a false alarm pass as a refusal, so each has one.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.campaign.draw import Case
from tests.campaign.hooks import entry_of


@dataclass(frozen=True)
class Refusal:
    """One documented reason.

    Attributes:
        name: for the report.
        where: the page that says so.
        error: the class of the error, by name.
        words: what its message holds.
        legal: the cases in which it may come.
    """

    name: str
    where: str
    error: str
    words: str
    legal: Callable[[Case], bool]


REFUSALS = [
    Refusal(
        "a residual of half a matrix",
        "docs/packages/fsdp.md",
        "HookNotSupportedError",
        "reduces between replicas, and there is none",
        lambda case: case.kind == "fsdp2" and case.shards == case.world and "shard" not in entry_of(case.hook).places,
    ),
]


def refusal(case: Case, error: str, message: str) -> Refusal | None:
    """The documented reason for an error of this case, if there is one."""
    for row in REFUSALS:
        if row.error == error and re.search(row.words, message) and row.legal(case):
            return row
    return None
