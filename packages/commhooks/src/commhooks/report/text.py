"""Text of a report for a terminal of 80 columns, and HTML for a notebook."""

import textwrap
from collections.abc import Mapping
from html import escape
from typing import Any

WIDTH = 80
SENT = "sent: bytes that this rank sends, if all-reduces go round a ring"
RATIO = "ratio: bytes sent with plain averaging, divided by those with the hook"
RATIO_OF_NODES = "ratio: bytes sent between nodes with plain averaging, divided by those with the hook"
_HEADS = ("parameters", "gradient", "sent", "ratio", "error", "residual")
_WIDTHS = (10, 9, 9, 7, 6, 9)


def as_text(report: Mapping[str, Any]) -> str:
    """Return lines of at most 80 characters. A longer name of a parameter is not cut."""
    lines = [*_wrapped(_title(report), ""), ""]
    first = WIDTH - sum(_WIDTHS) - len(_WIDTHS)
    lines.append(_line("a step", _HEADS, first))
    for group in report["groups"]:
        lines.append(_line(group["treatment"], _cells(group), first))
        if group["why"]:
            lines += _wrapped("because " + group["why"], "  ")
        lines += _wrapped(group["pattern"], "  ")
    lines.append(
        _line("all", _cells({**report["total"], "names": [n for g in report["groups"] for n in g["names"]]}), first)
    )
    for legend in _legends(report):
        lines += _wrapped(legend, "  ", "")
    node = report.get("node")
    if node:
        lines += [
            "",
            *_wrapped(f"a node sends {size(node['leaving'])} to other nodes, and {size(node['inside'])} inside", ""),
        ]
    weights = _weights(report["stats"])
    if weights:
        lines += ["", *_wrapped(weights, "  ", "")]
    if report["rank_checks"]:
        lines += ["", *_wrapped(report["rank_checks"], "  ", "")]
    for warning in report["warnings"]:
        lines += ["", *_wrapped("warning: " + warning, "  ", "")]
    return "\n".join(lines)


def as_html(report: Mapping[str, Any]) -> str:
    """Return one HTML table."""
    head = "".join(f"<th>{name}</th>" for name in ("treatment", "why", *_HEADS))
    rows = []
    for group in report["groups"]:
        cells = (group["treatment"], group["why"] or group["pattern"], *_cells(group))
        names = escape(", ".join(group["names"]), quote=True)
        rows.append(f'<tr title="{names}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    checks = f"<p>{escape(report['rank_checks'])}</p>" if report["rank_checks"] else ""
    weights = _weights(report["stats"])
    checks = (f"<p>{escape(weights)}</p>" if weights else "") + checks
    notes = "".join(f"<p>{escape(legend)}</p>" for legend in _legends(report)) + checks
    notes += "".join(f"<p><b>warning</b> {escape(warning)}</p>" for warning in report["warnings"])
    return f"<p>{escape(_title(report))}</p><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{notes}"


def size(count: float | None) -> str:
    """Return a byte count for people.

    >>> size(16640), size(42_800_000), size(12), size(None)
    ('16.6 kB', '42.8 MB', '12 B', '–')
    """
    if count is None:
        return "–"
    for unit, of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= of:
            return f"{count / of:.1f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Return a time for people.

    >>> duration(0.01234), duration(2.5), duration(42e-6)
    ('12.3 ms', '2.50 s', '42 µs')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} µs"


def _legends(report: Mapping[str, Any]) -> list[str]:
    """Return the meaning of the columns, if the hook sends anything, and the reasons for unknown figures."""
    found = []
    if report["total"]["ratio"] is not None:
        found += [SENT, RATIO_OF_NODES if report.get("node") else RATIO]
    rows = [*report["groups"], report["total"]]
    for column, key in (("sent", "wire_bytes"), ("ratio", "ratio"), ("residual", "residual_norm")):
        if any(row[key] is None for row in rows):
            found.append(f"{column} –: {_UNKNOWN[key]}")
    if any(row["relative_error"] is None and row["residual_norm"] is not None for row in rows):
        found.append(f"error –: {_UNKNOWN['relative_error']}")
    return found


_UNKNOWN = {
    "wire_bytes": "a foreign hook, whose messages are unknown",
    "ratio": "nothing is sent",
    "residual_norm": "no residual, because these parameters are sent whole, or their hook keeps none; so no error is known",
    "relative_error": "the gradient of the last step is gone or zero, so the share that was not sent is unknown",
}
"""Reasons for a "–" in the table, by the figure that is unknown."""


def _weights(stats: Mapping[str, float]) -> str:
    """Return a sentence on the weights of the ranks; empty if all ranks count equally."""
    if "weightless_steps" not in stats:
        return ""
    skipped = f"{stats['weightless_steps']:.0f} steps were skipped because all ranks weighed 0"
    if "weight_skew" not in stats:
        return f"weighted: {skipped}"
    return (
        f"weighted: in the last step the largest weight was {stats['weight_skew']:.2f} times the mean weight, and weights moved "
        f"{stats['weight_moved']:.0%} of the average between ranks; {skipped}"
    )


def _title(report: Mapping[str, Any]) -> str:
    stats = report["stats"]
    if not report["world_size"]:
        return f"{report['hook']}: a foreign hook, called {stats.get('calls', 0):.0f} times; its bytes are unknown"
    alone = report["world_size"] == 1
    far = f" on a link of {report['link']}" if report.get("link") else ""
    passed = report["seconds"]
    of_run = f" ({stats['hook_seconds'] / passed:.0%} of the {duration(passed)} since attach)" if passed else ""
    sent = "0 B on the wire, because there is one rank" if alone else f"{size(stats['wire_bytes'])} sent"
    return (
        f"{report['hook']} on rank {report['rank']} of {report['world_size']}{far}: {stats['steps']:.0f} steps, "
        f"{stats['compressed_steps']:.0f} of them compressed; {sent}; in the "
        f"hook {stats['hook_seconds']:.2f} s{of_run}, {stats['wait_seconds']:.2f} s of them waiting"
    )


def _cells(group: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(len(group["names"])),
        size(group["gradient_bytes"]),
        size(group["wire_bytes"]),
        _number(group["ratio"], ".1f"),
        _number(group["relative_error"], ".3f"),
        _number(group["residual_norm"], ".2e"),
    )


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _line(first: str, cells: tuple[str, ...], width: int) -> str:
    if len(first) > width:  # a name is never cut, so it gets its own line
        return "\n".join([first, _line("", cells, width)])
    return first.ljust(width) + "".join(" " + cell.rjust(w) for cell, w in zip(cells, _WIDTHS, strict=True))


def _wrapped(text: str, indent: str, first: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
