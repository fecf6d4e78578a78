"""Compare every public name of PyTorch's, Lightning's and torchft's hook modules with ours, on two gloo processes.

    python tests/compatibility/run.py                  # writes docs/measured/compare.json and docs/compare.md
    python tests/compatibility/run.py --only powerSGD  # some rows, printed only
    python tests/compatibility/run.py --suite          # torch's own tests again; writes both files

Each side of each row runs in two forked processes under a hard time limit, with the same code (`cases.py`).
"""

import argparse
import datetime
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import cases
import torch
import torch_suite
from rows import MODULES, ROWS, PublicName

import commhooks

DOCS = Path(__file__).resolve().parents[2] / "docs"
RECORD = DOCS / "measured" / "compare.json"
FORK = multiprocessing.get_context("fork")
VERSIONS = (
    "torch",
    "lightning",
    "torchft",
    "commhooks",
    "ch-core",
    "ch-ddp",
    "ch-powersgd",
    "ch-fsdp",
    "ch-ft",
    "ch-quant",
)


def public(module: str) -> set[str]:
    """Return the names that a module offers: its ``__all__``, or the functions and classes that it defines."""
    found = importlib.import_module(module)
    if getattr(found, "__all__", None):
        return set(found.__all__)
    defined = inspect.getmembers(found, lambda v: inspect.isfunction(v) or inspect.isclass(v))
    return {name for name, value in defined if value.__module__ == module and not name.startswith("_")}


def missing_rows() -> list[str]:
    """Return public names without a row; modules that are not installed are skipped."""
    missing = []
    for module in MODULES:
        try:
            names = public(module)
        except ImportError:
            continue
        missing += [f"{module}.{name}" for name in sorted(names - {r.name for r in ROWS if r.module == module})]
    return missing


def resolve(module: str, name: str) -> tuple[Any, Any]:
    home = importlib.import_module(module)
    return (getattr(home, name) if not name.startswith("DDP._") else None), home


def child(row: PublicName, module: str, name: str, rank: int, folder: str) -> None:
    """Run one rank: write the outcome, and end without destructors, which could hang."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    os.dup2(sink, 1)
    case = getattr(cases, row.case)
    try:
        result = cases.run(case, lambda: resolve(module, name), row.options, rank, f"{folder}/store")
    except cases.Wrong as error:
        result = {"wrong": str(error)}
    except BaseException as error:
        result = {"raises": type(error).__name__, "message": message(error)}
    Path(f"{folder}/partial{rank}").write_text(json.dumps(result))
    os.rename(f"{folder}/partial{rank}", f"{folder}/rank{rank}")
    deadline = time.monotonic() + 3.0  # the other rank may still need this rank's sockets
    while not Path(f"{folder}/rank{1 - rank}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os._exit(0)


def message(error: BaseException) -> str:
    """Return the first line, without the text that torch puts around an error in a callback."""
    first = (str(error).strip() or "no message").split("\n")[0]
    return first.split("when running the callback: ")[-1][:160]


def try_one(row: PublicName, module: str, name: str) -> dict[str, Any]:
    """Try one side of a row; return its outcome and observations."""
    try:
        found, home = resolve(module, name)
    except ImportError as error:
        return {"outcome": "not installed", "detail": str(error)}
    except AttributeError:
        return {"outcome": "gone", "detail": f"{module} has no {name} in this version"}
    del found, home
    with tempfile.TemporaryDirectory() as folder:
        ranks = [FORK.Process(target=child, args=(row, module, name, rank, folder)) for rank in range(2)]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + row.limit
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [process.is_alive() for process in ranks]
        for process in ranks:
            process.kill() if process.is_alive() else None
            process.join()
        files = [Path(f"{folder}/rank{rank}") for rank in range(2)]
        results = [json.loads(f.read_text()) if f.exists() else {} for f in files]
    codes = [process.exitcode or 0 for process in ranks]
    return judge(results, hung, codes, row)


def judge(results: list[dict[str, Any]], hung: list[bool], codes: list[int], row: PublicName) -> dict[str, Any]:
    """Return the worst outcome of both ranks: abort, error, hang, wrong numbers."""
    for code, stuck in zip(codes, hung, strict=True):
        if code < 0 and not stuck:
            return {"outcome": f"aborts ({signal.Signals(-code).name})"}
    for result in results:
        if "raises" in result:
            return {"outcome": f"raises {result['raises']}", "detail": result["message"]}
    if any(hung):
        return {"outcome": "hangs", "detail": f"killed after {row.limit:.0f} s"}
    for result in results:
        if "wrong" in result:
            return {"outcome": "wrong", "detail": result["wrong"]}
    if results[0]["checksum"] != results[1]["checksum"]:
        return {"outcome": "wrong", "detail": "the ranks have different parameters"}
    if results[0].get("buckets", 3) < 3:
        return {"outcome": "wrong", "detail": f"only {results[0]['buckets']} buckets: the run proves nothing"}
    seen = {key: value for key, value in results[0].items() if key != "checksum"}
    return {"outcome": "works", **seen}


def measure(row: PublicName) -> dict[str, Any]:
    entry: dict[str, Any] = {"module": row.module, "name": row.name, "part": row.part, "ours": row.ours}
    entry["reason"] = row.reason
    not_run = {"outcome": "not run"}
    entry["theirs_outcome"] = try_one(row, row.module, row.name) if row.case else not_run
    module, _, name = row.ours.partition(":")
    here = importlib.util.find_spec(module) is not None if module else False
    if here and row.case and not hasattr(importlib.import_module(module), name):
        raise SystemExit(f"{row.ours} does not exist: correct tests/compatibility/rows.py")
    entry["our_outcome"] = try_one(row, module, name) if row.case and row.ours else {"outcome": "left out"}
    if row.ours and not row.case:
        entry["our_outcome"] = not_run
    return entry


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=DOCS)
    return {**found, "commit": commit.stdout.strip()}


def said(outcome: dict[str, Any]) -> str:
    word = outcome["outcome"]
    if word.startswith("raises"):
        return f"**{word}**: {textwrap.shorten(outcome['detail'].replace('|', '/'), 60, placeholder=' …')}"
    if word == "wrong":
        return f"**wrong**: {outcome['detail']}"
    bad = word.startswith(("aborts", "hangs"))
    return f"**{word}**" if bad else word


def page(data: dict[str, Any]) -> str:
    """Return the page ``docs/compare.md``."""
    v = data["versions"]
    rows = data["rows"]
    both = [r for r in rows if r["ours"] and r["our_outcome"]["outcome"] != "not run"]
    ours = sum(r["our_outcome"]["outcome"] == "works" for r in both)
    theirs = sum(r["theirs_outcome"]["outcome"] == "works" for r in both)
    gone = sum(r["theirs_outcome"]["outcome"] == "gone" for r in both)
    lines = [
        "# Comparison with PyTorch, Lightning and torchft",
        "",
        "This page lists every public name of PyTorch's hook modules, of Lightning's distributed utilities and of",
        "torchft's `ddp` module, with its counterpart here. Both ran the same code, on two gloo processes on CPU, with three or",
        "more buckets (DDP) or units (FSDP1). No row ran on a GPU, and a name that fails on gloo may work on NCCL.",
        "",
        "- *works*: all steps ran, both ranks ended with the same bits, gradients are the average within the method's rounding,",
        "  and a hook that compresses did compress.",
        "- *wrong*: it ran with a fault, which the cell names.",
        "- *gone*: this version of the package has no such name any more.",
        "",
        f"Of {len(both)} rows with a counterpart, {theirs} work there and {ours} here; gone there: {gone}. A hook that mixes",
        "up its messages may hang, abort or raise from run to run.",
        "",
        f"torch {v['torch']}, Lightning {v['lightning']}, torchft {v['torchft']}, Python {v['python']}.",
        "Written by `python tests/compatibility/run.py` from [the record](measured/compare.json), which has the whole messages.",
    ]
    today = {(row.module, row.name, row.part): row.ours for row in ROWS}  # a record may name a module that has moved
    last = reason = ""
    for r in rows:
        ours = today.get((r["module"], r["name"], r["part"]), r["ours"])
        if r["module"] != last:
            last, reason = r["module"], ""
            lines += ["", f"## `{last}`", "", "| name | there | here | our name |", "|---|---|---|---|"]
        name = f"`{r['name']}`" + (f" ({r['part']})" if r["part"] else "")
        counterpart = f"`{ours.replace(':', '.')}`" if ours else ""
        reason, before = r["reason"], reason
        shown = "as above" if reason and reason == before else reason
        counterpart += ("; " if counterpart and shown else "") + shown
        lines.append(f"| {name} | {said(r['theirs_outcome'])} | {said(r['our_outcome'])} | {counterpart} |")
    return "\n".join(lines + suite_section(data["suite"])) + "\n"


def suite_section(suite: dict[str, dict[str, str]]) -> list[str]:
    """Return the table of PyTorch's own tests."""
    passed = {side: sum(outcome == "passed" for outcome in suite[side].values()) for side in torch_suite.SIDES}
    lines = [
        "",
        "## PyTorch's own tests",
        "",
        f"PyTorch's wheel contains {len(suite['theirs'])} tests of hooks, their states and averagers, for four GPUs.",
        "One run tried them on four gloo processes on CPU, first as they are, then with our names in the place of PyTorch's:",
        f"{passed['theirs']} pass with PyTorch's names and {passed['ours']} with ours.",
        "`tests/compatibility/torch_suite.py` runs them, and begins with the list of what it changes for the CPU.",
        "PyTorch's other tests of hooks are not in the wheel.",
        "",
        "| test | PyTorch's names | our names |",
        "|---|---|---|",
    ]
    for test, theirs in suite["theirs"].items():
        cells = [
            it if it == "passed" else f"**{it.rstrip('.').replace('|', '/')}**" for it in (theirs, suite["ours"][test])
        ]
        why = torch_suite.DIFFERENT.get(test, "")
        lines.append(f"| `{test}` | {cells[0]} | {cells[1]}{why and f'. {why}'} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run rows with this text in module or name, and write nothing")
    parser.add_argument("--page", action="store_true", help="only rewrite the page from the record")
    parser.add_argument("--suite", action="store_true", help="only repeat PyTorch's own tests, and rewrite the page")
    arguments = parser.parse_args()
    only = arguments.only
    if arguments.page or arguments.suite:
        data = json.loads(RECORD.read_text())
        if arguments.suite:
            data["suite"] = {side: torch_suite.run(side) for side in torch_suite.SIDES}
        write(data)
        return 0
    if missing := missing_rows():
        sys.exit(f"no row for {', '.join(missing)}: add them to tests/compatibility/rows.py")
    torch.set_num_threads(1)
    commhooks.list_hooks()
    rows = []
    for row in ROWS:
        if only not in f"{row.module}.{row.name} {row.ours} {row.part}":
            continue
        entry = measure(row)
        rows.append(entry)
        print(f"{row.name:32} {row.part:24} {entry['theirs_outcome']} | {entry['our_outcome']}", flush=True)
    if only:
        return 0
    date = datetime.date.today().isoformat()
    data = {"command": "python tests/compatibility/run.py", "date": date, "versions": versions(), "rows": rows}
    write({**data, "suite": {side: torch_suite.run(side) for side in torch_suite.SIDES}})
    return 0


def write(data: dict[str, Any]) -> None:
    """Write the record, one line for each row, and the page."""
    lines = ",\n".join(map(json.dumps, data["rows"]))
    head = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in data.items() if key != "rows")
    RECORD.write_text(f'{{\n{head},\n"rows": [\n{lines}\n]\n}}\n')
    (DOCS / "compare.md").write_text(page(data))


if __name__ == "__main__":
    sys.exit(main())
