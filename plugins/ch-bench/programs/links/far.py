"""Hooks over links with latency: milliseconds of a step, ratios to torch's fp16 hook, and round trips in a step.

    sudo python -m programs.links.far --link 200mbit,80ms --ranks 2
    sudo python -m programs.links.far --link 200mbit,0.4ms,200mbit,80ms --blocks 20 [--record]
    sudo python -m programs.links.far --link 200mbit,0.4ms --before OLD_VENV/bin/python
    sudo python -m programs.links.far --link 200mbit,80ms --count [--record]

Each rank is in a network namespace of its own. The model has 1.05 M parameters in one bucket or four, and a backward that only
hands over gradients, so the time is the hook's. Two installations of commhooks take turns if ``--before`` names the Python of
another one. From 5 ms on this installation's hooks are attached with ``link=``. A block runs some steps of every cell, in
random order, and its figure is their median. Ranks begin a step within a fraction of a millisecond, because this program
tells them through pipes. A step lasts from the last rank's begin to the last rank's end.

Tables have the median of the blocks, and quartiles in brackets. Ratios are formed in each block. A **bold** ratio is a cell in
which torch's fp16 hook is faster. PyTorch's PowerSGD has one bucket, because it hangs with more.

*Round trips* compare links of the same rate in one run: the difference of a step's time, divided by the difference of the round
trip. What TCP itself waits for is included.

``--count`` counts them in traces of three steps instead of taking times: half of the messages in the longest chain of a step, in
which each one was sent after the one before it had arrived. A trace sees each message of ``attach(link=)``. It sees no message
inside a collective of gloo, so PyTorch's hooks are left out.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from ch_bench import record
from ch_bench.installation import Installation
from ch_bench.links import netns
from ch_bench.links.link import Link

BASE = "torch fp16"
HOOKS = ["torch allreduce", BASE, "torch PowerSGD rank 4", "bf16_compress", "quant8", "quant4", "powersgd(rank=4)",
         "topk(density=0.01)"]  # fmt: skip
WARM_UP = 8  # steps: DDP rebuilds its buckets, PyTorch's PowerSGD begins after two, and TCP's windows grow
STEPS = 3  # of a cell in a block
Cell = tuple[int, str]  # buckets, hook
Times = dict[Cell, list[float]]  # seconds of each block
Sent = tuple[float, float, int]  # begin and arrival of a collective on one rank, and its messages one after another


def start(python: str, net: netns.Network, folder: Path, name: str, link: str) -> Installation:
    """Start the ranks of a Python environment, each in its namespace. ``link`` is for ``attach``, if it is not empty."""
    script, world = str(Path(__file__).with_name("far_rank.py")), str(len(net.names))
    commands = [
        ["ip", "netns", "exec", space, python, script, str(rank), world, str(folder / name), link]
        for rank, space in enumerate(net.names)
    ]
    return Installation(commands, {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": netns.IFACE})


def step(ranks: Installation, cell: Cell) -> float:
    """Run one step and return its seconds."""
    times = [[float(word) for word in answer.split()] for answer in ranks.ask(f"{cell[0]} {cell[1]}")]
    return max(end for _, end in times) - max(begin for begin, _ in times)


def measure(
    link: Link, ranks: int, pythons: Sequence[str], cells: Sequence[Cell], blocks: int, seed: int
) -> tuple[list[Times], str]:
    """Return the times of each installation, and a line about the link."""
    order, load = random.Random(seed), os.getloadavg()[0]
    with netns.Network(ranks, link) as net, tempfile.TemporaryDirectory() as folder:
        rate, trip = net.verify(), net.round_trip()
        found: list[Times] = [{cell: [] for cell in cells} for _ in pythons]
        running: list[Installation] = []
        try:
            for number, python in enumerate(pythons):
                told = (link.told or "") if python == pythons[-1] else ""  # an older installation may not know link=
                running.append(start(python, net, Path(folder), f"store{number}", told))
            for cell in cells:
                for each in running:
                    for _ in range(WARM_UP):
                        step(each, cell)
            turns = [(number, cell) for number in range(len(pythons)) for cell in cells]
            for _ in range(blocks):
                for number, cell in order.sample(turns, len(turns)):
                    found[number][cell].append(median(step(running[number], cell) for _ in range(STEPS)))
        finally:
            for each in running:
                each.close()
    about = (
        f"{rate / 1e6:.0f} Mbit/s of data arrived, a round trip took {trip * 1e3:.2f} ms, load {load:.1f} at the start"
    )
    if net.carried is not None:
        about += f", packets were {net.carried.late * 1e3:.2f} ms late on average, {net.carried.dropped} dropped"
    return found, about


def count(link: Link, ranks: int, cells: Sequence[Cell]) -> dict[Cell, float]:
    """Return the round trips of a step, counted in a trace."""
    found = {}
    with netns.Network(ranks, link) as net, tempfile.TemporaryDirectory() as folder:
        net.verify()
        running, file = start(sys.executable, net, Path(folder), "store", link.told or ""), Path(folder, "trace.json")
        try:
            for cell in cells:
                for _ in range(WARM_UP):
                    step(running, cell)
                running.ask(f"{cell[0]} {cell[1]}\t{file}")
                found[cell] = max(map(longest_chain, steps_of(json.loads(file.read_text())))) / 2
        finally:
            running.close()
    return found


def steps_of(trace: Mapping[str, Any]) -> list[list[list[Sent]]]:
    """Return the collectives of each step by rank, in the order of their begins."""
    steps: dict[int, dict[int, list[Sent]]] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == "message":
            begun, args = event["ts"], event["args"]
            # Between far ranks an all-reduce is a reduce-scatter and then an all-gather. Others are one message to each peer.
            sent = begun, begun + event["dur"], 2 if args["collective"] == "all_reduce" else 1
            steps.setdefault(args["step"], {}).setdefault(event["pid"], []).append(sent)
    return [[sorted(ranks[rank]) for rank in sorted(ranks)] for ranks in steps.values()]


def longest_chain(ranks: Sequence[Sequence[Sent]]) -> int:
    """Return the number of messages in the longest chain of a step in which each was sent after the one before it had arrived.

    >>> longest_chain([[(0.0, 5.0, 1), (1.0, 6.0, 1)], [(0.0, 5.0, 1), (2.0, 7.0, 1)]])
    1
    >>> longest_chain([[(0.0, 5.0, 1), (6.0, 9.0, 1)], [(0.0, 5.0, 1), (2.0, 10.0, 1)]])
    2
    """
    lengths: list[list[int]] = []  # of the chain that ends with each collective, by the rank that sends
    for number in range(len(ranks[0])):
        row = []
        for rank, mine in enumerate(ranks):
            begun, _, messages = mine[number]
            arrived = [lengths[i] for i in range(number) if mine[i][1] <= begun]
            before = [length for each in arrived for peer, length in enumerate(each) if peer != rank]
            row.append(messages + max(before, default=0))
        lengths.append(row)
    return max(max(row) for row in lengths)


def times_table(found: Sequence[Times]) -> str:
    """Return times and ratios to torch's fp16 hook of the last installation, and ratios to an earlier one."""
    heads, rows = ["hook", "buckets", "ms", "of torch fp16"], []
    if len(found) > 1:
        heads += ["ms before", "of before"]
    last = found[-1]
    for (buckets, hook), times in last.items():
        cells = [f"`{hook}`", str(buckets), spread(times, 1e3, ".0f")]
        ratios = [mine / base for mine, base in zip(times, last[buckets, BASE], strict=True)]
        shown = spread(ratios, 1.0, ".2f")
        cells.append(f"**{shown}**" if median(ratios) > 1 else shown)
        if len(found) > 1:
            before = found[0][buckets, hook]
            cells += [spread(before, 1e3, ".0f")]
            cells += [spread([now / then for now, then in zip(times, before, strict=True)], 1.0, ".3f")]
        rows.append(cells)
    return record.markdown_table(heads, rows)


def trips_table(found: Mapping[Link, Times]) -> str:
    """Return the round trips of a step by hook and number of buckets, for links that differ in their round trip."""
    near = {link.rate: link for link in sorted(found, key=lambda link: -(link.round_trip or 0.0))}
    pairs = [(near[link.rate], link) for link in found if near[link.rate] != link]
    rows = []
    for cell in next(iter(found.values())):
        row = [f"`{cell[1]}`", str(cell[0])]
        for close, link in pairs:
            more = median(found[link][cell]) - median(found[close][cell])
            row.append(f"{more / ((link.round_trip or 0.0) - (close.round_trip or 0.0)):.1f}")
        rows.append(row)
    heads = [f"{link.text} against {close.text}" for close, link in pairs]
    return record.markdown_table(["hook", "buckets", *heads], rows) if pairs else ""


def counts_table(found: Mapping[Link, Mapping[Cell, float]]) -> str:
    """Return the counted round trips by hook and number of buckets."""
    cells = next(iter(found.values()))
    rows = [[f"`{hook}`", str(n), *(f"{found[link][n, hook]:.1f}" for link in found)] for n, hook in cells]
    return record.markdown_table(["hook", "buckets", *(link.text for link in found)], rows)


def spread(values: Sequence[float], scale: float, form: str) -> str:
    """Return the median and the quartiles.

    >>> spread([0.1, 0.2, 0.3, 0.4], 1e3, ".0f")
    '250 (125–375)'
    """
    low, middle, high = (format(scale * value, form) for value in quantiles(values, n=4))
    return f"{middle} ({low}–{high})"


def main(argv: list[str] | None = None) -> int:
    """Measure link by link and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="200mbit,0.4ms,200mbit,80ms", help="links, each a rate and a round trip")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--buckets", type=int, nargs="+", choices=[1, 4], default=[1, 4])
    parser.add_argument("--hooks", nargs="+", default=HOOKS, metavar="EXPR")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--before", metavar="PYTHON", help="Python of another installation to compare with")
    parser.add_argument("--count", action="store_true", help="count round trips in traces, and take no times")
    parser.add_argument("--seed", type=int, default=1, help="of the order")
    parser.add_argument("--record", action="store_true", help="write sections of docs/measured/far.md")
    args = parser.parse_args(argv)
    try:
        links = Link.parse_all(args.link)
    except ValueError as error:
        parser.error(str(error))
    if args.blocks < 2 or args.ranks < 2:
        parser.error("--blocks and --ranks must be at least 2")
    if reason := netns.why_not(*links):
        print(f"skipped: {reason}", file=sys.stderr)
        return 0

    def show(title: str, body: str) -> None:
        print(f"## {title}\n\n{body}\n", flush=True)
        if args.record:
            record.write("far", title, record.command("programs.links.far", argv), body)

    if args.count:
        if not all(link.told for link in links):
            parser.error("--count needs links on which ranks are far apart")
        cells = [(n, hook) for n in args.buckets for hook in args.hooks if not hook.startswith("torch ")]
        show(
            f"Round trips in a step, counted, {args.ranks} ranks",
            counts_table({link: count(link, args.ranks, cells) for link in links}),
        )
        return 0
    hooks = list(dict.fromkeys([*args.hooks, BASE]))
    cells = [(n, hook) for n in args.buckets for hook in hooks if n == 1 or "torch PowerSGD" not in hook]
    pythons = [*([args.before] if args.before else []), sys.executable]
    last: dict[Link, Times] = {}
    for link in links:
        title = f"{link.text}, {args.ranks} ranks"
        try:
            found, about = measure(link, args.ranks, pythons, cells, args.blocks, args.seed)
        except netns.LinkError as error:  # the line is the limit, so a time here would be the line's
            print(f"{title}: not measured, {error}\n", flush=True)
            continue
        last[link] = found[-1]
        show(title, f"{about}; {args.blocks} blocks\n\n{times_table(found)}")
    if trips := trips_table(last) if last else "":
        show(f"Round trips in a step, {args.ranks} ranks", trips)
    return 0


if __name__ == "__main__":
    record.run_main(main)
