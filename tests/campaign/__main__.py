"""Run a campaign with ``python -m tests.campaign --minutes 3``. Repeat one case with ``--seed N --case K``."""

import argparse
import json
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.campaign import report
from tests.campaign.draw import KINDS, draw
from tests.campaign.run import DEADLINE, Outcome, run_case, start_server


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__)
    parser.add_argument("--seed", help="seed of the campaign (default: a random seed, which is printed)")
    parser.add_argument("--case", type=int, action="append", help="run this case of the seed alone (may be repeated)")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no further case after this many minutes")
    parser.add_argument(
        "--first", type=int, default=0, help="begin with this case, to continue a campaign of the same seed"
    )
    parser.add_argument("--cases", type=int, help="stop after this many cases")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--hook", default="", help="use this hook in every case: an expression, or planted:scaled")
    parser.add_argument("--deadline", type=float, default=DEADLINE, help="seconds for one case")
    parser.add_argument("--record", type=Path, help="write every outcome to this file, as JSON lines")
    return parser.parse_args()


def main() -> int:
    """Return exit code 1 if any case failed."""
    options = arguments()
    seed = options.seed or str(random.SystemRandom().randrange(10**9))
    print(f"campaign with --seed {seed}", flush=True)
    start_server()
    outcomes: list[Outcome] = []
    until = time.monotonic() + 60 * options.minutes
    numbers = iter(options.case or range(options.first, options.cases or sys.maxsize))
    extra = (f" --hook '{options.hook}'" if options.hook else "") + (
        f" --kinds {' '.join(options.kinds)}" if options.kinds != list(KINDS) else ""
    )
    for number in numbers:
        if time.monotonic() > until:
            break
        outcome = run_case(draw(seed, number, tuple(options.kinds), options.hook), options.deadline)
        outcomes.append(outcome)
        if outcome.failed or options.case:
            print(report.failure(outcome, seed, extra) if outcome.failed else f"{outcome.case}\n{outcome.status}")
            print(f"{outcome.what}\n{outcome.detail}" if options.case and not outcome.failed else "", flush=True)
        if options.record:
            with options.record.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
    print(report.table(outcomes))
    print(report.summary(outcomes))
    for outcome in (each for each in outcomes if each.failed):
        print(f"FAILED case {outcome.case.number}: {outcome.status}: {outcome.what}")
    print(f"seed {seed}", flush=True)
    return int(any(each.failed for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
