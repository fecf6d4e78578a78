"""Run one row with one side's hooks. Fork the ranks, wait for them with a hard limit, and print the outcome as JSON.

python tests/faults/case.py B3.1 ours [quant4]
"""

import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import kit
import rows_hooks
import rows_models
import rows_nodes
import rows_numbers
import rows_ranks
import torch
import torch._dynamo  # DDP imports it at its creation, which takes seconds. One import before the fork saves them
import torch.distributed as dist
from kit import ROWS, Row, Run, Silent

import commhooks

TOPICS = (rows_hooks, rows_ranks, rows_numbers, rows_models, rows_nodes)
# Errors of builtin types that a row's hook raises itself. The user should see the original type.
ORIGINAL = (ValueError, KeyboardInterrupt)
START_LIMIT = 60.0
WORST = ("segfault", "abort", "hang", "killed", "silent", "error", "typed error", "right")


def rank_main(row: Row, side: str, rank: int, folder: str) -> None:
    """Write the outcome, wait for the other ranks, and exit without cleanup. Never return."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)  # makes a hanging rank print its stacks
    run = Run(rank, row.world, side, folder)
    begun, outcome, text = time.monotonic(), "right", ""
    try:
        store = dist.FileStore(f"{folder}/store", row.world)
        timeout = timedelta(seconds=row.group_timeout * kit.SLOWNESS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=row.world, timeout=timeout)
        Path(folder, f"start{rank}").touch()
        begun = time.monotonic()
        text = row.body(run)
    except Silent as error:
        outcome, text = "silent", str(error)
    except BaseException as error:
        typed = isinstance(error, (commhooks.CommHooksError, *ORIGINAL))
        outcome, text = "typed error" if typed else "error", f"{type(error).__name__}: {error}"
        traceback.print_exc()
    result = {"outcome": outcome, "text": text, "seconds": time.monotonic() - begun, "seen": run.seen}
    Path(folder, f"part{rank}").write_text(json.dumps(result))
    Path(folder, f"part{rank}").rename(Path(folder, f"rank{rank}"))
    sys.stderr.flush()
    # A rank that exits would rescue the others by closing its connections.
    ends = time.monotonic() + row.limit * kit.SLOWNESS + 5.0
    while time.monotonic() < ends and not Path(folder, "over").exists():
        time.sleep(0.02)
    os._exit(0)


def watch(row: Row, folder: str, pids: list[int]) -> dict[int, dict[str, Any]]:
    """Return each rank's outcome. Ranks that are not done at the limit hang, and are killed."""
    found: dict[int, dict[str, Any]] = {}
    limit = row.limit * kit.SLOWNESS
    begun = time.monotonic()
    while not all(Path(folder, f"start{rank}").exists() for rank in range(row.world)):
        if time.monotonic() - begun > START_LIMIT:
            break
        time.sleep(0.01)
    begun = time.monotonic()  # the ranks meet late on a busy machine
    while len(found) < row.world - len(row.victims) and time.monotonic() - begun < limit:
        for rank in set(range(row.world)) - set(found) - set(row.victims):
            path = Path(folder, f"rank{rank}")
            if path.exists():
                found[rank] = json.loads(path.read_text())
                continue
            pid, status = os.waitpid(pids[rank], os.WNOHANG)
            if pid and os.WIFSIGNALED(status):
                number = os.WTERMSIG(status)
                kind = {signal.SIGSEGV: "segfault", signal.SIGABRT: "abort"}.get(number, "killed")
                seconds = time.monotonic() - begun
                found[rank] = {"outcome": kind, "text": signal.Signals(number).name, "seconds": seconds, "seen": []}
        time.sleep(0.01)
    for rank in set(range(row.world)) - set(found) - set(row.victims):
        found[rank] = {"outcome": "hang", "text": f"not done after {limit:.0f} s", "seconds": limit, "seen": []}
        os.kill(pids[rank], signal.SIGUSR1)
        time.sleep(0.2)
    Path(folder, "over").touch()
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return dict(sorted(found.items()))


def slowness() -> float:
    """Return the load of the machine, 1 if this process gets a whole core.

    On a busy machine every limit and deadline grows by this factor, so that slowness does not count as a hang.
    """
    wall, cpu = time.monotonic(), time.process_time()
    while time.process_time() - cpu < 0.1:
        sum(range(1000))
    return min(12.0, max(1.0, (time.monotonic() - wall) / 0.15))


def main(name: str, side: str, compressor: str = "powersgd") -> int:
    row = ROWS[name]
    if compressor == "two_level" and row.world == 2:
        world = 2 * kit.RANKS_PER_NODE
        row = replace(row, world=world, without=tuple(range(1, world)) if row.without else ())
    kit.COMPRESSOR = compressor
    kit.SLOWNESS = slowness()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        pids = []
        for rank in range(row.world):
            pid = os.fork()
            if pid == 0:
                rank_main(row, side, rank, folder)
            pids.append(pid)
        ranks = watch(row, folder, pids)
        for pid in pids:
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                continue
    counted = [result["outcome"] for rank, result in ranks.items() if side == "torch" or rank not in row.without]
    outcome = min(counted, key=WORST.index)
    print(
        json.dumps(
            {
                "row": name,
                "side": side,
                "title": row.title,
                "outcome": outcome,
                "ranks": ranks,
                "slowness": round(kit.SLOWNESS, 1),
            }
        )
    )
    return 0 if outcome in ("right", "typed error") else 1


def serve() -> None:
    """Run the cases requested on stdin. Each runs in a process forked from this one, which has imported all modules.

    A line of JSON per case: ``{"row", "side", "compressor", "stdout", "stderr"}``, the last two names of files. The
    answer is the exit code.
    """
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            for number, key in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(asked[key], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            code = main(asked["row"], asked["side"], asked["compressor"])
            sys.stdout.flush()
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        sys.exit(main(*sys.argv[1:]))
