"""The report of a campaign: counts, counts per dimension, and every failure with the command that repeats it."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from tests.campaign.run import Outcome

COLUMNS = ("ok", "refused", "torch", "failed")


def column(outcome: Outcome) -> str:
    if outcome.failed:
        return "failed"
    return "torch" if outcome.status == "torch hang" else outcome.status


def by_dimension(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Counter[str]]]:
    """Return dimension -> value -> status -> number of cases."""
    found: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for outcome in outcomes:
        for dimension, value in outcome.case.dimensions().items():
            found[dimension][value][column(outcome)] += 1
    return found


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table with one row per value of each dimension."""
    lines = ["| dimension | value | ok | refused, as documented | plain torch refuses too | failed |"]
    lines.append("|---|---|---|---|---|---|")
    for dimension, values in by_dimension(outcomes).items():
        if len(values) > 1 or dimension == "kind":
            for value, counts in sorted(values.items()):
                cells = " | ".join(str(counts[name]) for name in COLUMNS)
                lines.append(f"| {dimension} | `{value.replace('|', ' ')}` | {cells} |")
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return one line of totals, and the reasons of refusals."""
    totals = Counter(map(column, outcomes))
    lossy = [o for o in outcomes if o.status == "ok" and o.compressed]
    lines = [
        f"{len(outcomes)} cases: {totals['ok']} right ({len(lossy)} of them sent less than plain averaging), "
        f"{totals['refused']} refused as documented, {totals['torch']} that plain torch does not run either, "
        f"{totals['failed']} failed"
    ]
    for status, title in (("refused", "refused"), ("torch", "torch"), ("torch hang", "torch")):
        for what, count in Counter(o.what for o in outcomes if o.status == status).most_common():
            lines.append(f"  {title}: {count} x {what}")
    return "\n".join(lines)


def failure(outcome: Outcome, seed: str, extra: str = "") -> str:
    """Return all facts about one failure."""
    again = f"nox -s campaign -- --seed {seed} --case {outcome.case.number}{extra}"
    return f"FAILED {outcome.status}: {outcome.what}\n  {outcome.case}\n  again: {again}\n{outcome.detail}"
