"""Compare every marked number of README and docs with its record: `python tests/claims.py` lists the differences.

A marker is an HTML comment right after a number: `58.9<!--race:200mbit/torch allreduce/seconds-->`. It names the record
docs/measured/race.md, a text before the table, the first cell of a row, and a column by title or number.
The number may be rounded to two digits or more.
Numbers of JSON records have a function below instead: `19<!--compare:there-->`.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "docs" / "measured"
MARKER = re.compile(r"(?P<number>[+-]?\d[\d .]*(?:\.\d+)?)<!--(?P<claim>[\w-]+:[^>]*?)-->")
RESULT = re.compile(r"\d\s?(?:ms|×|nats|MB)(?![\w-])|\d times (?:sooner|faster|fewer|less)")


def _compare(side: str) -> Callable[[], int]:
    def count() -> int:
        rows = json.loads((MEASURED / "compare.json").read_text())["rows"]
        return sum(row[side]["outcome"] == "works" for row in rows if not row["reason"])

    return count


BAD = {"silent", "hang", "abort", "segfault"}


def _faults(side: str) -> Callable[[], int]:
    def count() -> int:
        rows = json.loads((MEASURED / "faults.json").read_text())
        return sum(row["side"] == side and row["outcome"] in BAD for row in rows)

    return count


JSON_CLAIMS: dict[str, Callable[[], int]] = {
    "compare:there": _compare("theirs_outcome"),
    "compare:here": _compare("our_outcome"),
    "faults:torch": _faults("torch"),
    "faults:ours": _faults("ours"),
}


def cells(line: str) -> list[str]:
    """Return the cells of a line of a Markdown table, or of a table printed in columns."""
    if line.strip().startswith("|"):
        return [cell.strip() for cell in line.strip().strip("|").split("|")]
    return [cell for cell in re.split(r"\s{2,}", line.strip()) if cell]


def recorded(claim: str) -> str:
    """Return the cell that a claim names.

    Raises:
        LookupError: record, text, row or column do not exist.
    """
    if claim in JSON_CLAIMS:
        return str(JSON_CLAIMS[claim]())
    name, _, place = claim.partition(":")
    after, row, column = place.split("/", 1)[0], *place.split("/", 1)[1].rsplit("/", 1)
    text = (MEASURED / f"{name}.md").read_text()
    begin = text.lower().find(after.lower())
    if begin < 0:
        raise LookupError(f"{name}.md has no text {after!r}")
    header: list[str] = []
    for line in text[begin:].splitlines():
        found = cells(line)
        if len(found) > 1 and found[0].strip("`") in {"hook", "method"}:
            header = found
        elif header and found and found[0].strip("`") == row.strip("`"):
            index = int(column) if column.isdigit() else header.index(column)
            return found[index]
    raise LookupError(f"{name}.md has no row {row!r} after {after!r}")


def rounds_to(recorded_number: str, shown: str) -> bool:
    """Return True if a page shows the recorded number, or its rounding to at least two digits.

    >>> rounds_to("42.847", "42.8"), rounds_to("42.847", "42.9"), rounds_to("0.349", "0.35"), rounds_to("2.57", "3")
    (True, False, True, False)
    """
    shown = shown.replace(" ", "").lstrip("+")
    places = len(shown.partition(".")[2])
    if shown == recorded_number or len(shown.lstrip("-0.").replace(".", "")) < 2:
        return shown == recorded_number
    return f"{float(recorded_number):.{places}f}" == shown


def wrong(text: str, page: str) -> list[str]:
    """Return a line for each marked number of a page that differs from its record."""
    lines = []
    for match in MARKER.finditer(text):
        number, claim = match["number"].strip(), match["claim"]
        try:
            cell = recorded(claim)
        except (LookupError, ValueError, OSError) as error:
            lines.append(f"{page}: {number} names {claim}: {error}")
            continue
        if not any(rounds_to(each, number) for each in re.findall(r"-?\d+(?:\.\d+)?", cell)):
            lines.append(f"{page}: {number}, but {claim} has {cell!r}")
    return lines


def unmarked(text: str) -> list[str]:
    """Return the lines with a result (ms, MB, nats, times) that no marker covers. Code blocks do not count."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line for line in prose.splitlines() if RESULT.search(MARKER.sub("", line))]


def pages() -> list[Path]:
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "docs" / "packages").glob("*.md")),
    ]


def main() -> int:
    found = [line for page in pages() for line in wrong(page.read_text(), str(page.relative_to(ROOT)))]
    found += [f"README.md: no marker: {line}" for line in unmarked((ROOT / "README.md").read_text())]
    print("\n".join(found) or "every marked number is that of its record")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
