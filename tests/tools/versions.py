"""Run every package's tests on the torch of this environment and record the results: ``nox -s versions``.

    python tests/tools/versions.py                      # every suite; writes docs/measured/versions.json and docs/versions.md
    python tests/tools/versions.py --only ch-core       # some suites; the other rows stay unchanged
    python tests/tools/versions.py --quick              # the quick set alone; its columns stand next to those of the whole suites
    python tests/tools/versions.py --failed             # repeat the failures of this torch, after a fix
    python tests/tools/versions.py --page               # only the page, from the record

The suite `docstring examples` runs the examples of all packages. A suite that does not end in time has a row that says so.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORD, PAGE = ROOT / "docs" / "measured" / "versions.json", ROOT / "docs" / "versions.md"
MARKS = "not soak and not packaging and not campaign"
LIMIT = 3600.0  # seconds per suite
EXAMPLES = "docstring examples"
NO_TEST = 5  # pytest's exit code
QUICK = ", quick set"
HEAD = """# Versions of torch

The packages require `torch>=2.10` and Python 3.11. On torch 2.10 FSDP2 lacks `set_reduce_scatter_unused_params`, so a step that
leaves a parameter of a group without a gradient raises an error.

The table has the tests that passed, and in brackets those that were skipped, on Linux and a CPU. *quick set* leaves out the slow
tests. [The record](measured/versions.json) has dates, commits and the reasons of skips. `nox -s versions` writes this page. The
session is not part of CI, because it downloads gigabytes of CUDA builds. `nox -s "versions(newest)"` installs the newest torch
that the package index offers.

"""


def suites() -> dict[str, list[str]]:
    """Return name -> arguments of pytest, packages first."""
    found: dict[str, list[Path]] = {}
    for folder in (*sorted(ROOT.glob("packages/*/")), *sorted(ROOT.glob("plugins/*/"))):
        if (folder / "tests").is_dir():
            found[folder.name] = [folder / "tests"]
    for folder in sorted({path.parent for path in (ROOT / "tests").glob("*/test_*.py")}):
        found[f"tests/{folder.name}"] = [folder]
    found["tests"] = sorted((ROOT / "tests").glob("test_*.py"))
    modules = sorted(path.parent.name for path in ROOT.glob("p*/*/src/*/__init__.py"))
    # By name, because a file from the source tree would be a second module.
    examples = {EXAMPLES: ["--doctest-modules", "--pyargs", *modules]}
    return {name: [str(path) for path in paths] for name, paths in found.items()} | examples


def again(row: dict[str, Any], limit: float) -> dict[str, Any]:
    """Run a row's failed tests again. Return the row with their number and the commit."""
    ids = []
    for name in row["failures"]:
        module, _, test = name.partition("::")
        parts = module.split(".")
        number = next(n for n in range(len(parts), 0, -1) if ROOT.joinpath(*parts[:n]).with_suffix(".py").exists())
        ids.append("::".join([str(ROOT.joinpath(*parts[:number]).with_suffix(".py")), *parts[number:], test]))
    new = run(row["suite"], ids, limit)
    counted = {
        key: row[key] + new[key] - (len(ids) if key == "failed" else 0) for key in ("passed", "failed", "skipped")
    }
    when = f"{row['commit']}; {len(ids)} again at {facts()['commit']}"
    return row | counted | {"failures": new.get("failures", row["failures"]), "commit": when}


def run(name: str, arguments: list[str], limit: float, marks: str = MARKS) -> dict[str, Any]:
    """Run one suite in a separate process."""
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        xml = Path(folder, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "--rootdir", ".", "-q", "-m", marks]
        command += ["-p", "no:cacheprovider", f"--junitxml={xml}", *arguments]
        began, problem = time.monotonic(), ""
        with Path(folder, "output").open("w+") as output:
            env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            try:
                code = subprocess.run(
                    command, cwd=ROOT, env=env, stdout=output, stderr=output, timeout=limit
                ).returncode
            except subprocess.TimeoutExpired:
                code, problem = -1, f"not done after {limit:.0f} s"
            output.seek(0)
            tail = output.read()[-3000:]
        if code not in {0, 1, NO_TEST if "not full" in marks else 0} and not problem:
            problem = f"pytest ended with {code}"
        row = {"suite": name, **counts(xml)} if xml.exists() else {"suite": name, "passed": 0}
        if problem:
            print(tail)
        print(f"{name}: {row} {problem} ({time.monotonic() - began:.0f} s)", flush=True)
        return row | ({"problem": problem} if problem else {})


def counts(xml: Path) -> dict[str, Any]:
    """Return the numbers, the names of failed tests, and the reasons of skips."""
    totals: Counter[str] = Counter()
    failed, skipped = [], Counter[str]()
    for case in ElementTree.parse(xml).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            totals["failed"] += 1
            failed.append(f"{case.get('classname', '')}::{case.get('name', '')}")
        elif "skipped" in kinds:
            totals["skipped"] += 1
            reason = case.find("skipped")
            skipped[(reason.get("message") or "no reason")[:120] if reason is not None else ""] += 1
        else:
            totals["passed"] += 1
    return {**{key: totals[key] for key in ("passed", "failed", "skipped")}, "failures": failed, "reasons": skipped}


def facts() -> dict[str, str]:
    """Return the facts of this run."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = " and changes" * bool(git("status", "--porcelain", "--", ".", ":!docs"))
    return {
        "torch": version("torch"),
        "python": platform.python_version(),
        "when": time.strftime("%Y-%m-%d"),
        "commit": git("rev-parse", "--short", "HEAD") + changed,
    }


def rows() -> dict[str, dict[str, Any]]:
    """Return the record, by torch and suite."""
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def page(record: dict[str, dict[str, Any]]) -> str:
    """Return a table with a row for each suite and a column for each torch, with every failure by name below it."""
    ordered = sorted(record.values(), key=lambda row: [int(n) for n in row["torch"].split("+")[0].split(".")[:2]])
    cells: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}  # in order
    notes = []
    for row in ordered:
        suite, quick = row["suite"].removesuffix(QUICK), row["suite"].endswith(QUICK)
        column = f"{row['torch']}, Python {row['python']}" + QUICK * quick
        columns[column] = None
        cells.setdefault(suite, {})[column] = _cell(row)
        notes += [f"- torch {row['torch']}: `{name}`" for name in row.get("failures", ())]
    lines = [f"| tests of | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    for suite in sorted(cells, key=lambda suite: (suite.startswith("tests"), suite)):
        lines.append(f"| {suite} | {' | '.join(cells[suite].get(column, '–') for column in columns)} |")
    text = HEAD + "\n".join(lines) + "\n"
    return text + ("\n## What failed\n\n" + "\n".join(notes) + "\n" if notes else "")


def _cell(row: dict[str, Any]) -> str:
    failed = row.get("problem") or (f"{row['failed']} failed" if row.get("failed") else "")
    return f"{row.get('passed', 0)} ({row.get('skipped', 0)})" + (f", **{failed}**" if failed else "")


def main() -> int:
    """Return exit code 1 if any test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(suites()))
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one suite")
    parser.add_argument(
        "--failed", action="store_true", help="repeat only the failures of this torch, and merge them into their row"
    )
    parser.add_argument("--quick", action="store_true", help="leave out the tests of the full set")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    record, bad = rows(), False
    for name, arguments in () if options.page else suites().items():
        label, marks = (name + QUICK, f"{MARKS} and not full") if options.quick else (name, MARKS)
        key = f"{facts()['torch']} {label}"
        chosen, failures = options.only is None or name in options.only, record.get(key, {}).get("failures")
        if failures if options.failed else chosen:
            row = (
                again(record[key], options.limit)
                if options.failed and name != EXAMPLES
                else run(label, arguments, options.limit, marks) | facts()
            )
            if options.quick and not any(row.get(result) for result in ("passed", "failed", "skipped", "problem")):
                continue  # all tests of this suite are slow
            bad |= bool(row.get("problem") or row.get("failed"))
            record = rows() | {key: row}  # read again: another suite may have ended in the meantime
            lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
            RECORD.write_text("{\n" + lines + "\n}\n")
    PAGE.write_text(page(rows()))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
