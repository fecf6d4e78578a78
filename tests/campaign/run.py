"""Runs one case in separate processes and reports its outcome."""

import json
import multiprocessing
import multiprocessing.forkserver
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ch_testing.processes import spawn
from tests.campaign.draw import Case
from tests.campaign.refusals import refusal
from tests.campaign.worker import main

DEADLINE = 60.0  # seconds for one case


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        status: ``ok``; ``refused`` (a documented error of ours on every rank); ``torch`` (plain DDP does not run it);
            ``wrong`` (a check failed); ``error``; ``died``; ``hang``; ``torch hang``.
        what: name of the check, the error or the refusal.
        detail: message and traces.
    """

    case: Case
    status: str
    what: str
    detail: str
    seconds: float
    compressed: bool = False

    @property
    def failed(self) -> bool:
        return self.status not in {"ok", "refused", "torch", "torch hang"}

    @property
    def end(self) -> str:
        """``ok``, ``refused``, ``torch`` or ``failed``."""
        return "failed" if self.failed else self.status.removesuffix(" hang")


def start_server() -> None:
    """Import everything once, in the process that forks the ranks."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # drops its many warnings about unused parameters
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.campaign.worker", "ch_ddp", "ch_powersgd", "ch_fsdp", "ch_ft", "ch_outer"])
    multiprocessing.forkserver.ensure_running()


def run_case(case: Case, deadline: float = DEADLINE) -> Outcome:
    """Run one case from start to end. Never raise, and never wait much longer than the deadline."""
    began = time.monotonic()
    limit = deadline * crowding(case.processes)
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        world = case.processes
        problem = ""
        try:
            spawn(main, world, case, folder, limit, timeout=limit, group_timeout=limit)
        except (AssertionError, TimeoutError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
        status, what, detail, compressed = judge(case, Path(folder), world, problem)
    return Outcome(case, status, what, detail, round(time.monotonic() - began, 2), compressed)


def crowding(processes: int) -> float:
    """Return the average number of processes that wait for a core, by which a case takes longer than alone.

    The deadline finds hangs. A rank that waits for a core does not hang, so the deadline grows with the load of the machine.
    """
    return max(1.0, (os.getloadavg()[0] + processes) / (os.cpu_count() or 1) / 2)


def judge(case: Case, folder: Path, world: int, problem: str) -> tuple[str, str, str, bool]:
    """Return status, check and detail from the ranks' notes, and True if a hook compressed."""
    rows = {rank: _read(folder / f"outcome{rank}") for rank in range(world)}
    phases = {rank: _text(folder / f"phase{rank}") for rank in range(world)}
    detail = detail_of(rows, phases, folder)
    statuses = {row.get("status", "none") for row in rows.values()}
    if statuses == {"ok"} and not problem:
        return "ok", "", "", any(row["stats"].get("compressed_steps", 0) > 0 for row in rows.values())
    if "wrong" in statuses:
        return "wrong", next(r["check"] for r in rows.values() if r.get("status") == "wrong"), detail, False
    if "torch" in statuses:
        text = next(r["message"] for r in rows.values() if r.get("status") == "torch")
        return "torch", text.split("\n")[0][:100], detail, False
    if "error" in statuses:
        found = [refusal(case, r["check"], r["message"]) if r.get("status") == "error" else None for r in rows.values()]
        if all(found) and len({each.name for each in found if each}) == 1:
            return "refused", next(each.name for each in found if each), detail, False
        return "error", next(r["check"] for r in rows.values() if r.get("status") == "error"), detail, False
    if any(phase == "the same loop without a hook" for phase in phases.values()):
        return "torch hang", "plain DDP does not end", f"{problem}\n{detail}", False
    late = "TimeoutError" in problem
    what = "not done in time" if late else problem.split("\n")[-1][:100]
    return "hang" if late else "died", f"{what}: {next(iter(phases.values()))}", f"{problem}\n{detail}", False


def detail_of(rows: dict[int, dict[str, Any]], phases: dict[int, str], folder: Path) -> str:
    """Return the error of each rank, and each different trace once."""
    lines = [
        f"rank {rank}, {phases[rank] or 'not begun'}: {row.get('check', row.get('status', 'no answer'))}: "
        f"{row.get('message', '')}"
        for rank, row in rows.items()
    ]
    traces = [row.get("trace") or _text(folder / f"stacks{rank}") for rank, row in rows.items()]
    return "\n".join([*lines, *dict.fromkeys(filter(None, traces))])


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _read(path: Path) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return row
