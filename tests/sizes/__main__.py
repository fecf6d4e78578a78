"""Run every hook on models of ordinary size: ``python -m tests.sizes``. ``--seed N --case K`` repeats one case."""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.sizes.cases import Case, Outcome, run
from tests.sizes.crossings import crossings
from tests.sizes.hooks import WORLDS, cases
from tests.sizes.models import MODELS

GROUP = 24
"""Cases of one set of processes. If a rank dies, the later cases of its group do not run."""


def drawn(seed: str) -> list[Case]:
    """Return a case for every hook, way, number of ranks and size of model, in random order."""
    rng = random.Random(seed)
    made = [Case(row.expr, way, world, size, 0) for row, way, world in cases() for size in MODELS]
    rng.shuffle(made)
    return [Case(one.hook, one.way, one.world, one.size, rng.randrange(10**6)) for one in made]


def run_all(chosen: Iterable[tuple[int, Case]], seed: str, until: float) -> Iterator[Outcome]:
    """Run cases in groups of one number of ranks, and print the wrong ones as they come."""
    by_world: dict[int, list[tuple[int, Case]]] = {}
    for number, case in chosen:
        by_world.setdefault(case.world, []).append((number, case))
    groups = [(world, rows[i : i + GROUP]) for world, rows in by_world.items() for i in range(0, len(rows), GROUP)]
    random.Random(seed).shuffle(groups)
    for world, rows in groups:
        if time.monotonic() > until:
            return
        try:
            outcomes = run([case for _, case in rows], world, timeout=120.0 * len(rows))
        except Exception as error:  # a rank died or hung
            outcomes = [Outcome(case, [f"in a group that failed: {error}"]) for _, case in rows]
        for (number, _), outcome in zip(rows, outcomes, strict=True):
            if outcome.wrong:
                lines = "\n  ".join(outcome.wrong)
                print(f"WRONG --seed {seed} --case {number}: {outcome.case}\n  {lines}", flush=True)
            yield outcome


def table(outcomes: Iterable[Outcome]) -> str:
    """Return the number of cases by hook, way, ranks and size, and the wrong ones among them."""
    right, wrong = Counter[tuple[str, str, int, str]](), Counter[tuple[str, str, int, str]]()
    for one in outcomes:
        key = one.case.hook, one.case.way, one.case.world, one.case.size
        right[key] += not one.wrong
        wrong[key] += bool(one.wrong)
    columns = [(world, size) for world in WORLDS for size in MODELS]
    heads = [f"{world} ranks, {size}" for world, size in columns]
    lines = [f"| hook | way | {' | '.join(heads)} | wrong |", "|---|---|" + "---|" * (len(heads) + 1)]
    for hook, way in dict.fromkeys((row.expr, way) for row, way, _ in cases()):
        keys = [(hook, way, *column) for column in columns]
        if not any(right[key] + wrong[key] for key in keys):
            continue
        total = sum(wrong[key] for key in keys)
        cells = [str(right[key] + wrong[key]) + (f" ({wrong[key]} wrong)" if wrong[key] else "") for key in keys]
        lines.append(f"| `{hook}` | {way} | {' | '.join(cells)} | {total} |")
    return "\n".join(lines)


def around() -> tuple[str, int]:
    """Run the cases around sizes. Return a table, and the number of wrong ones."""
    every = crossings()
    lines = ["| size | cases | ranks | hooks | messages below, at, above | wrong |", "|---|---|---|---|---|---|"]
    found: dict[Case, Outcome] = {}
    for world in sorted({one.world for one in every}):
        listed = [case for one in every if one.world == world for case in one.cases]
        for i in range(0, len(listed), GROUP):
            found.update(zip(listed[i : i + GROUP], run(listed[i : i + GROUP], world, timeout=1800.0), strict=True))
    total = 0
    for field in dict.fromkeys(one.field for one in every):
        same = [one for one in every if one.field == field]
        outcomes = [found[case] for one in same for case in one.cases]
        wrong = sum(bool(outcome.wrong) for outcome in outcomes)
        counts = [tuple(one.seen(found[case].messages) for case in one.cases) for one in same if one.expected]
        wrong += sum(count != one.expected for count, one in zip(counts, (o for o in same if o.expected), strict=True))
        for outcome in outcomes:
            if outcome.wrong:
                print(f"WRONG {outcome.case}\n  " + "\n  ".join(outcome.wrong), flush=True)
        worlds = ", ".join(map(str, sorted({one.world for one in same})))
        hooks = ", ".join(dict.fromkeys(f"`{one.cases[0].hook}`" for one in same))
        shown = "; ".join(dict.fromkeys(", ".join(map(str, count)) for count in counts)) or "not seen"
        lines.append(f"| `{field}` | {len(outcomes)} | {worlds} | {hooks} | {shown} | {wrong} |")
        total += wrong
    return "\n".join(lines), total


def main() -> int:
    """Return exit code 1 if any case is wrong."""
    parser = argparse.ArgumentParser(prog="sizes", description=__doc__)
    parser.add_argument("--seed", help="seed of all cases (default: a random one, which is printed)")
    parser.add_argument("--case", type=int, action="append", help="run this case of the seed alone (may be repeated)")
    parser.add_argument("--cases", type=int, help="run that many cases, each hook about as often")
    parser.add_argument("--hours", type=float, default=24.0, help="start no further group after this many hours")
    parser.add_argument("--record", type=Path, help="write the tables to this file")
    options = parser.parse_args()
    seed = options.seed or str(random.SystemRandom().randrange(10**6))
    print(f"sizes with --seed {seed}", flush=True)
    every = list(enumerate(drawn(seed)))
    chosen = [every[number] for number in options.case] if options.case else every[: options.cases]
    outcomes = list(run_all(chosen, seed, time.monotonic() + 3600 * options.hours))
    wrong = sum(bool(one.wrong) for one in outcomes)
    text = f"{len(outcomes)} cases of seed {seed}, of {len(every)}. Wrong: {wrong}.\n\n{table(outcomes)}\n"
    if not options.case:
        crossed, also = around()
        text += f"\nAround the sizes. Wrong: {also}.\n\n{crossed}\n"
        wrong += also
    print(text)
    if options.record:
        options.record.write_text(text)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
