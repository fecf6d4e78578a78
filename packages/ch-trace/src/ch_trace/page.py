"""One page for a browser: figures, critical path and time line of written traces. It needs no network and no other file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from ch_trace.critical_path import BACKWARD, KINDS, by_step
from ch_trace.summary import COLUMNS, Summary
from commhooks import HookConfigError, duration

_TICKS = 10  # of a microsecond, the unit of times in the page


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace file that was read.

    Attributes:
        path: of the file.
        data: its content in the Trace Event Format.
        summary: its figures.
    """

    path: Path
    data: Mapping[str, Any]
    summary: Summary

    @classmethod
    def read(cls, path: Path) -> "list[TraceFile]":
        """Return the trace of a file, or the traces of all files in a folder.

        Raises:
            HookConfigError: no trace is there, or one of another version.
        """
        found = []
        for one in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            try:
                data = json.loads(one.read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise HookConfigError(f"{one} cannot be read ({error}): give a file that Trace wrote") from error
            other = data.get("otherData") if isinstance(data, dict) else None
            if not isinstance(other, dict) or "summary" not in other:
                continue
            try:
                found.append(cls(one, data, Summary.from_dict(other["summary"])))
            except (KeyError, TypeError) as error:
                raise HookConfigError(
                    f"{one} is a trace of commhooks {other.get('commhooks')}, which this version does not read ({error}): read "
                    "it with that version, or open it in Perfetto"
                ) from error
        if not found:
            raise HookConfigError(
                f"{path} has no trace: give a file that Trace wrote, or the folder of commhooks run --trace FOLDER. A folder "
                "*.parts has the parts of single ranks, which ch_trace.merge joins"
            )
        return found


def html_page(traces: Sequence[TraceFile]) -> str:
    """Return the page of some traces."""
    sections = "\n".join(_section(one, number) for number, one in enumerate(traces))
    template = files("ch_trace").joinpath("page.html").read_text("utf-8")
    title = escape(", ".join(one.summary.hook for one in traces))
    # The title is the first place, so names that look like a place stay as they are.
    return template.replace("$BODY", sections, 1).replace("$TITLE", f"Trace of {title}", 1)


def _section(written: TraceFile, number: int) -> str:
    one, total = written.summary, sum(written.summary.critical.values())
    labels = {kind: kind for kind in KINDS} | {BACKWARD: escape(one.during)}
    bar = legend = ""
    for kind in KINDS if total else ():
        share = one.critical[kind] / total
        colour = f"background:var(--{kind})"
        bar += f'<span style="{colour};flex:{share:.4f}" title="{labels[kind]} {share:.0%}"></span>'
        legend += f'<li><i style="{colour}"></i>{labels[kind]} {share:.0%}, {duration(one.critical[kind])}</li>'
    data = json.dumps(_data(written.data), separators=(",", ":")).replace("<", "\\u003c")
    return f"""<section>
<h1>{escape(one.hook)}</h1>
<p class="soft">{escape(_origin(written, one))}</p>
<p class="advice">{escape(one.advice)}</p>
<dl class="figures">{"".join(f"<div><dt>{escape(name)}</dt><dd>{text}</dd></div>" for name, text in _figures(one))}</dl>
<h2>Critical path of a step</h2>
<div class="bar">{bar}</div><ul class="legend">{legend}</ul>
<h2>All steps</h2>
<p class="soft">Height is the time of a step, colours are its critical path. Choose a step to see it below.</p>
<canvas class="overview" aria-label="time of each step"></canvas>
<h2>Time line of all ranks</h2>
<div class="tools"><button class="before">previous step</button><button class="after">next step</button>
<button class="less">zoom out</button><button class="more">zoom in</button><button class="all">whole trace</button>
<label>step <input class="wanted" type="number"></label><span class="status soft"></span></div>
<canvas class="lanes" aria-label="time line of all ranks"></canvas>
<p class="readout">Point at a bar to read it.</p>
<p class="soft">Drag to move, Ctrl and the wheel or two fingers to zoom. Grey: waits. Pale red: a message that is queued.
The black line follows the critical path from rank to rank.</p>
<h2>Buckets</h2>
<div class="scroll">{_table(one)}</div>
</section>
<script type="application/json" id="data-{number}">{data}</script>"""


def _origin(written: TraceFile, one: Summary) -> str:
    dropped = f"; the limit dropped the oldest {one.dropped} events" if one.dropped else ""
    return f"{written.path.name}: {one.recorded}{dropped}"


def _figures(one: Summary) -> list[tuple[str, str]]:
    mean = sum(one.critical.values()) or one.step

    def part(seconds: float) -> str:
        return duration(seconds) + (f" ({seconds / mean:.0%})" if mean else "")

    return [
        ("a step" if one.during == BACKWARD else "a round", f"{duration(mean)}, median {duration(one.step)}"),
        (one.during, part(one.backward)),
        ("messages on the wire", part(one.wire)),
        (f"hidden behind the {one.during}", "unknown" if one.hidden is None else f"{one.hidden:.0%}"),
        ("exposed, in the hook", part(one.exposed)),
        ("of it waiting", part(one.waiting)),
    ]


def _table(one: Summary) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("bucket", *COLUMNS, "parameters"))
    rows = []
    for row in one.buckets:
        cells = (row.name, *row.cells, row.parameters)
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _data(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page draws: lanes of ranks in columns of numbers, and the steps of the lowest rank.

    Times are differences to the begin before, in tenths of a microsecond, because most of them are short numbers.
    """
    titles: dict[tuple[int, int], str] = {}
    slices: dict[tuple[int, int], list[dict[str, Any]]] = {}
    ranks: dict[int, str] = {}
    for event in trace["traceEvents"]:
        key = event["pid"], event["tid"]
        if event["name"] == "thread_name":
            titles[key] = event["args"]["name"]
        elif event["name"] == "process_name":
            ranks[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            slices.setdefault(key, []).append(event)
    numbers, edges = _steps(slices, min(ranks))
    path = sorted(
        (event["ts"], event["ts"] + event["dur"], event["args"]["kind"])
        for some in slices.values()
        for event in some
        if event["cat"] == "critical"
    )
    names: dict[tuple[str, str], int] = {}
    lanes: dict[int, list[dict[str, Any]]] = {rank: [] for rank in sorted(ranks)}
    for (rank, thread), some in sorted(slices.items()):
        lane = _lane([event for event in some if event["cat"] != "step"], names)
        if lane["t"]:
            is_path = some[0]["cat"] == "critical"
            lanes[rank].append({"name": titles[rank, thread], "path": is_path, **lane})
    if len(engines := {title.partition(": ")[0] for title in titles.values() if ": " in title}) == 1:
        for one in chain.from_iterable(lanes.values()):  # a phone has no room for the name of the only engine
            one["name"] = one["name"].removeprefix(f"{next(iter(engines))}: ")
    return {
        "ranks": [{"title": ranks[rank], "lanes": some} for rank, some in lanes.items()],
        "names": list(names),
        "numbers": numbers,
        "edges": [edge / 1e6 for edge in edges],
        "kinds": [
            [round(one.get(kind, 0.0) / 1e6, 7) for kind in KINDS]
            for one in by_step(((kind, begun, ended) for begun, ended, kind in path), edges)
        ],
    }


def _steps(slices: Mapping[tuple[int, int], list[dict[str, Any]]], lowest: int) -> tuple[list[int], list[float]]:
    """Return the numbers of the lowest rank's steps, and the moments between them in microseconds."""
    of_engines = [
        [event for event in some if event["cat"] == "step"]
        for (rank, _), some in sorted(slices.items())
        if rank == lowest
    ]
    steps = sorted(next((some for some in of_engines if some), []), key=lambda event: event["ts"])
    ends = [event["ts"] + event["dur"] for event in steps]
    if len(steps) == 1:
        return [steps[0]["args"]["step"]], [steps[0]["ts"], *ends]
    return [event["args"]["step"] for event in steps[1:]], ends


def _lane(events: list[dict[str, Any]], names: dict[tuple[str, str], int]) -> dict[str, list[int]]:
    t, d, n, b, before = list[int](), list[int](), list[int](), list[int](), 0
    for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
        begun = round(event["ts"] * _TICKS)
        t.append(begun - before)
        d.append(round(event["dur"] * _TICKS))
        n.append(names.setdefault((event["name"], event["cat"]), len(names)))
        b.append(event["args"].get("wire_bytes", event["args"].get("bytes", 0)))
        before = begun
    return {"t": t, "d": d, "n": n, **({"b": b} if any(b) else {})}
