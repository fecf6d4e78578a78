"""How long survivors of a kill wait for their next commit, beside torchft's own class in the same run.

Four replicas as processes on loopback, gloo, real lighthouse and Managers; one is killed with SIGKILL and not
started again. Time from the kill to the commit of the last survivor; ``never`` if a survivor exits or does not commit
within the limit. Every case is run ``--repeat`` times, the cases in turn.

    python docs/benchmarks/ft_recovery.py --repeat 3
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "ft"))

import quorum
import torch
from member import Task

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
    print(machine())
    print(f"{options.replicas} replicas, heartbeat {options.heartbeat:g} s, group time-out {options.group_timeout:g} s")
    found: dict[str, list[str]] = {name: [] for name, _ in CASES}
    for _ in range(options.repeat):
        for name, case in CASES:
            found[name].append(measure(case, options))
            print(f"  {name}: {found[name][-1]}", flush=True)
    print()
    width = max(map(len, found))
    for name, results in found.items():
        print(f"{name:{width}}  {'   '.join(results)}")


def measure(case: dict[str, object], options: argparse.Namespace) -> str:
    """One run: seconds, and how many survivors exited."""
    with (
        tempfile.TemporaryDirectory() as folder,
        quorum.lighthouse(heartbeat=options.heartbeat, join_timeout=10.0) as address,
    ):
        tasks = [
            Task(
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
    exited = sum(any(r["event"] == "raised" for r in outcome.logs[name]) for name in outcome.survivors())
    if outcome.killed is None:
        return "no kill happened"
    seconds = outcome.recovery()
    dropped = max(outcome.dropped(name) for name in outcome.survivors())
    if seconds == float("inf"):
        return f"never ({exited} of {len(outcome.survivors())} survivors exited)"
    return f"{seconds:.2f} s (attempts lost: {dropped})"


def machine() -> str:
    """The machine in one line."""
    import torchft  # noqa: F401 - it must be there

    models = [line.split(":", 1)[1].strip() for line in read("/proc/cpuinfo") if line.startswith("model name")]
    cpu = models[0] if models else "CPU"
    load = os.getloadavg()[0]
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores ({cpu}), load {load:.1f}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, torchft {version('torchft')}, gloo on loopback"
    )


def version(name: str) -> str:
    from importlib.metadata import version as of

    return of(name)


def read(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--heartbeat", type=float, default=1.0, help="seconds")
    parser.add_argument("--group-timeout", type=float, default=30.0, help="seconds")
    return parser.parse_args()


if __name__ == "__main__":
    main()
