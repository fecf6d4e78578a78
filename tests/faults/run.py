"""Run the fault table. Every row uses PyTorch's hooks and this project's, each in separate processes.

    python tests/faults/run.py                    # all rows; writes the record in docs/measured, and docs/faults.md
    python tests/faults/run.py --row B7           # the rows of B7, printed, nothing written (--update writes)
    python tests/faults/run.py --row B3.1 --side ours
    python tests/faults/run.py --compressor quant4   # quant4 in the rows of PowerSGD, printed, nothing written
    python tests/faults/run.py --table            # write table and page again from the record

The outcomes, best first: right result; typed error (a CommHooksError, or the hook's own exception); error (any other
error of torch); silent (a wrong result without an error); hang (until the harness killed it); abort and segfault.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MESSAGE = 60  # letters of an error's message that the table shows
TOPICS = {
    "B1": "a hook raises",
    "B2": "a callback raises",
    "B3": "a hook returns a wrong object or value",
    "B4": "ranks disagree",
    "B5": "numbers that are not finite, zero or out of range",
    "B6": "a peer dies or freezes",
    "B7": "several backwards",
    "B8": "no fault, several buckets",
    "B9": "saving and resuming",
    "B10": "unusual parameters",
    "B11": "one state for two models",
    "B12": "other actions of models and frameworks",
    "B13": "two nodes of two ranks",
}
COMPRESSORS = ("powersgd", "quant4", "two_level")
RECORD, TABLE = (ROOT / "docs" / "measured" / f"faults.{kind}" for kind in ("json", "md"))
PAGE = ROOT / "docs" / "faults.md"


class Server:
    """A process that has imported all modules and runs cases one after another."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "case.py"), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def run(self, name: str, side: str, compressor: str) -> tuple[int, str, str]:
        """Return exit code, output and errors of one case."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            files = {key: str(Path(folder, key)) for key in ("stdout", "stderr")}
            self.process.stdin.write(json.dumps({"row": name, "side": side, "compressor": compressor} | files) + "\n")
            self.process.stdin.flush()
            code = int(self.process.stdout.readline() or 70)
            return code, *(Path(path).read_text(errors="replace") for path in files.values())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def names(compressor: str) -> list[str]:
    """Return the rows for a compressor, in order. This does not import torch."""
    code = "import case, json; print(json.dumps([(r.name, r.only, r.flat) for r in case.ROWS.values()]))"
    found = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    rows = [(name, flat) for name, only, flat in json.loads(found.stdout) if only in ("", compressor)]
    return sorted((name for name, flat in rows if not (flat and compressor == "two_level")), key=_order)


def _order(name: str) -> list[int]:
    return [int(part) for part in name[1:].split(".")]


def run_case(name: str, side: str, compressor: str = COMPRESSORS[0], server: Server | None = None) -> dict[str, Any]:
    """Run one row on one side. Return its outcome, exit code, seconds and the end of stderr."""
    own = server if server is not None else Server()
    begun = time.monotonic()
    try:
        code, out, errors = own.run(name, side, compressor)
    finally:
        if server is None:
            own.close()
    lines = out.strip().splitlines()
    nothing = {"row": name, "side": side, "outcome": "abort", "ranks": {}, "slowness": 1.0}
    result: dict[str, Any] = json.loads(lines[-1]) if lines else nothing
    for rank in result["ranks"].values():
        rank["text"], rank["seconds"] = scrub(rank["text"])[:400], round(rank["seconds"], 2)
    words = "" if compressor == COMPRESSORS[0] else f" --compressor {compressor}"
    result["command"] = f"python tests/faults/run.py --row {name} --side {side}{words}"
    result["exit_code"], result["seconds"] = code, round(time.monotonic() - begun, 1)
    result["stderr_end"] = scrub(errors)[-500:]
    return result


def scrub(text: str) -> str:
    """Remove paths, addresses and numbers of this machine."""
    text = re.sub(r"(/[\w.+-]+)+/([\w.+-]+)", r"\2", text)
    text = re.sub(r"\[?\b\d{1,3}(\.\d{1,3}){3}\b\]?(:\d+)?", "ADDRESS", text)
    return re.sub(r"0x[0-9a-f]{6,}", "0x…", text)


def run_all(rows: list[str], sides: list[str], compressor: str, jobs: int) -> list[dict[str, Any]]:
    results = []
    servers = [Server() for _ in range(jobs)]
    idle: SimpleQueue[Server] = SimpleQueue()
    for server in servers:
        idle.put(server)

    def one(name: str, side: str) -> dict[str, Any]:
        server = idle.get()
        try:
            return run_case(name, side, compressor, server)
        finally:
            idle.put(server)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            for future in [pool.submit(one, name, side) for name in rows for side in sides]:
                result = future.result()
                results.append(result)
                print(f"{result['row']:6} {result['side']:6} {result['outcome']:12} {describe(result)}", flush=True)
    finally:
        for server in servers:
            server.close()
    return results


def describe(result: dict[str, Any]) -> str:
    """Describe the result in a few words."""
    ranks = result["ranks"]
    parts: dict[str, list[str]] = {}
    for rank, one in ranks.items():
        text = one["text"]
        if one["outcome"] in ("error", "typed error"):
            kind, _, said = text.partition(": ")
            text = kind if one["outcome"] == "typed error" else f"{kind}: {_short(said)}"
        notes = [*one["seen"]]
        parts.setdefault("; ".join([text, *notes]), []).append(str(rank))
    if len(parts) == 1:
        return next(iter(parts))
    return " / ".join(f"rank {', '.join(who)}: {text}" for text, who in parts.items())


def _short(said: str) -> str:
    """Return the beginning of an error's message, without torch's bold face and a prefix that says nothing."""
    said = re.sub(r"\x1b\[[0-9;]*m", "", said)
    said = re.sub(r"Got the following error when running the callback: (RuntimeError: )?", "", said)
    return textwrap.shorten(said, MESSAGE, placeholder=" ...")


HEAD = """\
# Faults and their outcomes

This page shows what happens when something goes wrong, with PyTorch's hooks and with ours. Each fault ran in separate processes
on gloo. [Errors](errors.md) says what to do after each error.

- *right*: the result of a run without the fault, at the latest in the next step, or the user's own Ctrl-C
- *typed error*: a `CommHooksError`, or the exception that the hook itself raised
- *error*: any other error
- *silent*: a wrong result and no error
- *hang*: the rank had not ended at the time limit
- *abort*, *segfault*: SIGABRT or SIGSEGV ended the process

A fault has the worst outcome of its ranks, with commhooks of the ranks that have a hook.

| what goes wrong | PyTorch | commhooks |
| --- | --- | --- |
"""
LEGEND = (
    "Notes follow the outcome:",
    "",
    "- *told after N s*: a peer was dead or frozen, and this rank's step raised the error N seconds after it began, or at once.",
    "- *afterwards*: the next step after the error. It works, or raises the named error, at once if no seconds are given.",
    "- *N hook(s) listed afterwards*: entries of DDP's list of registered hooks after the error.",
    "- *left*: this rank is not in the model's group.",
)


def page(results: list[dict[str, Any]]) -> str:
    """Return the page, with the number of each outcome by topic."""
    lines = []
    for topic in [*dict.fromkeys(_topic(r) for r in sorted(results, key=lambda r: _order(r["row"]))), ""]:
        sides = ([r for r in results if r["side"] == side and topic in ("", _topic(r))] for side in ("torch", "ours"))
        lines.append(f"| {TOPICS.get(topic, '**all**')} | {' | '.join(_count(side) for side in sides)} |")
    last = "[The record](measured/faults.md) has every fault. `nox -s faults` runs them and writes this page."
    return HEAD + "\n".join([*lines, "", last, ""])


def _topic(result: dict[str, Any]) -> str:
    name: str = result["row"]
    return name.partition(".")[0]


def table(results: list[dict[str, Any]]) -> str:
    """Return the record's table of all rows."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for result in results:
        rows.setdefault(result["row"], {})[result["side"]] = result
    lines = [
        "# Every fault",
        "",
        "Made by `nox -s faults` from [faults.json](faults.json); do not edit. Every row is run twice in separate processes on",
        "gloo, with PyTorch's hooks and with this project's. `nox -s faults -- --row B7` runs one again. [Faults](../faults.md)",
        "defines the outcomes.",
        "",
        *LEGEND,
    ]
    topic = ""
    for name in sorted(rows, key=_order):
        both = rows[name]
        if topic != (topic := name.partition(".")[0]):
            lines += ["", f"## {topic}: {TOPICS[topic]}", "", "| row | fault | PyTorch | commhooks |"]
            lines += ["| --- | --- | --- | --- |"]
        cells = [_cell(both[side]) if side in both else "" for side in ("torch", "ours")]
        title = next(iter(both.values())).get("title", "")
        lines.append(f"| {name} | {title} | {cells[0]} | {cells[1]} |")
    return "\n".join([*lines, ""])


def _cell(result: dict[str, Any]) -> str:
    text = re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;]*m", "", describe(result)))
    text = text.replace("told after 0.0 s", "told at once").replace(" after 0.0 s", "")
    text = text.replace("|", "\\|").replace("<", "&lt;")
    plain = text.startswith("right") or not text
    return f"**{result['outcome']}**" + ("" if plain and len(text) < 7 else f", {text}")


def _count(results: list[dict[str, Any]]) -> str:
    found: dict[str, int] = {}
    for result in results:
        found[result["outcome"]] = found.get(result["outcome"], 0) + 1
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.items(), key=lambda item: -item[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--row", action="append", default=[], help="run this row or topic, as in B3.1 or B3 (may be repeated)"
    )
    parser.add_argument("--side", choices=("torch", "ours"), help="run one side only")
    parser.add_argument(
        "--compressor",
        choices=COMPRESSORS,
        default=COMPRESSORS[0],
        help="use another hook of this project in the rows of PowerSGD, and write nothing but --json",
    )
    parser.add_argument("--jobs", type=int, default=2, help="number of cases at a time")
    parser.add_argument(
        "--update", action="store_true", help="put the chosen rows into the record, and write table and page"
    )
    parser.add_argument("--table", action="store_true", help="run no case, and write table and page from the record")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    if options.table:
        TABLE.write_text(table(json.loads(RECORD.read_text())))
        PAGE.write_text(page(json.loads(RECORD.read_text())))
        return 0
    known = names(options.compressor)
    chosen = [n for n in known if not options.row or any(n == r or n.startswith(r + ".") for r in options.row)]
    if not chosen:
        parser.error(f"no row {options.row}; rows are {', '.join(known)}")
    other = options.compressor != COMPRESSORS[0]
    sides = ["ours"] if other else [options.side] if options.side else ["torch", "ours"]
    results = run_all(chosen, sides, options.compressor, options.jobs)
    whole = not other and (options.update or (not options.row and not options.side))
    if whole and options.update and RECORD.exists():
        new = {(r["row"], r["side"]): r for r in results}
        old = json.loads(RECORD.read_text())
        results = [new.pop((r["row"], r["side"]), r) for r in old] + list(new.values())
    for path in filter(None, [options.json, RECORD if whole else None]):
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [{key: value for key, value in one.items() if key != "stderr_end"} for one in results]
        path.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")
    if whole:
        TABLE.write_text(table(results))
        PAGE.write_text(page(results))
    failed = [r["row"] for r in results if r["side"] == "ours" and r["outcome"] not in ("right", "typed error")]
    if failed:
        print(f"not as promised: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
