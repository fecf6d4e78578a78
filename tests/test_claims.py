"""Numbers in README and docs match their records. The check finds a wrong number."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("claims", ROOT / "tests" / "claims.py")
claims = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(claims)


@pytest.mark.parametrize("page", claims.pages(), ids=lambda page: page.name)
def test_marked_numbers_are_those_of_their_records(page):
    assert not claims.wrong(page.read_text(), page.name)


def test_every_result_in_the_readme_names_its_record():
    text = (ROOT / "README.md").read_text()
    assert len(claims.MARKER.findall(text)) >= 10
    assert not claims.unmarked(text)


@pytest.mark.parametrize("page", ["README.md", "docs/choosing.md"])
def test_a_planted_wrong_number_is_found(page):
    text = (ROOT / page).read_text()
    match = claims.MARKER.search(text)
    assert match, f"{page} has no marked number"
    number = match["number"].strip()
    planted = text.replace(
        match[0], match[0].replace(number, re.sub(r"\d", lambda d: str((int(d[0]) + 1) % 10), number))
    )
    assert len(claims.wrong(planted, page)) == len(claims.wrong(text, page)) + 1


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
def test_a_number_may_be_rounded(recorded, shown, equal):
    assert claims.rounds_to(recorded, shown) == equal


def test_a_result_without_a_marker_is_found():
    assert claims.unmarked("It takes 12 ms.") == ["It takes 12 ms."]
    assert not claims.unmarked("```\n12 ms\n```\nIt takes 12<!--bench:a/b/c--> ms.")
