"""Starts replicas as processes around a real lighthouse, restarts the one that dies, and reads their logs."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("RUST_LOG", "error")  # torchft logs a line per quorum and process
os.environ.setdefault("TOKIO_WORKER_THREADS", "2")

import ch_ft
from ch_testing import Ranks
from ch_testing.torchft import member

Record = dict[str, Any]
Body = Callable[[member.Task, member.Log], None]
PRELOAD = ("torchft", "ch_ft", "ch_testing.torchft.member", "ch_powersgd")  # a start then takes milliseconds
NAMES = ["alpha_0", "beta_1", "gamma_2", "delta_3"]


@dataclass
class Outcome:
    """Outcome of one run.

    Attributes:
        logs: replica -> its log lines, in order.
        codes: replica -> exit code of its last process.
        folder: folder of the logs.
        stop: step at which all replicas had to stop.
        killed: log line of the kill.
        steps: replica -> its log lines of attempts.
    """

    logs: dict[str, list[Record]]
    codes: dict[str, int | None]
    folder: Path
    stop: int | None = None
    killed: Record | None = None
    steps: dict[str, list[Record]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.steps = {name: [r for r in lines if r["event"] == "step"] for name, lines in self.logs.items()}
        stop = self.folder / "stop"
        self.stop = int(stop.read_text()) if stop.exists() else None
        self.killed = next((r for lines in self.logs.values() for r in lines if r["event"] == "killed"), None)

    def survivors(self) -> list[str]:
        return [name for name, lines in self.logs.items() if not any(r["event"] == "killed" for r in lines)]

    def dropped(self, name: str) -> int:
        """Return the number of attempts that were not committed, from the kill on."""
        since = self.killed["t"] - 0.5 if self.killed is not None else 0.0
        return sum(not r["committed"] for r in self.steps[name] if r["t"] > since)

    def raised(self) -> dict[str, str]:
        """Return replica -> error, for replicas that raised."""
        return {name: r["error"] for name, lines in self.logs.items() for r in lines if r["event"] == "raised"}

    def reborn(self) -> list[Record]:
        """Return the committed steps of the killed replica after its restart."""
        assert self.killed is not None
        return [
            r
            for name, steps in self.steps.items()
            if name not in self.survivors()
            for r in steps
            if r["t"] > self.killed["t"] and r["committed"]
        ]

    def last_words(self) -> dict[str, str]:
        """Return replica -> the end of its stderr, for replicas with a nonzero exit code."""
        files = {name: self.folder / f"{name}.err" for name, code in self.codes.items() if code != 0}
        return {name: file.read_text()[-600:] for name, file in files.items() if file.exists()}

    def committed(self, name: str) -> dict[int, Record]:
        return {r["step"]: r for r in self.steps[name] if r["committed"]}


@contextmanager
def lighthouse(**options: Any) -> Iterator[str]:
    """Run a lighthouse in this process, and yield its address."""
    server = ch_ft.start_lighthouse(**options)
    try:
        yield ch_ft.local_manager.loopback(server.address())
    finally:
        server.shutdown()


def run(
    folder: Path,
    tasks: list[member.Task],
    *,
    extra: int = 8,
    limit: float = 60.0,
    body: Body | None = None,
) -> Outcome:
    """Run replicas, and restart the one that dies, until all have committed ``extra`` more steps. Then kill all processes.

    Args:
        folder: receives the logs.
        tasks: the replicas.
        extra: steps after the restart.
        limit: seconds after which the run ends anyway.
        body: training loop of a replica; by default :func:`member.train`.
    """
    given = list(tasks)  # a rank finds its task here when it starts
    victim = next((rank for rank, task in enumerate(tasks) if task.die), None)
    restarted = None
    deadline = time.monotonic() + limit
    with Ranks(_replica, len(tasks), given, body, group=False, preload=PRELOAD) as ranks:
        while time.monotonic() < deadline and (alive := ranks.alive()):
            time.sleep(0.02)
            if victim is not None and restarted is None and victim not in alive:
                restarted = time.monotonic()
                given[victim] = replace(tasks[victim], die=None, seed=tasks[victim].seed + 100, first_step=0)
                ranks.start(victim)
            if (victim is None or restarted is not None) and not (folder / "stop").exists():
                plan_stop(folder, [task.name for task in tasks], restarted or 0.0, extra)
        codes = {task.name: ranks.result(rank).exit_code for rank, task in enumerate(tasks)}
    return Outcome({t.name: read(folder / f"{t.name}.jsonl") for t in tasks}, codes, folder)


def _replica(rank: int, world_size: int, tasks: list[member.Task], body: Body | None) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # a replica is one rank, whatever its number among the replicas
        os.environ.pop(name)
    member.run(tasks[rank], body)


def plan_stop(folder: Path, names: list[str], since: float, extra: int) -> None:
    """Let all replicas stop ``extra`` steps later, once each has committed two steps after the restart."""
    last = []
    for name in names:
        done = [r for r in read(folder / f"{name}.jsonl") if r["event"] == "step" and r["committed"] and r["t"] > since]
        if len(done) < 2:
            return
        last.append(done[-1]["step"])
    whole = folder / "stop.new"
    whole.write_text(str(max(last) + extra))
    whole.rename(folder / "stop")


def read(path: Path) -> list[Record]:
    """Return the lines of a log, without a last line that a kill cut off."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines
