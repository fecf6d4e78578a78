"""Run a campaign with ``python -m tests.campaign --minutes 3``. Repeat one case with ``--seed N --case K``."""

import argparse
import random
import sys
import time
from collections import Counter
from itertools import count

from tests.campaign.draw import draw
from tests.campaign.run import Outcome, run_case, start_server


def summary(outcomes: list[Outcome]) -> str:
    """Return the number of cases by kind and end, and the reasons of refusals."""
    ends = Counter(outcome.end for outcome in outcomes)
    lossy = sum(outcome.status == "ok" and outcome.compressed for outcome in outcomes)
    lines = [
        f"{len(outcomes)} cases: {ends['ok']} right ({lossy} of them sent less than plain averaging), "
        f"{ends['refused']} refused as documented, {ends['torch']} that plain torch does not run either, "
        f"{ends['failed']} failed"
    ]
    kinds = Counter((outcome.case.kind, outcome.end) for outcome in outcomes)
    lines += [f"  {kind}, {end}: {number}" for (kind, end), number in sorted(kinds.items())]
    reasons = Counter((outcome.end, outcome.what) for outcome in outcomes if outcome.end in ("refused", "torch"))
    return "\n".join([*lines, *(f"  {end}: {number} x {what}" for (end, what), number in reasons.most_common())])


def main() -> int:
    """Return exit code 1 if any case failed."""
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__)
    parser.add_argument("--seed", help="seed of the campaign (default: a random seed, which is printed)")
    parser.add_argument("--case", type=int, action="append", help="run this case of the seed alone (may be repeated)")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no further case after this many minutes")
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="stop after this many cases")
    options = parser.parse_args()
    seed = options.seed or str(random.SystemRandom().randrange(10**9))
    print(f"campaign with --seed {seed}", flush=True)
    start_server()
    outcomes: list[Outcome] = []
    until = time.monotonic() + 60 * options.minutes
    for number in options.case or count():
        if number >= options.cases or time.monotonic() > until:
            break
        outcome = run_case(draw(seed, number))
        outcomes.append(outcome)
        if outcome.failed or options.case:
            print(f"{outcome.status}: {outcome.what}\n  {outcome.case}\n{outcome.detail}", flush=True)
        if outcome.failed:
            print(f"  again: nox -s campaign -- --seed {seed} --case {number}", flush=True)
    print(summary(outcomes))
    for outcome in (each for each in outcomes if each.failed):
        print(f"FAILED case {outcome.case.number}: {outcome.status}: {outcome.what}")
    print(f"seed {seed}", flush=True)
    return int(any(each.failed for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
