"""Numbers that pages quote are those of their records: `docs/measured/figures.tsv` says which.

A row has a page, words of the page with the numbers in braces, and the cells of a record that hold them: a text before the table,
the first cell of a row, and columns by title or number. A number may be rounded to two digits or more.
Numbers of JSON records are counted by a function below.
"""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "docs" / "measured"
NUMBER = re.compile(r"\{([+-]?\d[\d .]*)\}")
RESULT = re.compile(r"\d\s?(?:ms|×|nats|MB)(?![\w-])|\d times (?:sooner|faster|fewer|less|as fast)")
LINK = re.compile(r"(?:bit/s(?:,| and| with a round trip of) |mbit,)\d*$")  # before a round trip, which is no result
BAD = {"silent", "hang", "abort", "segfault"}


class Figure(NamedTuple):
    """One row of the table."""

    page: str
    words: str
    record: str
    before: str
    row: str
    columns: str

    @property
    def numbers(self) -> list[str]:
        return NUMBER.findall(self.words)

    @property
    def plain(self) -> str:
        """The words as the page has them."""
        return NUMBER.sub(r"\1", self.words)


def figures() -> list[Figure]:
    with (MEASURED / "figures.tsv").open(newline="") as file:
        _, *rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    return [Figure(*row) for row in rows]


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def _works(side: str) -> int:
    rows = json.loads((MEASURED / "compare.json").read_text())["rows"]
    return sum(row[side]["outcome"] == "works" for row in rows if not row["reason"])


def _passed(side: str) -> int:
    suite = json.loads((MEASURED / "compare.json").read_text())["suite"]
    return list(suite[side].values()).count("passed")


def _bad(side: str) -> int:
    rows = json.loads((MEASURED / "faults.json").read_text())
    return sum(row["side"] == side and row["outcome"] in BAD for row in rows)


COUNTED: dict[tuple[str, str], Callable[[], int]] = {
    ("compare", "there"): lambda: _works("theirs_outcome"),
    ("compare", "here"): lambda: _works("our_outcome"),
    ("compare", "own tests, theirs"): lambda: _passed("theirs"),
    ("compare", "own tests, ours"): lambda: _passed("ours"),
    ("faults", "torch"): lambda: _bad("torch"),
    ("faults", "ours"): lambda: _bad("ours"),
}


def cells(line: str) -> list[str]:
    """Return the cells of a line of a Markdown table, or of a table printed in columns."""
    if line.strip().startswith("|"):
        return [cell.strip() for cell in line.strip().strip("|").split("|")]
    return [cell for cell in re.split(r"\s{2,}", line.strip()) if cell]


def recorded(figure: Figure) -> list[str]:
    """Return the cells of the record that a row names.

    Raises:
        LookupError: record, text, row or column do not exist.
    """
    columns = figure.columns.split("; ")
    if (figure.record, columns[0]) in COUNTED:
        return [str(COUNTED[figure.record, column]()) for column in columns]
    text = (MEASURED / f"{figure.record}.md").read_text()
    begin = text.lower().find(figure.before.lower())
    if begin < 0:
        raise LookupError(f"{figure.record}.md has no text {figure.before!r}")
    header: list[str] = []
    for line in text[begin:].splitlines():
        found = cells(line)
        if len(found) > 1 and found[0].strip("`") in {"hook", "method"}:
            header = found
        elif header and found and found[0].strip("`") == figure.row.strip("`"):
            return [found[int(column) if column.isdigit() else header.index(column)] for column in columns]
    raise LookupError(f"{figure.record}.md has no row {figure.row!r} after {figure.before!r}")


def rounds_to(recorded_number: str, shown: str) -> bool:
    """Return True if a page shows the recorded number, or its rounding to at least two digits."""
    shown = shown.replace(" ", "").lstrip("+")
    places = len(shown.partition(".")[2])
    if shown == recorded_number or len(shown.lstrip("-0.").replace(".", "")) < 2:
        return shown == recorded_number
    return f"{float(recorded_number):.{places}f}" == shown


def wrong(figure: Figure, page: str) -> str:
    """Return the difference between a page, a row and its record, or an empty text."""
    if flat(page).count(figure.plain) != 1:
        return f"{figure.page} has {flat(page).count(figure.plain)} times {figure.plain!r}, expected once"
    found = recorded(figure)
    if len(found) != len(figure.numbers) or not found:
        return f"{figure.page}: {figure.words!r} has {len(figure.numbers)} numbers, and its record {len(found)}"
    for number, cell in zip(figure.numbers, found, strict=True):
        if not any(rounds_to(each, number) for each in re.findall(r"-?\d+(?:\.\d+)?", cell)):
            return f"{figure.page}: {number} in {figure.words!r}, but {figure.record} has {cell!r}"
    return ""


def uncovered(page: str, rows: list[Figure]) -> list[str]:
    """Return the parts of a page with a result (ms, MB, nats, times) that no row has.

    Code blocks and tables of predictions do not count.
    """
    prose = flat(re.sub(r"^```.*?^```|^<!-- cluster .*?^<!-- end", "", page, flags=re.MULTILINE | re.DOTALL))
    covered: set[int] = set()  # places of digits
    for row in rows:
        begin = prose.find(row.plain)
        for place, number in enumerate(NUMBER.finditer(row.words)):
            start = begin + number.start() - 2 * place  # without the braces before it
            covered |= set(range(start, start + len(number[1])))
    return [
        prose[max(0, f.start() - 40) : f.end()]
        for f in RESULT.finditer(prose)
        if f.start() not in covered and not LINK.search(prose[: f.start()])
    ]


def test_pages_quote_the_numbers_of_their_records() -> None:
    """Both ways: a changed page or record, and a result of the README without a row."""
    rows = figures()
    assert len(rows) > 50
    pages = {row.page: (ROOT / row.page).read_text() for row in rows}
    assert [text for row in rows if (text := wrong(row, pages[row.page]))] == []
    assert uncovered(pages["README.md"], [row for row in rows if row.page == "README.md"]) == []


@pytest.mark.parametrize("number", [0, 2, 12, -1])
def test_a_wrong_number_is_found(number: int) -> None:
    row = figures()[number]
    shown = row.numbers[-1]
    other = re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), shown)
    planted = row._replace(words=row.words.replace(f"{{{shown}}}", f"{{{other}}}"))
    page = flat((ROOT / row.page).read_text())
    assert not wrong(row, page)
    assert "times" in wrong(row, page.replace(row.plain, planted.plain))  # the page alone is wrong
    assert "but" in wrong(planted, page.replace(row.plain, planted.plain))  # page and table are


@pytest.mark.parametrize(
    ("recorded", "shown", "equal"),
    [
        ("42.847", "42.8", True),
        ("42.847", "42.9", False),
        ("0.349", "0.35", True),
        ("2.57", "3", False),
        ("1234", "1 234", True),
        ("-0.0112", "-0.011", True),
        ("-0.0112", "0.011", False),
    ],
)
def test_a_number_may_be_rounded(recorded: str, shown: str, equal: bool) -> None:
    assert rounds_to(recorded, shown) == equal


def test_a_result_without_a_row_is_found() -> None:
    assert uncovered("It takes 12 ms.", []) == ["It takes 12 ms"]
    assert uncovered("Over 50 Mbit/s and 80 ms it takes a while.", []) == []
    row = Figure("README.md", "takes {12} ms", "bench", "a", "b", "c")
    assert uncovered("```\n12 ms\n```\nIt takes 12\nms.", [row]) == []
    assert uncovered("It takes 7 ms, or takes 12 ms.", [row._replace(words="7 ms, or takes {12} ms")]) == [
        "It takes 7 ms"
    ]
