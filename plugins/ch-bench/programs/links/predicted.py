"""Compare the predictions of `advise` with steps that are measured around its probe, on links with latency.

    sudo python -m programs.links.predicted [--record]

On each link two ranks take steps with every hook, in one bucket and in four. Then `advise` probes the same link and predicts
these steps for the same model, and the ranks take as many steps again. The speed of a machine drifts, so a prediction is
compared with the median of the steps before and after its probe, and not with an older record.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ch_bench import launch, record
from ch_bench.advise import command
from ch_bench.installation import Installation
from ch_bench.links import netns
from ch_bench.links.link import Link
from ch_bench.shapes import ShapesOnly, random_gradients
from programs.links.far import WARM_UP, Times, spread, start, step
from programs.links.far_rank import CAPS, SHAPES

HOOKS = ("bf16_compress", "quant8", "quant4", "powersgd(rank=4)", "topk(density=0.01)")
LINKS = ("200mbit,0.4ms", "200mbit,10ms", "200mbit,30ms", "200mbit,80ms")
NEAR = 0.25  # share by which a good prediction may be off
CELLS = [(buckets, hook) for buckets in CAPS for hook in HOOKS]


class _Nothing:
    """Stands for an optimizer, because the measured steps have none."""

    def __init__(self, params: object) -> None: ...

    def zero_grad(self) -> None: ...

    def step(self) -> None: ...


def model() -> tuple[torch.nn.Module, tuple[()], type[_Nothing]]:
    """Return the model of the measured steps, whose backward only hands over given gradients."""
    return ShapesOnly(random_gradients(SHAPES, torch.float32, torch.device("cpu"))), (), _Nothing


def measured(ranks: Installation, blocks: int) -> Times:
    """Return the seconds of each cell's steps."""
    return {cell: [step(ranks, cell) for _ in range(blocks)] for cell in CELLS}


def predicted(net: netns.Network, link: Link, buckets: int, seconds: float) -> dict[str, Any]:
    """Return what `advise --json` prints on a link for the model in some buckets."""
    args = {
        "model": "programs.links.predicted:model",
        "hooks": list(HOOKS),
        "seconds": seconds,
        "bucket_cap_mb": CAPS[buckets],
        "each": None,
        "link": link.text,
        "shape": link,
    }
    found: dict[str, Any] = launch.launch_and_read(command.worker, 2, args, enter=net.enter)
    return found


def both(link: Link, blocks: int, seconds: float) -> tuple[Times, dict[int, dict[str, Any]]]:
    """Return the steps of each cell, and what `advise` said for each number of buckets."""
    with netns.Network(2, link) as net, tempfile.TemporaryDirectory() as folder:
        ranks = start(sys.executable, net, Path(folder), "store", link.told or "")
        try:
            measured(ranks, WARM_UP)
            before = measured(ranks, blocks)
            said = {buckets: predicted(net, link, buckets, seconds) for buckets in CAPS}
            after = measured(ranks, blocks)
        finally:
            ranks.close()
    return {cell: before[cell] + after[cell] for cell in CELLS}, said


def main(argv: list[str] | None = None) -> int:
    """Predict every cell and print the table. Return 1 if fewer than nine of ten are near the measured step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", nargs="+", default=list(LINKS), help="rates and round trips")
    parser.add_argument("--steps", type=int, default=10, help="of each hook before and after a probe")
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of each probe")
    parser.add_argument("--record", action="store_true", help="write a section of docs/measured/advise.md")
    args = parser.parse_args(argv)
    if reason := netns.why_not(*map(Link.parse, args.link)):
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    rows, near, about = [], 0, []
    for text in args.link:
        steps, said = both(Link.parse(text), args.steps, args.seconds)
        for buckets, found in said.items():
            about.append(f"{text}, {buckets}: {command.pair_text(found['network'])}")
            for one in found["predictions"]:
                if (hook := one["hook"]) not in HOOKS:
                    continue
                times = steps[buckets, hook]
                off = one["seconds"] / median(times) - 1
                near += abs(off) <= NEAR
                shown = f"{off:+.0%}" if abs(off) <= NEAR else f"**{off:+.0%}**"
                rows.append(
                    [text, str(buckets), f"`{hook}`", f"{one['seconds'] * 1e3:.0f}", spread(times, 1e3, ".0f"), shown]
                )
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
