"""The demo's output: the table, the picture, and the raw records behind both."""

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.table import Table
from rich.text import Text

COLOURS = ["#4d4d4d", "#0072b2", "#e69f00", "#cc3d7a", "#009e73", "#7e57c2", "#56b4e9", "#8c564b"]
DASHES = ["-", (0, (6, 2)), "-", (0, (6, 2)), "-", (0, (6, 2)), "-", (0, (6, 2))]
RESULTS, PICTURE = "results.json", "loss.png"
MB = 1e6
LINKS = {"1\nGbit/s": 1e9, "100\nMbit/s": 1e8}  # bits per second


def write(results: dict[str, Any], out: Path) -> None:
    """Write ``results.json`` and ``loss.png`` to the folder ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    (out / RESULTS).write_text(json.dumps(results, indent=1))
    picture(results, out / PICTURE)


def summary(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per hook, without ``noop``, the reference of the times.

    Seconds are medians over the steps, with each step's time on the slowest rank. Bytes are means over *all* steps, so
    that a hook's uncompressed first steps count.
    """
    *hooks, noop = results["hooks"]
    nothing = median(noop["step_seconds"])
    world = results["settings"]["nproc"]
    plain = (
        2 * 4.0 * results["parameters"] * (world - 1) / world
    )  # bytes that a rank sends in an fp32 all-reduce, a ring
    rows = []
    for hook in hooks:
        steps = len(hook["train_loss"])
        step = median(hook["step_seconds"])
        counted = "payload_bytes" in hook["stats"]  # unknown for a foreign hook
        payload = hook["stats"]["payload_bytes"] / steps if counted else None
        wire = hook["stats"]["wire_bytes"] / steps if counted else None
        rows.append(
            {
                "hook": hook["hook"],
                "val": hook["val_loss"][-1][1],
                "half": min(hook["val_loss"], key=lambda at: abs(at[0] - steps / 2)),
                "step": step,
                "communication": step - nothing,
                "payload": payload,
                "wire": wire,
                "ratio": plain / wire if wire else None,
            }
        )
        rows[-1] |= {name: None if wire is None else step + 8 * wire / speed for name, speed in LINKS.items()}
    return rows


def table(results: dict[str, Any]) -> Table:
    """Return the summary as a rich table. The best value of a column is bold."""
    rows = summary(results)
    settings = results["settings"]
    shown = Table(
        title=f"GPT with {results['parameters'] / 1e6:.1f} M parameters, {settings['steps']} steps, "
        f"{settings['nproc']} ranks on {settings['device']}",
        caption="loss: held out, nats per character · step: median of the slowest rank\n"
        "MB: per rank and step, payload given to the collectives, wire sent\n"
        "ratio: wire bytes of an fp32 all-reduce, divided by those of the hook\n"
        "1 Gbit/s, 100 Mbit/s: predicted step in ms, the measured step plus wire bytes / bandwidth",
        box=box.SIMPLE_HEAD,
        header_style="bold",
        title_style="bold",
    )
    half = rows[0]["half"][0] if rows else 0
    shown.add_column("hook", vertical="bottom", overflow="fold")
    for name in (
        "final\nloss",
        f"loss at\nstep {half}",
        "step\nms",
        "comm.\nms",
        "payload\nMB",
        "wire\nMB",
        "ratio",
        *LINKS,
    ):
        shown.add_column(name, justify="right", vertical="bottom", no_wrap=True)
    best = {
        key: min((row[key] for row in rows if row[key]), default=None) for key in ("val", "step", "payload", *LINKS)
    }
    for row in rows:
        cells = {
            "val": f"{row['val']:.3f}",
            "half": f"{row['half'][1]:.3f}",
            "step": f"{row['step'] * 1e3:.1f}",
            "communication": f"{row['communication'] * 1e3:.1f}" if row["communication"] > 0 else "about 0",
            "payload": _megabytes(row["payload"]),
            "wire": _megabytes(row["wire"]),
            "ratio": f"{row['ratio']:.1f}×" if row["ratio"] else "?",
            **{name: f"{row[name] * 1e3:.0f}" if row[name] else "?" for name in LINKS},
        }
        bold = {key: "bold green" if key in best and row[key] == best[key] else "" for key in cells}
        name = re.sub(r"\((?=\w+\()", "(\n  ", row["hook"])  # a narrow table would break the name inside a word
        shown.add_row(Text(name), *(Text(cell, style=bold[key]) for key, cell in cells.items()))
    return shown


def _megabytes(size: float | None) -> str:
    return "?" if size is None else f"{size / MB:.3f}"


def remarks(results: dict[str, Any], out: Path) -> str:
    """Return remarks that help to read the table."""
    noop = median(results["hooks"][-1]["step_seconds"]) * 1e3
    lines = [
        f"A step without communication (noop, same run) takes {noop:.1f} ms; comm. is the time that a hook adds to it."
    ]
    if any(row["communication"] <= 0 for row in summary(results)):
        lines.append("'about 0' is a difference below the noise of the step times.")
    if results["settings"]["device"] == "cpu":
        lines.append(
            "The ranks talk over loopback, which is as fast as memory, so compression may look slower than none here.\n"
            "The last two columns predict a step on a real link, without overlap. On shaped links of these rates,\n"
            "predictions were within 14 % for 16 and 32 bits, and within 25 % for others (docs/measured/bench.md).\n"
            "To measure a link (needs root):\n"
            "nox -s bench -- --link 1gbit,100mbit"
        )
    return "\n".join([*lines, f"Raw records and the picture: {out / RESULTS}, {out / PICTURE}"])


def picture(results: dict[str, Any], path: Path) -> None:
    """Draw two panels with one loss axis, against steps and against the sent bytes of one rank."""
    with matplotlib.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(12, 5.4), layout="constrained")
        by_step, by_bytes = figure.subplots(1, 2, sharey=True)
        for i, (hook, row) in enumerate(zip(results["hooks"][:-1], summary(results), strict=True)):
            _draw(by_step, by_bytes, hook, row, COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)])
        by_step.set(xlabel="training steps", ylabel="loss, nats per character")
        by_bytes.set(xlabel="MB sent by one rank, log scale", xscale="log")
        by_bytes.xaxis.set_major_formatter("{x:g}")
        for axes, title in ((by_step, "Loss against steps"), (by_bytes, "Loss against bytes sent")):
            axes.set_title(title, loc="left", fontweight="bold")
            axes.grid(color="#e4e4e4", linewidth=0.8)
            axes.set_axisbelow(True)
        settings = results["settings"]
        figure.suptitle(
            f"GPT, {results['parameters'] / 1e6:.1f} M parameters, {settings['nproc']} ranks on {settings['device']} "
            "· line: training, circles: held out",
            fontsize=12,
        )
        figure.legend(*by_step.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, dpi=130)


def _draw(by_step: Axes, by_bytes: Axes, hook: dict[str, Any], row: dict[str, Any], colour: str, dash: Any) -> None:
    losses, sent = _smooth(hook["train_loss"]), [max(b, 1.0) / MB for b in hook["wire_bytes"]]
    label = f"{row['hook']}:  {_megabytes(row['wire'])} MB a step,  final loss {row['val']:.3f}"
    at = [step for step, _ in hook["val_loss"]]
    val = [loss for _, loss in hook["val_loss"]]
    by_step.plot(range(1, len(losses) + 1), losses, color=colour, linestyle=dash, linewidth=1.6, label=label)
    by_step.plot(at, val, "o", color=colour, markersize=5, markerfacecolor="white", markeredgewidth=1.5)
    if row["wire"] is None:
        return
    by_bytes.plot(sent, losses, color=colour, linestyle=dash, linewidth=1.6)
    by_bytes.plot([sent[s - 1] for s in at], val, "o", color=colour, markersize=5, markerfacecolor="white")


def _smooth(values: list[float], window: int = 9) -> list[float]:
    """Return the centred running mean, shorter at the ends."""
    half = window // 2
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]
