"""The findings of the kit, a line each, written as they are made: what a cut run knows, and a later one need not redo."""

import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Values = Mapping[str, Any]
FINAL = ("ok", "skipped")
TRIES = 2  # of a row whose process did not live to see its end


class Skipped(Exception):
    """A row cannot be had here; the message says why."""


class Dead(Exception):
    """This process is of no use any more: a CUDA error stays with it. The part begins anew in another."""


class Rows:
    """The rows of one part.

    Args:
        path: the file, one JSON object a line, of all parts.
        part: name of the part.
        run: number of this invocation of the kit: what failed in it is not tried again before the next.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rows.jsonl"
        >>> rows = Rows(path, "sums", 1)
        >>> rows.row("small", lambda: {"sum": 1 + 1})
        >>> rows.row("impossible", lambda: 1 // 0)
        >>> rows.row("small", lambda: {"sum": 3})  # there already
        >>> [(row["name"], row["verdict"], row.get("values")) for row in latest(path).values()]
        [('small', 'ok', {'sum': 2}), ('impossible', 'failed', None)]
    """

    def __init__(self, path: Path, part: str, run: int) -> None:
        self.path, self.part, self.run = path, part, run

    def row(self, name: str, find: Callable[..., Values], *args: Any) -> None:
        """``find(*args)``, unless it is known; an exception is a finding as well.

        Raises:
            Dead: a CUDA error.
        """
        before = latest(self.path).get(f"{self.part}/{name}", {})
        if before.get("verdict") in FINAL or (before.get("verdict") == "failed" and before.get("run") == self.run):
            return
        tries = before.get("tries", 0) + 1 if before.get("verdict") == "begun" else 1
        if tries > TRIES:
            self._write(name, "failed", error="its process ended, or was ended at the deadline, before the row did")
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
        write(self.path, {"part": self.part, "name": name, "verdict": verdict, "run": self.run, **more})


def write(path: Path, row: Values) -> None:
    """Add a line, in one write."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def latest(path: Path) -> dict[str, dict[str, Any]]:
    """``part/name`` -> the last row of that name, in the order in which they were first written. A last line that was cut
    off is left out.
    """
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
