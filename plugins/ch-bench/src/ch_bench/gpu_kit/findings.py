"""Findings of the kit, one JSON object a line, written at once, and the record that is made from them.

An interrupted run keeps its findings, and the next run continues.
"""

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ch_bench.gpu_kit.part_list import PARTS, Part

Values = Mapping[str, Any]
Row = dict[str, Any]
FINAL = ("ok", "skipped")
TRIES = 2  # of a row whose process ended before the row did


class Skipped(Exception):
    """The machine cannot provide a row; the message is the reason."""


class Dead(Exception):
    """A CUDA error has made this process useless. The part continues in a new process."""


class Findings:
    """The rows of one part.

    Args:
        path: file of all parts.
        part: name of the part.
        run: number of this run of the kit. A row that failed is tried again only in the next run.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rows.jsonl"
        >>> rows = Findings(path, "sums", 1)
        >>> rows.row("small", lambda: {"sum": 1 + 1})
        >>> rows.row("impossible", lambda: 1 // 0)
        >>> rows.row("small", lambda: {"sum": 3})  # known already
        >>> [(row["name"], row["verdict"], row.get("values")) for row in latest(path).values()]
        [('small', 'ok', {'sum': 2}), ('impossible', 'failed', None)]
    """

    def __init__(self, path: Path, part: str, run: int) -> None:
        self.path, self.part, self.run = path, part, run

    def row(self, name: str, find: Callable[..., Values], *args: Any) -> None:
        """Call ``find(*args)`` unless the row is known, and write the result or the exception.

        Raises:
            Dead: a CUDA error.
        """
        before = latest(self.path).get(f"{self.part}/{name}", {})
        if before.get("verdict") in FINAL or (before.get("verdict") == "failed" and before.get("run") == self.run):
            return
        tries = before.get("tries", 0) + 1 if before.get("verdict") == "begun" else 1
        if tries > TRIES:
            self._write(name, "failed", error="the process ended, or reached its deadline, before the row did")
            return
        self._write(name, "begun", tries=tries)
        begun = time.monotonic()
        try:
            found = dict(find(*args))
        except Skipped as why:
            self._write(name, "skipped", why=str(why))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self._write(name, "failed", error=text, traceback=traceback.format_exc()[-3000:], took=_since(begun))
            if "CUDA error" in text or "device-side assert" in text:
                raise Dead(text) from error
        else:
            self._write(name, "ok", values=found, took=_since(begun))

    def _write(self, name: str, verdict: str, **more: Any) -> None:
        append(self.path, {"part": self.part, "name": name, "verdict": verdict, "run": self.run, **more})


def append(path: Path, row: Values) -> None:
    """Append a line in one write."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def latest(path: Path) -> dict[str, dict[str, Any]]:
    """Return ``part/name`` -> last row of that name, in the order of their first lines. Incomplete lines are ignored."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[f"{row['part']}/{row['name']}"] = row
    return found


def _since(begun: float) -> float:
    return round(time.monotonic() - begun, 2)


# -- the record


def write_record(folder: Path, rows: Path) -> None:
    """Write ``record.md`` and ``record.json`` of all findings."""
    found = list(latest(rows).values())
    (folder / "record.json").write_text(json.dumps({"rows": found}, indent=1) + "\n")
    (folder / "record.md").write_text(markdown(found))


def markdown(found: Sequence[Row]) -> str:
    """Return the record as Markdown, with the parts that have not run."""
    lines = ["# Record of the GPU kit", "", "Made by `python -m ch_bench.gpu_kit`; missing findings are listed.", ""]
    for part in PARTS:
        mine = [row for row in found if row["part"] == part.name]
        lines += [f"## {part.title}", "", *_part(mine), ""]
    return "\n".join(lines)


def line(part: Part, rows: Path) -> str:
    """Return the outcome of a part as one line."""
    mine = [row for row in latest(rows).values() if row["part"] == part.name]
    return f"{part.name}: {_counts(mine)}"


def _part(mine: Sequence[Row]) -> list[str]:
    if not mine:
        return ["Has not run."]
    found = [row for row in mine if row["verdict"] == "ok" and row["name"] != "(end)"]
    lines = [f"{_counts(mine)}.", ""]
    for columns, rows in _tables(found):
        lines += [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        lines += [f"| {_cell(row['name'])} | {' | '.join(_cell(row['values'][c]) for c in columns)} |" for row in rows]
        lines += [""]
    for row in mine:
        if row["verdict"] in ("failed", "begun") and row["name"] != "(end)":
            lines.append(f"- **{row['name']}**: {_first(row.get('error') or 'did not end')}")
        elif row["verdict"] == "skipped":
            lines.append(f"- {row['name']}: skipped: {row['why']}")
    return lines


def _tables(found: Sequence[Row]) -> list[tuple[list[str], list[Row]]]:
    """Group rows with the same columns."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in found:
        groups.setdefault(tuple(row["values"]), []).append(row)
    return [(list(columns), rows) for columns, rows in groups.items()]


def _counts(mine: Sequence[Row]) -> str:
    rows = [row for row in mine if row["name"] != "(end)"]
    end: Row = next((row for row in mine if row["name"] == "(end)"), {})
    verdicts = [row["verdict"] for row in rows]
    failed = len(rows) - verdicts.count("ok") - verdicts.count("skipped")
    said = f"{verdicts.count('ok')} found, {failed} failed, {verdicts.count('skipped')} skipped"
    took = f", {end['took']} s" if "took" in end else ""
    return said + took + (f"; **{end['error']}**" if end.get("error") else "")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict | list):
        value = json.dumps(value)
    return str(value).replace("|", "\\|").replace("\n", " ")


def _first(text: str) -> str:
    return text.splitlines()[0][:300] if text else ""
