"""Draw the pictures of the documentation: `python docs/pictures.py` writes them to docs/_static.

`time-to-loss.png` and `hooks.png` have numbers of records. `one-step.png` and `two-level.png` are schematic.
"""

import itertools
import re
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
BARS = {  # label in the picture -> row of the record's table
    "PyTorch DDP": "torch allreduce, buckets of 1 MB",
    "PyTorch PowerSGD": "torch PowerSGD rank 4",
    "PyTorch fp16 hook": "torch fp16, buckets of 1 MB",
    "commhooks: quant4": "quant4, buckets of 1 MB",
    "commhooks: local SGD": "H=8, quant4, rate 1, momentum 0, inner rate × 1.41",
}


def table(record: str, *places: str) -> dict[str, list[str]]:
    """Return the first table of a record after some of its words: first cell of a row -> the other cells."""
    text = (HERE / "measured" / f"{record}.md").read_text()
    for place in places:
        text = text.split(place, 1)[1]
    lines = itertools.dropwhile(lambda line: not re.match(r"[| ]*(hook|method)\b", line), text.splitlines())
    rows = [re.split(r"\s*\|\s*|\s{2,}", line.strip(" |")) for line in itertools.takewhile(str.strip, lines)]
    return {row[0].strip("`"): row[1:] for row in rows[1:] if re.search(r"\d", " ".join(row[1:]))}


GREY, BLUE, LIGHT, RED = "#9aa5b1", "#2563eb", "#bcd0fb", "#c8553d"
ALL_REDUCE = "allreduce"
LINK = "1gbit"  # of `hooks.png`
LOOPBACK = ("The restructured code", "python tests/tools/hook_costs.py")  # words of the record bench before the table
LOSSES = (
    "GPT, cosine, 1 200 steps: quant8",
    "GPT, cosine, 1 200 steps: quant4",
)  # the second section has the newer quant4
LABELS = {  # in `hooks.png`, where a hook's expression is too wide
    "quant4(error_feedback=True)": "quant4 with\nerror feedback",
    "powersgd(rank=4)": "powersgd\n(rank=4)",
    "topk(density=0.01)": "topk\n(density=0.01)",
}


class Measured(NamedTuple):
    """What one row of `hooks.png` shows, and None for what was not measured."""

    free: float  # ms that the hook adds to a step over loopback
    limited: float | None  # the same on the link
    large: float | None  # bytes sent in a step as a part of all-reduce's, with the larger model
    small: float  # the same with the model of `loss`
    loss: float  # held-out loss minus all-reduce's, mean of the seeds
    spread: float  # standard deviation of the seeds


FORWARD, BACKWARD, BUCKETS = 2.0, 6.0, 3  # of the step that one_step() draws


def one_step() -> None:
    """Draw one step of a rank with three buckets: plain DDP above, and the same with a hook below."""
    figure, axes = plt.subplots(figsize=(8, 3.6), dpi=150)
    end = {}
    for top, name, code, message in ((4.0, "plain DDP", 0.0, 4.0), (1.2, "with a hook", 0.35, 0.9)):
        place, free = FORWARD, 0.0
        _block(axes, 0.0, FORWARD, top, GREY, "forward")
        for bucket in range(BUCKETS):
            _block(axes, place, BACKWARD / BUCKETS, top, LIGHT, f"backward {bucket + 1}")
            place += BACKWARD / BUCKETS
            if code:
                _block(axes, place, code, top, BLUE, "")
                place += code
            free = max(free, place)
            _block(axes, free, message, top - 1.0, RED, f"bucket {bucket + 1}" if not code else f"{bucket + 1}")
            free += message
        begin = max(place, free)
        if code:
            _block(axes, begin, code, top, BLUE, "")
            begin += code
        _block(axes, begin, 0.9, top, GREY, "step")
        end[name] = begin + 0.9
        axes.text(-0.2, top + 0.35, f"{name}: computes", ha="right", va="center", fontsize=9)
        axes.text(-0.2, top - 0.65, "network", ha="right", va="center", fontsize=9)
    axes.text(0.0, -0.75, "blue: the hook encodes and decodes. red: messages. Not to scale", fontsize=9)
    axes.set_xlim(-4.6, max(end.values()) + 0.2)
    axes.set_ylim(-1.1, 5.0)
    axes.axis("off")
    figure.tight_layout()
    figure.savefig(HERE / "_static" / "one-step.png")
    plt.close(figure)


def _block(axes: plt.Axes, begin: float, width: float, bottom: float, colour: str, text: str) -> None:
    axes.broken_barh([(begin, width)], (bottom, 0.7), facecolors=colour, edgecolors="white")
    dark = colour in (RED, BLUE)
    axes.text(
        begin + width / 2, bottom + 0.35, text, ha="center", va="center", fontsize=7, color="white" if dark else "black"
    )


def two_level() -> None:
    """Draw two nodes of four ranks: exact sums inside each node, and codes of one part of each rank between the nodes."""
    figure, axes = plt.subplots(figsize=(8, 3.4), dpi=150)
    for node in range(2):
        left = 5.6 * node
        axes.add_patch(plt.Rectangle((left, 0.0), 4.4, 4.0, facecolor="#f3f5f8", edgecolor=GREY))
        axes.text(left + 2.2, 4.15, f"node {node}", ha="center", fontsize=10)
        for place in range(4):
            y = 3.1 - 0.95 * place
            x = left + (3.0 if node == 0 else 0.4)
            axes.add_patch(plt.Rectangle((x, y), 1.0, 0.6, facecolor=LIGHT, edgecolor=BLUE))
            axes.text(x + 0.5, y + 0.3, f"rank {4 * node + place}", ha="center", va="center", fontsize=8)
        x = left + (2.5 if node == 0 else 1.9)
        axes.annotate("", (x, 0.35), (x, 3.65), arrowprops={"arrowstyle": "<->", "color": GREY})
        text = "1. sums, one part\nfor each rank\n3. gather of parts"
        axes.text(left + (0.2 if node == 0 else 2.2), 2.0, text, va="center", fontsize=8)
    for place in range(4):
        y = 3.4 - 0.95 * place
        axes.annotate("", (4.0, y), (6.0, y), arrowprops={"arrowstyle": "<->", "color": RED, "lw": 2})
    axes.text(5.0, -0.35, "2. codes of each part cross the slow link once", ha="center", fontsize=9, color=RED)
    axes.set_xlim(-0.2, 10.2)
    axes.set_ylim(-0.6, 4.6)
    axes.axis("off")
    figure.tight_layout()
    figure.savefig(HERE / "_static" / "two-level.png")
    plt.close(figure)


def time_to_loss() -> None:
    """Draw the README's bars."""
    found = table("race", "**50 Mbit/s, 80 ms, buckets of 1 MB**")
    values = [float(found[row][1]) for row in BARS.values()]
    colours = ["#9aa5b1"] * 3 + ["#2563eb"] * 2
    figure, axes = plt.subplots(figsize=(8, 2.4), dpi=150)
    bars = axes.barh(list(BARS), values, color=colours, height=0.62)
    axes.bar_label(bars, [f"{value:.0f} s" for value in values], padding=5, fontsize=11)
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.12)
    figure.suptitle(
        "Time to the same loss over 50 Mbit/s and 80 ms (two workers; shorter is better)",
        fontsize=11,
        x=0.02,
        ha="left",
    )
    axes.tick_params(axis="y", length=0, labelsize=11)
    axes.tick_params(axis="x", labelsize=9)
    axes.set_xlabel("seconds", fontsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "_static" / "time-to-loss.png")


def measured() -> dict[str, Measured]:
    """Return the hooks that were timed over loopback and trained for 1 200 steps, by falling bytes."""
    free = table("bench", *LOOPBACK)
    limited = table("bench", "## Links of", f" {LINK} (")
    older, newer = (table("convergence-quant", f"## {section}", "<!-- tables -->") for section in LOSSES)
    trained = older | newer
    exact = _loss(trained[ALL_REDUCE])[0]
    found = {}
    for hook, row in trained.items():
        timed = free.get("topk" if hook == "topk(density=0.01)" else hook)  # its default density
        if timed is None:
            continue
        other = limited.get(hook) or limited.get(f"{hook}, 3 buckets")
        loss, spread = _loss(row)
        found[hook] = Measured(
            float(timed[1]) - float(free["noop"][1]),
            float(other[1]) if other else None,
            float(other[3]) / float(limited[ALL_REDUCE][3]) if other else None,
            float(row[0]) / float(trained[ALL_REDUCE][0]),
            loss - exact,
            spread,
        )
    return dict(sorted(found.items(), key=lambda item: -(item[1].large or item[1].small)))


def _words(page: str, pattern: str) -> tuple[str, ...]:
    """Return the groups of the first place of a page that a pattern matches."""
    found = re.search(pattern, (HERE / page).read_text())
    assert found, f"{page} has no {pattern}"
    return found.groups()


def _loss(row: list[str]) -> tuple[float, float]:
    mean, spread = row[3].split(" ± ")
    return float(mean), float(spread)


def hooks() -> None:
    """Draw time, bytes and loss of hooks in three panels with one row for each hook."""
    rows = measured()
    names = [LABELS.get(name, name) for name in rows]
    places = range(len(rows))
    large = _words("measured/bench.md", r"GPT with ([\d.]+ M parameters, \d ranks)")[0]
    link = LINK.replace("gbit", " Gbit/s").replace("mbit", " Mbit/s")
    count = float(_words("convergence.md", r"GPT\*\*: ([\d ]+) parameters")[0].replace(" ", "")) / 1e6
    steps, ranks, seeds = _words("measured/convergence-quant.md", r"cosine, .*: (\d+) steps, (\d) ranks .*, (\d) seeds")
    note = (
        f"Blue: GPT with {large}. Red: GPT with {count:.2f} M\nparameters, {ranks} ranks, {steps} steps with AdamW. "
        f"Bars: standard deviation\nof {seeds} seeds. Band: that of allreduce."
    )
    figure, (time, sent, loss) = plt.subplots(1, 3, figsize=(5.9, 5.3), dpi=200, sharey=True)
    ring, dot = {"s": 60, "facecolor": "white", "edgecolor": BLUE, "zorder": 3}, {"s": 22, "color": BLUE, "zorder": 4}
    diamond = {"marker": "D", "s": 40, "facecolor": "none", "edgecolor": RED, "zorder": 5}
    for place, row in zip(places, rows.values(), strict=True):
        first = place == 0  # one row gives the legend its entries
        time.scatter([row.free], [place], **ring, label="loopback" if first else None)
        if row.limited is not None and row.large is not None:
            time.plot([row.free, row.limited], [place, place], color=LIGHT, lw=3, zorder=2)
            time.scatter([row.limited], [place], **dot, label=link if first else None)
            sent.scatter([100 * row.large], [place], **dot, label="large GPT" if first else None)
        else:
            time.text(1.5 * row.free, place, "not measured", va="center", fontsize=8, color="#5b6673")
        sent.scatter([100 * row.small], [place], **diamond, label="small GPT" if first else None)
        loss.errorbar([row.loss], [place], xerr=[row.spread], color=RED, capsize=3)
        loss.scatter(
            [row.loss], [place], **{**diamond, "s": 18, "facecolor": RED}, label="small GPT" if first else None
        )
    noise = rows[ALL_REDUCE].spread
    loss.axvspan(-noise, noise, color=LIGHT, alpha=0.6, lw=0)
    time.set_xscale("log")
    sent.set_xscale("log")
    loss.set_xscale("symlog", linthresh=0.02)
    loss.set_xlim(-0.025, 2.0)
    time.set_xlim(22, 600)
    titles = ("Cost in a step,\nms", "Bytes sent,\n% of allreduce's", "Held-out loss\nminus allreduce's")
    scales = ((30, 100, 300), (1, 10, 100), (0, 0.1, 1))
    for axes, title, ticks in zip((time, sent, loss), titles, scales, strict=True):
        axes.set_title(title, fontsize=10, loc="left")
        axes.legend(loc="upper left", bbox_to_anchor=(-0.12, -0.06), frameon=False, fontsize=9, handletextpad=0.0)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(axis="y", color="#e5e8ec")
        axes.tick_params(labelsize=9)
        axes.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    time.set_yticks(places, names)
    time.invert_yaxis()
    figure.text(0.02, 0.02, note, fontsize=9)
    figure.tight_layout(rect=(0, 0.09, 1, 1), w_pad=0.6)
    figure.savefig(HERE / "_static" / "hooks.png")
    plt.close(figure)


def main() -> None:
    hooks()
    one_step()
    two_level()
    time_to_loss()


if __name__ == "__main__":
    main()
