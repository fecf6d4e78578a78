"""The command line as a terminal of 80 columns shows it: one SVG per command and, with matplotlib, one PNG, to look at.

    python -m ch_bench.screens [--out screens] [--columns 80] [--pages docs/_build/html] [COMMAND ...]

Each command is run in a pseudo-terminal of that width. 1 if a line is wider than the terminal, where it would be broken in
the middle of a word: only what is meant to be copied in one piece may be wider (`env`, errors). With `--pages` the built
documentation too, a PNG a page as a window of 1200 pixels shows it, where Chromium is installed; pages longer than 10,000
pixels are cut.
"""

import argparse
import os
import re
import select
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

COMMANDS = (
    "commhooks --help",
    "commhooks list",
    "commhooks list low-rank",
    "commhooks describe bf16_wrapper(powersgd(rank=4))",
    "commhooks doctor",
    "commhooks doctor powersgd(rank=2)",
    "commhooks env",
    "commhooks advise --seconds 10",
)
MAY_BE_WIDE = ("env",)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
INK, PAPER = "#e0e0e0", "#1b1d22"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Render commands as a narrow terminal shows them.")
    parser.add_argument("commands", nargs="*", default=list(COMMANDS), help="for example 'commhooks list'")
    parser.add_argument("--out", type=Path, default=Path("screens"))
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--pages", type=Path, metavar="FOLDER", help="built documentation to render as well")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run and render; 1 if a screen is wider than the terminal."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    wide = 0
    for command in args.commands:
        words = shlex.split(command.replace("(", r"\(").replace(")", r"\)"))
        shown = in_terminal(["-m", *words], args.columns)
        lines = shown.split(allow_blank=True)
        worst = max((cell_len(line.plain.rstrip()) for line in lines), default=0)
        name = re.sub(r"\W+", "-", command).strip("-")
        render(command, shown, args.columns, args.out / name)
        beyond = worst > args.columns and words[1] not in MAY_BE_WIDE
        wide += beyond
        print(f"{name}: {len(lines)} lines, the widest {worst}{'  TOO WIDE' if beyond else ''}", flush=True)
    if args.pages is not None:
        photograph(args.pages, args.out)
    return int(wide > 0)


def photograph(pages: Path, out: Path) -> None:
    """A PNG of each page of a built documentation, its reference left out; says so where there is no Chromium."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        print(f"no pictures of {pages}: none of {', '.join(BROWSERS)} is installed (Debian: apt-get install chromium)")
        return
    for page in sorted([*pages.glob("*.html"), *pages.glob("packages/*.html")]):
        picture = out.absolute() / f"page-{page.stem}.png"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,10000"]
        command = [browser, *flags, f"--screenshot={picture}", page.absolute().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if not picture.exists():
            raise RuntimeError(f"{page}: {done.stderr}")
        print(picture.name, flush=True)


def in_terminal(words: list[str], columns: int, rows: int = 60) -> Text:
    """What the interpreter prints in a terminal of that size, with its colours."""
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR")}
    env |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *words], stdout=theirs, stderr=subprocess.DEVNULL, env=env)
    os.close(theirs)
    parts = []
    while True:
        ready, _, _ = select.select([ours], [], [], 300)
        try:
            part = os.read(ours, 65536) if ready else b""
        except OSError:  # Linux: the other end is closed
            part = b""
        if not part:
            break
        parts.append(part)
    os.close(ours)
    process.wait()
    return Text.from_ansi(b"".join(parts).decode(errors="replace").replace("\r\n", "\n"))


def render(title: str, shown: Text, columns: int, path: Path) -> None:
    """An SVG, and a PNG where matplotlib is installed."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=columns, file=nowhere, force_terminal=True)
        console.print(shown, overflow="fold", no_wrap=False)
        console.save_svg(str(path.with_suffix(".svg")), title=title)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    lines = [line for whole in shown.split(allow_blank=True) for line in whole.wrap(console, columns, overflow="fold")]
    figure = Figure(figsize=(columns * 0.09 + 0.2, len(lines) * 0.19 + 0.2), facecolor=PAPER, dpi=100)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(-1, columns + 1), ylim=(len(lines) + 0.5, -0.5))
    ax.axis("off")
    for row, line in enumerate(lines):
        place = 0
        for part in line.render(console):
            style = part.style
            colour = style.color.get_truecolor().hex if style is not None and style.color is not None else INK
            weight = "bold" if style is not None and style.bold else "normal"
            for one in part.text.rstrip("\n"):  # each in its own cell, as a terminal puts it
                if one != " ":
                    ax.text(
                        place, row, one, color=colour, weight=weight, family="DejaVu Sans Mono", size=10, va="center"
                    )
                place += cell_len(one)
    ax.axvline(columns, color="#444444", linewidth=0.8)
    figure.savefig(path.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(main())
