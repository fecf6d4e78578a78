"""SIGKILL at four places, with 2, 3 and 4 replicas, for four hooks: 48 runs and their outcomes.

Every run has a real lighthouse, real Managers, and one process per replica on gloo. `ch_ft.testing.scenario` defines the
requirements. A case that violates them is reported with the reason, and the command returns 1.

    python -m ch_bench.faults.ft_matrix [--only WORD ...] [--rows FILE] [--record]
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ch_bench import record
from ch_bench.faults.ft_recovery import conditions
from ch_ft.testing import quorum, scenario

COLUMNS = ("killed", "replicas", "hook", "lost", "recovered", "steps equal", "healed at", "after", "outcome")
NAMES = {"first": "before the first collective", "p_and_q": "between two stages", "buckets": "between buckets"}


def main() -> int:
    options = arguments()
    console = Console(record=True, width=130)
    console.print(conditions(), "heartbeat 1 s, join time-out 0.5 s, group time-out 30 s")
    table = Table(*COLUMNS, box=box.SIMPLE)
    done = json.loads(options.rows.read_text()) if options.rows is not None and options.rows.exists() else {}
    wrong = cases = 0
    for place, replicas, hook in itertools.product(scenario.PLACES, scenario.SIZES, scenario.HOOKS):
        key, name = f"{place}-{replicas}-{hook}", NAMES.get(place, "between steps")
        if not all(word in key for word in options.only):
            continue
        if key not in done:
            done[key] = row(place, replicas, hook)
            print(f"{name}, {replicas} replicas, {hook}: {done[key][1] or 'ok'}", file=sys.stderr, flush=True)
            if options.rows is not None:
                options.rows.write_text(json.dumps(done))
        cells, reason = done[key]
        table.add_row(name, str(replicas), hook, *cells, "ok" if not reason else "WRONG")
        if reason:
            console.print(f"{name}, {replicas} replicas, {hook}: {reason}", markup=False)
        cases, wrong = cases + 1, wrong + bool(reason)
    console.print(table)
    console.print(LEGEND)
    console.print(f"{cases - wrong} of {cases} cases meet all requirements")
    if options.record:
        title = "Kills at four places" + "".join(f", {word}" for word in options.only)
        record.write("ft", title, record.command("ch_bench.faults.ft_matrix"), record.printed(console))
    return 1 if wrong else 0


LEGEND = """\
lost: attempts that each survivor did not commit. recovered: seconds from the kill to the last survivor's next commit,
while the victim restarts. A majority of the known replicas continues after the join time-out; a minority waits until
the lighthouse misses the dead replica's heartbeat.
steps equal: steps that several replicas committed, with equal float64 checksums of the parameters and of Q.
healed at: first step that the restarted replica committed, with the step of the kill in brackets. after: seconds from
the start of its new process to that commit."""


def row(place: str, replicas: int, hook: str) -> tuple[list[str], str]:
    """Run one case; return its cells and the violated requirement, if any."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = scenario.killed_and_restarted(Path(folder), place, replicas, hook, limit=200.0)
        try:
            scenario.verify(outcome, place, replicas, hook)
        except (AssertionError, IndexError) as error:
            return ["?"] * 5, " ".join(f"{type(error).__name__}: {error}".split())[:300]
    assert outcome.killed is not None
    names = quorum.NAMES[:replicas]
    lost = " ".join(str(outcome.dropped(name)) for name in outcome.survivors())
    first = outcome.reborn()[0]
    born = [r["t"] for r in outcome.logs[scenario.VICTIM] if r["event"] == "started"][-1]
    healed = f"{first['step']} ({outcome.killed['step'] + 1})"
    shared = str(scenario.shared_steps(outcome, names))
    return [lost, f"{outcome.recovery():.2f} s", shared, healed, f"{first['t'] - born:.2f} s"], ""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="WORD",
        help="cases with this word in their name, as in first-2-allreduce",
    )
    parser.add_argument("--rows", type=Path, metavar="FILE", help="file of results; cases in it do not run again")
    parser.add_argument("--record", action="store_true", help="write the output to docs/measured/ft.md")
    return parser.parse_args()


if __name__ == "__main__":
    begun = time.monotonic()
    code = main()
    print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)
    sys.exit(code)
