"""Draw the README's picture from its record: `python docs/pictures.py` writes docs/_static/time-to-loss.png."""

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
    """Return the median seconds of each row of one link's table in docs/measured/race.md."""
    text = (HERE / "measured" / "race.md").read_text()
    table = text.split(f"**{link}**", 1)[1].split("\n\n", 2)[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: float(row[2]) for row in rows if re.fullmatch(r"[\d.]+", row[2])}


def main() -> None:
    found = seconds("200mbit")
    values = [found[row] for row in BARS.values()]
    colours = ["#9aa5b1", "#9aa5b1", "#2563eb", "#2563eb"]
    figure, axes = plt.subplots(figsize=(8, 2.4), dpi=150)
    bars = axes.barh(list(BARS), values, color=colours, height=0.62)
    axes.bar_label(bars, [f"{value:.0f} s" for value in values], padding=5, fontsize=11)
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.12)
    figure.suptitle(
        "Time to the same loss on a 200 Mbit/s link (two workers; shorter is better)", fontsize=11, x=0.02, ha="left"
    )
    axes.tick_params(axis="y", length=0, labelsize=11)
    axes.tick_params(axis="x", labelsize=9)
    axes.set_xlabel("seconds", fontsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "_static" / "time-to-loss.png")


if __name__ == "__main__":
    main()
