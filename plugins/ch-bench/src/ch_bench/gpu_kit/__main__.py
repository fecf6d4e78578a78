"""Run the parts of the kit and write the record: `python -m ch_bench.gpu_kit --out FOLDER`.

The folder receives ``record.md`` and ``record.json`` (rewritten after each part), ``rows.jsonl`` (every finding) and ``log.txt``
(the output of the parts). A second call with the same folder keeps findings and repeats failed rows.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ch_bench.gpu_kit.findings import append, latest, line, write_record
from ch_bench.gpu_kit.part_list import PARTS, Part
from ch_bench.gpu_kit.process import AGAIN, Order, carry_out, tell_device

_PROCESSES = 3  # for one part at most: a CUDA error ends a process, and the next one continues


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m ch_bench.gpu_kit", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-kit-out"), help="folder for the record")
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit of all parts together")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="multiplies the limit of each part, on a busy machine"
    )
    parser.add_argument("--parts", default="", help="comma-separated names; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to test the kit itself")
    args = parser.parse_args(argv)
    names = [part.name for part in PARTS]
    args.chosen = [PARTS[names.index(name)] for name in args.parts.split(",") if name in names] or PARTS
    unknown = {name for name in args.parts.split(",") if name} - set(names)
    if unknown:
        parser.error(f"--parts: unknown {sorted(unknown)}; legal are {', '.join(names)}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every row was found, 1 if one failed or is missing."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = args.out / "rows.jsonl"
    run = 1 + max((row["run"] for row in latest(rows).values()), default=0)
    # This also starts the fork server, so that no part's time limit includes it.
    has_cuda = _process(tell_device, None, time.monotonic() + 120) == 0
    device = args.device or ("cuda" if has_cuda else "cpu")
    until = time.monotonic() + 60 * args.minutes
    for part in args.chosen:
        if latest(rows).get(f"{part.name}/(end)", {}).get("verdict") == "ok" and not _failed(rows, part):
            continue
        _carry_out(part, args, rows, run, device, until)
        write_record(args.out, rows)
        print(line(part, rows), flush=True)
    write_record(args.out, rows)
    print(f"written: {args.out / 'record.md'}")
    return 0 if all(_done(rows, part) for part in args.chosen) else 1


def _carry_out(part: Part, args: argparse.Namespace, rows: Path, run: int, device: str, until: float) -> None:
    begun = time.monotonic()
    deadline = min(begun + part.seconds * args.patience, until)
    ended = "no time was left"
    for _ in range(_PROCESSES):
        if deadline - time.monotonic() < 2:
            break
        order = Order(part.name, rows, args.out / "log.txt", run, device, args.tiny, deadline)
        ended = _ended(_process(carry_out, order, deadline))
        if ended != f"exit status {AGAIN}":
            break
    verdict, took = "ok" if ended == "" else "failed", round(time.monotonic() - begun, 1)
    append(rows, {"part": part.name, "name": "(end)", "verdict": verdict, "run": run, "error": ended, "took": took})


def _process(target: Callable[[Any], None], argument: object, deadline: float) -> int | None:
    """Run a function in a new process; return its exit status, or ``None`` if it was killed at the deadline.

    A fork server starts it, which has imported torch once and has never touched a GPU.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "ch_bench.gpu_kit.adapters"])
    process = context.Process(target=target, args=(argument,))
    process.start()
    process.join(max(1.0, deadline - time.monotonic()))
    if process.is_alive():
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return None
    return process.exitcode


def _ended(code: int | None) -> str:
    return "cut at its deadline" if code is None else "" if code == 0 else f"exit status {code}"


def _failed(rows: Path, part: Part) -> bool:
    return any(r["part"] == part.name and r["verdict"] not in ("ok", "skipped") for r in latest(rows).values())


def _done(rows: Path, part: Part) -> bool:
    return f"{part.name}/(end)" in latest(rows) and not _failed(rows, part)


if __name__ == "__main__":
    sys.exit(main())
