"""The record of a run of the kit, as Markdown and as JSON, from the rows that there are."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ch_bench.gpu_kit.parts import PARTS, Part
from ch_bench.gpu_kit.rows import latest

Row = dict[str, Any]


def write(folder: Path, rows: Path) -> None:
    """``record.md`` and ``record.json`` of what has been found so far."""
    found = list(latest(rows).values())
    (folder / "record.json").write_text(json.dumps({"rows": found}, indent=1) + "\n")
    (folder / "record.md").write_text(markdown(found))


def markdown(found: Sequence[Row]) -> str:
    """All parts, those that have not run as such."""
    lines = ["# Record of the GPU kit", "", "`python -m ch_bench.gpu_kit`; what was not found stands as such.", ""]
    for part in PARTS:
        mine = [row for row in found if row["part"] == part.name]
        lines += [f"## {part.title}", "", *_part(mine), ""]
    return "\n".join(lines)


def line(part: Part, rows: Path) -> str:
    """What became of a part, in one line."""
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
    """Rows with the same columns, together."""
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
