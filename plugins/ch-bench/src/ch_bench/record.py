"""Records under ``docs/measured``: machine, command line, intervals, and sections of a page that programs rewrite."""

import json
import os
import platform
import random
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
from rich.console import Console

from commhooks import CommHooksError

RESAMPLES = 4000
LEVEL = 0.95
Interval = tuple[float, float, float]
"""Median, lower and upper end."""


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Exit with the status of a program, or with the message of a typed error."""
    try:
        sys.exit(main())
    except CommHooksError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def measured() -> Path:
    """Return ``docs/measured`` of the checkout around the working folder or this file, otherwise of the working folder."""
    for folder in (Path.cwd(), *Path.cwd().parents, *Path(__file__).resolve().parents):
        if (folder / "docs" / "measured").is_dir():
            return folder / "docs" / "measured"
    return Path.cwd() / "docs" / "measured"


def interval(values: Sequence[float]) -> Interval:
    """Return the median and its bootstrap interval."""
    rng = random.Random(0)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = int(RESAMPLES * (1 - LEVEL) / 2)
    return median(values), medians[tail], medians[-1 - tail]


def machine() -> dict[str, Any]:
    """Return processor, cores, GPU, system and versions."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        model = found[1] if found else model
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"cpu": model, "cores": os.cpu_count(), "gpu": gpu, "system": platform.system(), **versions}


def command(module: str, argv: Sequence[str] | None = None, *, environment: str = "") -> str:
    """Return the command line of a program, without folders of this machine.

    >>> command("programs.cost.memory", ["--out", "x", "topk(bits=2)"], environment="OMP_NUM_THREADS=1")
    "OMP_NUM_THREADS=1 python -m programs.cost.memory 'topk(bits=2)'"
    """
    words = list(sys.argv[1:] if argv is None else argv)
    kept = [word for i, word in enumerate(words) if word != "--out" and (i == 0 or words[i - 1] != "--out")]
    return " ".join([*([environment] if environment else []), "python -m", module, *map(shlex.quote, kept)])


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table.

    >>> print(markdown_table(["hook", "ms"], [["`noop`", "1.5"]]))
    | hook | ms |
    |---|---|
    | `noop` | 1.5 |
    """
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("|" + "|".join(row) + "|" if row == lines[1] else f"| {' | '.join(row)} |" for row in lines)


def printed(console: Console) -> str:
    """Return the output of a recording console as a Markdown block."""
    raw = "\n".join(line.rstrip() for line in console.export_text(clear=False).splitlines())
    return f"```text\n{raw}\n```"


def write(page: str, title: str, made_by: str, body: str, *notes: str) -> Path:
    """Write one section of ``docs/measured/PAGE.md``; the other sections stay as they are.

    Args:
        page: file name without suffix.
        title: heading of the section. A title equal to the page's heading replaces the part before the first section.
        made_by: command lines that produced the section, one per line.
        body: Markdown.
        *notes: further items after machine and date.
    """
    path = measured() / f"{page}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    items = [*(f"{key}: {value}" for key, value in machine().items()), f"date: {date.today().isoformat()}", *notes]
    head = "\n".join([*(f"    {line}" for line in made_by.splitlines()), "", *(f"- {item}" for item in items)])
    path.write_text(replace_section(path.read_text() if path.exists() else f"# {title}\n", title, f"{head}\n\n{body}"))
    return path


def replace_section(page: str, title: str, text: str) -> str:
    r"""Return a page in which a section has a new text, or is added at the end.

    >>> print(replace_section("# A\n\none\n\n## B\n\ntwo\n", "B", "three"), end="")
    # A
    <BLANKLINE>
    one
    <BLANKLINE>
    ## B
    <BLANKLINE>
    three
    """
    parts = re.split(r"(?m)^(?=##? )", page)
    sections = [part.rstrip("\n") for part in parts if part.strip()]
    names = [section.splitlines()[0].lstrip("# ") for section in sections]
    if title in names:
        place = names.index(title)
        sections[place] = f"{sections[place].splitlines()[0]}\n\n{text}"
    else:
        sections.append(f"## {title}\n\n{text}")
    return "\n\n".join(sections) + "\n"


class FinishedRuns:
    """Finished runs in a JSON file, rewritten after each, so that a killed program loses none.

    Args:
        path: of the file, which need not exist.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "runs.json"
        >>> FinishedRuns(path).put("first", {"loss": 1.5})
        >>> FinishedRuns(path).runs
        {'first': {'loss': 1.5}}
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def put(self, key: str, run: dict[str, Any]) -> None:
        """Keep a run."""
        self.runs[key] = run
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json_lines(self.runs))
        new.replace(self.path)


def json_lines(data: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return JSON with one entry of the outermost list or object on each line.

    >>> print(json_lines({"a": [1, 2], "b": {"c": 3}}), end="")
    {
    "a": [1, 2],
    "b": {"c": 3}
    }
    """
    if isinstance(data, Mapping):
        return "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in data.items()) + "\n}\n"
    return "[\n" + ",\n".join(map(json.dumps, data)) + "\n]\n"
