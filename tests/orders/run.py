"""Runs cases, compares late runs with plain ones, and prints a table.

``python -m tests.orders --seed N --seeds K --only WORD`` runs the cases whose text contains WORD, each with K seeds from N on.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ch_testing import WorkerError, spawn

from .cases import every
from .simulated import simulated
from .ways import Case
from .worker import Run, worker

CHUNK = 12  # cases of one set of processes


@dataclass
class Verdict:
    """Result of a case.

    Attributes:
        seeds: number of late runs.
        wrong: seed -> what is wrong in the late run; ``None`` for the plain run.
        overtaken: collectives that completed after one that was started later, in all late runs.
    """

    case: Case
    seeds: int = 0
    wrong: dict[int | None, str] = field(default_factory=dict)
    overtaken: int = 0


def judge(case: Case, ranks: Sequence[Sequence[Run]]) -> Verdict:
    """Compare every late run with the plain run, and the ranks with each other.

    Args:
        case: the case.
        ranks: runs of each rank, the plain one first.
    """
    found = Verdict(case)
    plain = [runs[0] for runs in ranks]
    if "=error" in plain[0].seen:
        found.wrong[None] = plain[0].seen["=error"]
    common = [{name: value for name, value in run.seen.items() if name.startswith("=")} for run in plain]
    odd = {name for one in common for name in one.keys() | common[0].keys() if one.get(name) != common[0].get(name)}
    if case.equal and odd:
        found.wrong[None] = f"ranks differ in the plain run: {sorted(odd)[:4]}"
    for late in zip(*(runs[1:] for runs in ranks), strict=True):
        found.seeds += 1
        lines = []
        for rank, (one, run) in enumerate(zip(plain, late, strict=True)):
            found.overtaken += run.overtaken
            names = one.seen.keys() | run.seen.keys()
            if odd := sorted(name for name in names if one.seen.get(name) != run.seen.get(name)):
                lines.append(f"rank {rank}: {len(odd)} of {len(names)} results differ: {', '.join(odd[:4])}")
            lines += [f"rank {rank}: {text}" for text in run.violations[:4]]
            lines += [run.seen["=error"]] if "=error" in run.seen else []
        if lines:
            found.wrong[late[0].seed] = "; ".join(dict.fromkeys(lines))
    return found


def run(
    cases: Sequence[Case], seeds: Sequence[int], report: Callable[[Verdict], None] = lambda _: None
) -> list[Verdict]:
    """Return the verdict of every case.

    Args:
        cases: the cases, in any order.
        seeds: of the late runs.
        report: called with each verdict as soon as it is there.
    """
    found = []
    for _, group in groupby(sorted(cases, key=_place), key=_place):
        chosen = list(group)
        while chosen:
            verdicts = _run_some(chosen[:CHUNK], seeds)
            for verdict in verdicts:
                report(verdict)
            found += verdicts
            chosen = chosen[len(verdicts) :]
    return found


def _place(case: Case) -> tuple[str, int, str]:
    """Return what the cases of one set of processes have in common."""
    kind = case.way.split()[0] if case.way.startswith(("simulated", "ch-ft")) else "processes"
    return kind.rstrip(","), case.world, case.size


def _run_some(cases: Sequence[Case], seeds: Sequence[int]) -> list[Verdict]:
    """Return the verdicts of the first cases, up to the first one that ended with an error."""
    kind, world, size = _place(cases[0])
    if kind != "processes":
        alone = simulated if kind == "simulated" else _managed
        try:
            return [judge(cases[0], list(zip(*(alone(cases[0], seed) for seed in (None, *seeds)), strict=True)))]
        except Exception as error:
            return [_failed(cases[0], seeds, error)]
    limit = (60.0 if size == "small" else 120.0) + 6.0 * len(cases) * (1 + len(seeds))
    try:
        ranks = spawn(worker, world, list(cases), list(seeds), timeout=limit, group_timeout=45.0)
    except (WorkerError, TimeoutError) as error:
        if len(cases) > 1:
            return _run_some(cases[:1], seeds)
        return [_failed(cases[0], seeds, error)]
    return [judge(case, runs) for case, *runs in zip(cases, *ranks, strict=False)]


def _failed(case: Case, seeds: Sequence[int], error: Exception) -> Verdict:
    return Verdict(case, len(seeds), dict.fromkeys(seeds, f"{type(error).__name__}: {error}"[-1500:]))


def _managed(case: Case, seed: int | None) -> list[Run]:
    from .managed import managed  # it needs torchft

    return managed(case, seed)


def table(verdicts: Sequence[Verdict]) -> str:
    """Return a Markdown table: hook × way, with the numbers of cases, late runs and wrong results."""
    rows: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        rows[verdict.case.hook or "(no hook)", verdict.case.way].append(verdict)
    lines = ["| hook | way | ranks | cases | late runs | overtaken | wrong |", "|---|---|---|---|---|---|---|"]
    for (hook, way), group in sorted(rows.items()):
        ranks = ", ".join(sorted({f"{v.case.world}{'' if v.case.size == 'small' else ' (ordinary)'}" for v in group}))
        runs, wrong = sum(v.seeds for v in group), sum(len(v.wrong) for v in group)
        overtaken = sum(v.overtaken for v in group)
        lines.append(f"| {hook.replace('|', '')} | {way} | {ranks} | {len(group)} | {runs} | {overtaken} | {wrong} |")
    runs, wrong = sum(v.seeds for v in verdicts), sum(len(v.wrong) for v in verdicts)
    overtaken = sum(v.overtaken for v in verdicts)
    return "\n".join([*lines, f"| all | | | {len(verdicts)} | {runs} | {overtaken} | {wrong} |"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.orders", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="first seed")
    parser.add_argument("--seeds", type=int, default=5, help="late runs of each case")
    parser.add_argument("--only", default="", help="part of a case's text, such as a hook or a way")
    options = parser.parse_args(arguments)
    chosen = [case for case in every() if options.only in str(case)]
    seeds = range(options.seed, options.seed + options.seeds)
    print(f"{len(chosen)} cases, seeds {list(seeds)}", flush=True)

    def report(verdict: Verdict) -> None:
        for seed, text in verdict.wrong.items():
            print(f"WRONG: {verdict.case}, seed {seed}: {text}", flush=True)

    begun = time.monotonic()
    verdicts = run(chosen, list(seeds), report)
    print(table(verdicts))
    print(f"{time.monotonic() - begun:.0f} s")
    return int(any(verdict.wrong for verdict in verdicts))
