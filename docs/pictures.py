"""Draw the pictures of the documentation: `python docs/pictures.py` writes them to docs/_static.

`time-to-loss.png` has numbers of a record. `one-step.png` and `two-level.png` are schematic.
"""

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
BARS = {  # label in the picture -> row of the record's table
    "PyTorch DDP": "torch allreduce",
    "PyTorch fp16 hook": "torch fp16",
    "commhooks: quant4": "quant4",
    "commhooks: quant4 every 8 steps": "H=8, quant4, rate 1, momentum 0, inner rate × 1.41",
}


def seconds(link: str) -> dict[str, float]:
    """Return the mean seconds of each row of one link's table in docs/measured/race.md."""
    text = (HERE / "measured" / "race.md").read_text()
    table = text.split(f"**{link}**", 1)[1].split("\n\n", 2)[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: float(row[2]) for row in rows if re.fullmatch(r"[\d.]+", row[2])}


GREY, BLUE, LIGHT, RED = "#9aa5b1", "#2563eb", "#bcd0fb", "#c8553d"
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
    found = seconds("50mbit,80ms")
    values = [found[row] for row in BARS.values()]
    colours = ["#9aa5b1", "#9aa5b1", "#2563eb", "#2563eb"]
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


def main() -> None:
    one_step()
    two_level()
    time_to_loss()


if __name__ == "__main__":
    main()
