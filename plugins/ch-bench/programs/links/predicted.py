"""Compare the predictions of `advise` with the steps that `programs.links.far` has measured on links with latency.

    sudo python -m programs.links.predicted [--measured ../../docs/measured/far.md] [--record]

For each link of the record that has two ranks, `advise` probes a link of the same rate and round trip, and predicts a step of
the same model, in one bucket and in four. Run it on an idle machine, because other programs make the arithmetic of a hook slower
than it was at the time of the record.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import torch

from ch_bench import launch, record
from ch_bench.advise import command
from ch_bench.links import netns
from ch_bench.links.link import Link
from ch_bench.shapes import ShapesOnly, random_gradients
from programs.links.far_rank import CAPS, SHAPES

HOOKS = ("bf16_compress", "quant8", "quant4", "powersgd(rank=4)", "topk(density=0.01)")
LINKS = ("200mbit,0.4ms", "200mbit,10ms", "200mbit,30ms", "200mbit,80ms")
NEAR = 0.25  # share by which a good prediction may be off
Cell = tuple[str, int, str]  # link, buckets, hook


class _Nothing:
    """Stands for an optimizer, because the measured steps have none."""

    def __init__(self, params: object) -> None: ...

    def zero_grad(self) -> None: ...

    def step(self) -> None: ...


def model() -> tuple[torch.nn.Module, tuple[()], type[_Nothing]]:
    """Return the model of the measured steps, whose backward only hands over given gradients."""
    return ShapesOnly(random_gradients(SHAPES, torch.float32, torch.device("cpu"))), (), _Nothing


def measured(text: str) -> dict[Cell, float]:
    r"""Return the seconds of the steps in the tables of `programs.links.far` for two ranks.

    >>> measured("## 200mbit,80ms, 2 ranks\n| `quant4` | 1 | 75 (72–80) | 0.30 |")
    {('200mbit,80ms', 1, 'quant4'): 0.075}
    """
    found, link = dict[Cell, float](), ""
    for line in text.splitlines():
        if title := re.match(r"#+ (.*), (\d+) ranks$", line):
            link = title[1] if title[2] == "2" else ""
        elif (row := re.match(r"\| `(.*?)` \| (\d+) \| (\d+) \(", line)) and link:
            found[link, int(row[2]), row[1]] = int(row[3]) / 1e3
    return found


def predicted(link: Link, buckets: int, seconds: float) -> dict[str, Any]:
    """Return what `advise --json` prints on a link for the model in some buckets."""
    if reason := netns.why_not(link):
        sys.exit(f"{link.text}: {reason}")
    args = {
        "model": "programs.links.predicted:model",
        "hooks": list(HOOKS),
        "seconds": seconds,
        "bucket_cap_mb": CAPS[buckets],
        "each": None,
        "link": link.text,
        "shape": link,
    }
    with netns.Network(2, link) as net:
        found: dict[str, Any] = launch.launch_and_read(command.worker, 2, args, enter=net.enter)
    return found


def main(argv: list[str] | None = None) -> int:
    """Predict every cell and print the table. Return 1 if fewer than nine of ten are near the measured step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--measured", type=Path, default=record.measured() / "far.md", help="output of programs.links.far"
    )
    parser.add_argument("--link", nargs="+", default=list(LINKS), help="links of the record")
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of each probe")
    parser.add_argument("--record", action="store_true", help="write a section of docs/measured/advise.md")
    args = parser.parse_args(argv)
    steps = measured(args.measured.read_text())
    rows, near, about = [], 0, []
    for text in args.link:
        for buckets in CAPS:
            found = predicted(Link.parse(text), buckets, args.seconds)
            about.append(f"{text}, {buckets}: {command.pair_text(found['network'])}")
            for one in found["predictions"]:
                if (hook := one["hook"]) not in HOOKS:
                    continue
                step = steps[text, buckets, hook]
                off = one["seconds"] / step - 1
                near += abs(off) <= NEAR
                shown = f"{off:+.0%}" if abs(off) <= NEAR else f"**{off:+.0%}**"
                times = (f"{seconds * 1e3:.0f}" for seconds in (one["seconds"], step))
                rows.append([text, str(buckets), f"`{hook}`", *times, shown])
                print(*rows[-1], sep="\t", flush=True)
    heads = ["link", "buckets", "hook", "predicted ms", "measured ms", "off"]
    body = (
        f"{near} of {len(rows)} predictions are within {NEAR:.0%} of the measured step.\n\n"
        f"{record.markdown_table(heads, rows)}\n\n" + "\n".join(f"- {line}" for line in about)
    )
    print(body)
    if args.record:
        record.write("advise", "Links with latency", record.command("programs.links.predicted", argv), body)
    return int(near < 0.9 * len(rows))


if __name__ == "__main__":
    record.run_main(main)
