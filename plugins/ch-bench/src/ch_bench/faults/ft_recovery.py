"""Time from a kill to the survivors' next commit, with ch-ft and with torchft's own class.

Four replicas run as processes on loopback with gloo, a real lighthouse and Managers. One is killed with SIGKILL and does not
restart. The time ends with the commit of the last survivor; ``never`` means that a survivor exits or does not commit within
the limit. Cases take turns, ``--repeat`` times.

    python -m ch_bench.faults.ft_recovery --repeat 5 [--record]
"""

import argparse
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import median

from rich.console import Console

from ch_bench import record
from ch_ft.testing import member, quorum

POWERSGD = "powersgd(rank=2)"
CASES: list[tuple[str, dict[str, object]]] = [
    ("ch_ft, powersgd, killed between P and Q", {"hook": POWERSGD, "die": "p_and_q"}),
    ("ch_ft, no hook, killed between buckets", {"hook": None, "die": "buckets"}),
    ("ch_ft, no hook, fail_fast=False, between buckets", {"hook": None, "die": "buckets", "fail_fast": False}),
    ("torchft's own class, killed between buckets", {"hook": None, "die": "buckets", "owner": "torchft"}),
    ("ch_ft, powersgd, killed between steps", {"hook": POWERSGD, "die": "steps"}),
    ("torchft's own class, killed between steps", {"hook": None, "die": "steps", "owner": "torchft"}),
]


def main() -> None:
    options = arguments()
    console = Console(record=True, width=130)
    console.print(conditions())
    console.print(
        f"{options.replicas} replicas, heartbeat {options.heartbeat:g} s, group time-out {options.group_timeout:g} s, "
        "join time-out 10 s"
    )
    found: dict[str, list[tuple[float, str]]] = {name: [] for name, _ in CASES}
    for _ in range(options.repeat):
        for name, case in CASES:
            found[name].append(measure(case, options))
            print(f"  {name}: {found[name][-1][1]}", file=sys.stderr, flush=True)
    width = max(map(len, found))
    for name, results in found.items():
        middle = median(seconds for seconds, _ in results)
        console.print()
        console.print(f"{name:{width}}  median {middle:.2f} s" if middle < float("inf") else name, markup=False)
        for _, text in results:
            console.print(f"    {text}", markup=False)
    if options.record:
        made_by = record.command("ch_bench.faults.ft_recovery")
        record.write("ft", "Time from a kill to the next commit", made_by, record.printed(console))


def measure(case: dict[str, object], options: argparse.Namespace) -> tuple[float, str]:
    """Run one case; return the seconds and a description."""
    with (
        tempfile.TemporaryDirectory() as folder,
        quorum.lighthouse(heartbeat=options.heartbeat, join_timeout=10.0) as address,
    ):
        tasks = [
            member.Task(
                name,
                folder,
                address,
                seed=i,
                replicas=options.replicas,
                group_timeout=options.group_timeout,
                **{**case, "die": case["die"] if i == 1 else None},  # type: ignore[arg-type]
            )
            for i, name in enumerate(quorum.NAMES[: options.replicas])
        ]
        outcome = quorum.run(Path(folder), tasks, restart=False, limit=options.group_timeout + 45)
    never = float("inf")
    if outcome.killed is None:
        return never, "no kill happened"
    seconds = outcome.recovery()
    if seconds == never:
        ended = [name for name in outcome.survivors() if name in outcome.raised()]
        why = sorted({outcome.raised()[name].split(":")[0] for name in ended})
        return never, f"never: {len(ended)} of {len(outcome.survivors())} survivors exited ({', '.join(why)})"
    lost = max(outcome.dropped(name) for name in outcome.survivors())
    return seconds, f"{seconds:.2f} s, attempts lost: {lost}"


def conditions() -> str:
    """Return load and versions, which the description of the machine lacks."""
    return f"load {os.getloadavg()[0]:.1f} at the start, torchft {version('torchft')}, gloo on loopback;"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--heartbeat", type=float, default=1.0, help="seconds")
    parser.add_argument("--group-timeout", type=float, default=30.0, help="seconds")
    parser.add_argument("--record", action="store_true", help="write the output to docs/measured/ft.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
