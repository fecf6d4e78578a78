"""Flat hooks and ``two_level`` on nodes of several ranks: bytes at each node's interface, times, CPU time and residuals.

    sudo python -m programs.links.nodes bytes
    sudo python -m programs.links.nodes times --nodes 2x4 --work exchange
    sudo python -m programs.links.nodes times --nodes 2x4 --work train
    sudo python -m programs.links.nodes cpu --nodes 2x4
    python -m programs.links.nodes arithmetic --nodes 2x4
    python -m programs.links.nodes plan

A node is a network namespace with an uplink of a given rate. Its ranks reach each other over loopback. The gradient is that of
a GPT of 10.7 M parameters (width 384, 6 layers). An *exchange* has no arithmetic of a model: the backward hands over given
gradients. A *train* step is forward, backward and SGD on one sequence of 64 symbols for each rank.

Candidates take turns in rounds. Each turn attaches a hook, runs one step without a limit of the link, and then measures some
steps behind barriers. PyTorch's hooks keep models of their own, because they cannot be detached. Its PowerSGD has one bucket.

``bytes`` compares the interface of each node with the plan of the hook (:func:`commhooks.report.node_bytes`), with and
without the 66 bytes of headers of each packet. Plans of PyTorch's hooks assume a ring. ``plan`` needs no network: it computes
the bytes of GPT-2 small (124 M parameters) on nodes of eight ranks.

``cpu`` runs without a limit of the link, and separates the CPU time of the thread that runs the engine from that of all other
threads of the process, which carry gloo's messages. ``arithmetic`` needs no network: it measures the engine's thread without
messages, for a flat hook and for each place of a node with ``two_level`` (:mod:`programs.links.arithmetic`).
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import commhooks
from ch_bench import gpt, launch, record, shapes, training
from ch_bench.links import netns
from ch_bench.links.link import Link
from ch_bench.pytorch_hooks import LABELS, PyTorchHook, attach_pytorch, reduction_of
from commhooks import BucketLayout, Topology
from commhooks.report.plan_table import node_bytes
from programs.links import arithmetic

WIDTH, LAYERS, HEADS, CONTEXT, VOCAB = 384, 6, 6, 64, 128
BASES = ["bf16_compress", "quant8", "quant4", "quant4(error_feedback=True)", "powersgd(rank=4)", "topk(density=0.01)"]
TORCH = ["torch fp16", "torch PowerSGD rank 4"]
TIMED = ["torch fp16", "bf16_compress", "two_level(bf16_compress)", "quant8", "two_level(quant8)", "quant4", "two_level(quant4)",
         "torch PowerSGD rank 4", "powersgd(rank=4)", "two_level(powersgd(rank=4))"]  # fmt: skip
LAYOUTS = ["2x2", "2x4", "4x2"]


@dataclass
class Turn:
    """Figures of some steps with one hook.

    Attributes:
        hook: expression, or label of a PyTorch hook.
        rate: of the uplinks; ``None`` without a limit.
        seconds: of each step, on the slowest rank.
        cpu: CPU seconds of a step, all threads of the process, mean of the ranks.
        others: the part of ``cpu`` in other threads than the one that runs the backward, such as those of gloo.
        arithmetic: host seconds of a step in which the hook computes, mean of the ranks.
        planned: bytes that leave a node in a step, by the plan.
        streams, interfaces: bytes that left each node in a step, without and with the headers of packets.
        residual: bytes of the residuals of a rank, the largest of all ranks.
    """

    hook: str
    rate: str | None
    seconds: list[float]
    cpu: float
    arithmetic: float
    planned: float
    streams: list[float] = field(default_factory=list)
    interfaces: list[float] = field(default_factory=list)
    residual: int = 0
    others: float = 0.0


class Plan(NamedTuple):
    """The turns of all hooks.

    Attributes:
        rates: of the uplinks.
        steps: of a turn.
        rounds: turns of each hook at each rate.
        budget: seconds for all rounds.
        bucket_mb: DDP's ``bucket_cap_mb``; ``None`` for its default of 25.
    """

    rates: list[str | None]
    steps: int
    rounds: int
    budget: float
    bucket_mb: float | None


class Bench:
    """The models of one rank, and the turns of the candidates."""

    def __init__(
        self, topology: Topology, device: torch.device, work: str, hooks: Sequence[str], bucket_mb: float | None
    ) -> None:
        self.topology, self.device, self.work = topology, device, work
        self.rank = dist.get_rank()
        self.leads = topology.place(self.rank) == 0  # one rank of each node reads and limits its interface
        torch.manual_seed(self.rank)
        self.tokens = torch.randint(VOCAB, (2, 1, CONTEXT), dtype=torch.int64, device=device)
        self.own = self._model(bucket_mb)
        self.torch: dict[str, tuple[Any, PyTorchHook]] = {}
        for hook in hooks:
            if hook in LABELS:
                model = self._model(1000.0 if "PowerSGD" in hook else bucket_mb)
                self.torch[hook] = (model, attach_pytorch(model, hook))
                for _ in range(4):  # PyTorch's PowerSGD compresses from the third step on
                    self._step(model)
        for _ in range(2):  # DDP rebuilds its buckets after the first step
            self._step(self.own)

    def turn(self, hook: str, rate: str | None, steps: int) -> Turn:
        """Run one step without a limit and measure ``steps`` with it."""
        self._limit(None)
        if hook in self.torch:
            model, made = self.torch[hook]
            size = made.payload(sum(p.numel() for p in model.parameters()))
            world = self.topology.world_size
            plan = 2 * (world - 1) / world * size * sum(self._ring(rank) for rank in self.topology.nodes[0])
            return self._measure(hook, rate, steps, model, lambda: {}, plan)
        handle = commhooks.attach(self.own, hook)
        try:
            self._step(self.own)
            engine = handle.binding.engine if handle.binding is not None else None
            assert engine is not None and handle.reduction is not None  # no foreign hook
            plan = node_bytes(handle.reduction, engine.step.layouts, self.topology, engine.state.step).leaving
            made_turn = self._measure(hook, rate, steps, self.own, handle.stats, plan)
            state = handle.hook_state
            if state is not None:
                sizes = [
                    entry.numbers().nbytes for (_, field), entry in state.draft.newest().items() if field == "residual"
                ]
                made_turn.residual = max(self._everywhere(sum(sizes)))
            return made_turn
        finally:
            self._limit(None)
            handle.detach()

    def _measure(
        self, hook: str, rate: str | None, steps: int, model: Any, stats: Callable[[], dict[str, float]], plan: float
    ) -> Turn:
        self._step(model)
        self._limit(rate)
        before, figures, cpu, own = netns.sent_here(), stats(), time.process_time(), time.thread_time()
        taken = []
        for _ in range(steps):
            if rate is not None:  # a barrier sends bytes
                dist.barrier()
            begun = time.perf_counter()
            self._step(model)
            taken.append(time.perf_counter() - begun)
        used, later = time.process_time() - cpu, stats()
        others = used - (time.thread_time() - own)
        dist.barrier()  # a peer may still send
        after = netns.sent_here()
        self._limit(None)
        arithmetic = sum(later[key] - figures[key] for key in later if key in ("encode_seconds", "decode_seconds"))
        mine = (
            taken,
            used / steps,
            arithmetic / steps,
            after.stream - before.stream,
            after.bytes - before.bytes,
            others / steps,
        )
        rows = self._everywhere(mine)
        firsts = [rows[node[0]] for node in self.topology.nodes]
        return Turn(
            hook,
            rate,
            [max(row[0][i] for row in rows) for i in range(steps)],
            sum(row[1] for row in rows) / len(rows),
            sum(row[2] for row in rows) / len(rows),
            plan,
            [row[3] / steps for row in firsts],
            [row[4] / steps for row in firsts],
            others=sum(row[5] for row in rows) / len(rows),
        )

    def _model(self, cap: float | None) -> Any:
        if self.work == "train":
            torch.manual_seed(0)
            return training.wrap(gpt.GPT(VOCAB, CONTEXT, WIDTH, LAYERS, HEADS), self.device, cap)
        sizes = shapes.gpt_shapes(LAYERS, WIDTH, VOCAB, CONTEXT)
        gradients = shapes.random_gradients(sizes, torch.float32, self.device)
        return training.wrap(shapes.ShapesOnly(gradients), self.device, cap)

    def _step(self, model: Any) -> None:
        if self.work == "train":
            x, y = self.tokens
            model(x, y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=1e-3)
        else:
            model().backward()
        model.zero_grad(set_to_none=False)

    def _limit(self, rate: str | None) -> None:
        dist.barrier()
        if self.leads:
            netns.limit_here(rate)
        dist.barrier()

    def _ring(self, rank: int) -> float:
        return self.topology.leaving(rank, "all", ring=True)

    def _everywhere(self, mine: Any) -> list[Any]:
        rows: list[Any] = [None] * self.topology.world_size
        dist.all_gather_object(rows, mine)
        return rows


def worker(
    rank: int, world: int, device: torch.device, each: int, work: str, hooks: list[str], plan: Plan, path: Path
) -> None:
    """Run all turns of one rank; rank 0 writes the list of :class:`Turn` to ``path`` after each round."""
    bench = Bench(Topology.even(world, each), device, work, hooks, plan.bucket_mb)
    turns: list[Turn] = []
    begun = time.perf_counter()
    for done in range(plan.rounds):
        spent = torch.tensor([time.perf_counter() - begun], dtype=torch.float64, device=device)
        dist.broadcast(spent, 0)  # equal on all ranks
        if done and spent.item() * (done + 1) / done > plan.budget:
            break
        for rate in plan.rates:
            turns += [bench.turn(hook, rate, plan.steps) for hook in hooks]
        if rank == 0:
            path.write_text(json.dumps([asdict(turn) for turn in turns]))


def run(nodes: str, work: str, hooks: list[str], plan: Plan) -> list[Turn]:
    """Measure the hooks on ``NxL`` nodes."""
    count, each = map(int, nodes.split("x"))
    with netns.Network(count * each, ranks_per_node=each) as net:
        found = launch.launch_and_read(worker, count * each, each, work, hooks, plan, enter=net.enter)
    return [Turn(**row) for row in found]


def bytes_table(turns: Iterable[Turn]) -> str:
    """Return the bytes of one step: the plan, and the least and the most that left a node."""
    turns = list(turns)
    flat = {turn.hook: turn for turn in turns}
    rows = []
    for turn in turns:
        base = flat.get(_flat(turn.hook) or "")
        cells = [f"{turn.planned:,.0f}"]
        for found in (turn.streams, turn.interfaces):
            worst = max(found, key=lambda one: abs(one / turn.planned - 1))
            cells += [f"{worst:,.0f}", f"{worst / turn.planned - 1:+.2%}"]
        ratio = f"{sum(turn.interfaces) / sum(base.interfaces):.3f}" if base is not None else ""
        rows.append([f"`{turn.hook}`", *cells, ratio])
    heads = ["hook", "plan", "TCP", "difference", "interface", "difference", "of flat"]
    return record.markdown_table(heads, rows)


def times_table(turns: Iterable[Turn]) -> str:
    """Return the median seconds of a step by hook and rate, with the range of the rounds, and ratios to two baselines."""
    turns = list(turns)
    rates = list(dict.fromkeys(turn.rate for turn in turns))
    hooks = list(dict.fromkeys(turn.hook for turn in turns))
    found = {(h, r): [s for t in turns if (t.hook, t.rate) == (h, r) for s in t.seconds] for h in hooks for r in rates}
    heads, rows = ["hook"], []
    for rate in rates:
        heads += [f"{rate}, ms", "range", "of flat", "of torch fp16"]
    for hook in hooks:
        cells = [f"`{hook}`"]
        for rate in rates:
            mine = found[hook, rate]
            base = found.get((_flat(hook) or "", rate))
            fp16 = found.get(("torch fp16", rate))
            cells += [f"{median(mine) * 1e3:.0f}", f"{min(mine) * 1e3:.0f}–{max(mine) * 1e3:.0f}"]
            cells += [_ratio(mine, base), _ratio(mine, fp16)]
        rows.append(cells)
    return record.markdown_table(heads, rows)


def work_table(turns: Iterable[Turn]) -> str:
    """Return CPU time, arithmetic and residual of a rank by hook."""
    turns = list(turns)
    rows = []
    for hook in dict.fromkeys(turn.hook for turn in turns):
        mine = [turn for turn in turns if turn.hook == hook]
        cpu, arithmetic = (median(getattr(t, key) for t in mine) * 1e3 for key in ("cpu", "arithmetic"))
        shown = [
            f"{cpu:.1f}",
            f"{arithmetic:.1f}" if arithmetic else "",
            f"{mine[-1].residual:,}" if mine[-1].residual else "",
        ]
        rows.append([f"`{hook}`", *shown])
    return record.markdown_table(["hook", "CPU ms of a process", "arithmetic ms", "residual bytes"], rows)


def cpu_table(turns: Iterable[Turn]) -> str:
    """Return the CPU time of a process by hook, of all its threads and of the others than the engine's, with ranges."""
    turns = list(turns)
    rows = []
    for hook in dict.fromkeys(turn.hook for turn in turns):
        cells = [f"`{hook}`"]
        for key in ("cpu", "engine", "others"):
            mine = [1e3 * (t.cpu - t.others if key == "engine" else getattr(t, key)) for t in turns if t.hook == hook]
            cells += [f"{median(mine):.1f}", f"{min(mine):.1f}–{max(mine):.1f}"]
        rows.append(cells)
    heads = ["hook", "process, ms", "range", "engine's thread, ms", "range", "other threads, ms", "range"]
    return record.markdown_table(heads, rows)


def plan_table(hooks: Sequence[str], nodes: Sequence[int] = (2, 8, 32, 125), each: int = 8) -> str:
    """Return the planned MB that leave a node in a step of GPT-2 small, flat and in two levels, by number of nodes."""
    sizes = shapes.gpt_shapes(12, 768, 50257, 1024)
    layouts = [BucketLayout.of_shapes(group) for group in shapes.filled(sizes, first=shapes.BUCKET)]
    rows = []
    for hook in hooks:
        flat, two = (reduction_of(form) for form in (hook, f"two_level({hook})"))
        cells = []
        for count in nodes:
            topology = Topology.even(count * each, each)
            a, b = (node_bytes(one, layouts, topology).leaving / 1e6 for one in (flat, two))
            cells += [f"{a:.1f}", f"{b:.1f}", f"{b / a:.3f}"]
        rows.append([f"`{hook}`", *cells])
    heads = [f"{count * each} ranks, {what}" for count in nodes for what in ("flat", "two levels", "ratio")]
    return record.markdown_table(["hook", *heads], rows)


def _flat(hook: str) -> str | None:
    """Return the hook that ``two_level`` runs between nodes, or ``None`` for another hook.

    >>> _flat("two_level(quant4(bits=4), inside=quant8)"), _flat("quant4")
    ('quant4(bits=4)', None)
    """
    if not hook.startswith("two_level("):
        return None
    inside = hook.removeprefix("two_level(").removesuffix(")")
    depths = [inside[:i].count("(") - inside[:i].count(")") for i in range(len(inside))]
    end = next((i for i, c in enumerate(inside) if c == "," and not depths[i]), len(inside))
    return inside[:end]


def _ratio(mine: Sequence[float], base: Sequence[float] | None) -> str:
    return f"{median(mine) / median(base):.2f}" if base else ""


def title_of(what: str, nodes: str, work: str, bucket_mb: float | None) -> str:
    """Return the heading of a section. Measurements with other settings have another one, so that no record replaces theirs.

    >>> title_of("bytes", "2x4", "exchange", None), title_of("times", "2x4", "exchange", None)
    ('Bytes that leave a node, 2x4', 'Times, 2x4, exchange')
    >>> title_of("bytes", "2x4", "train", 4.0)
    'Bytes that leave a node, 2x4, train, buckets of 4 MB'
    """
    head = {"bytes": "Bytes that leave a node", "times": "Times", "cpu": "CPU time of a process"}[what]
    works = "" if (what, work) == ("bytes", "exchange") else f", {work}"
    return f"{head}, {nodes}{works}{_buckets(bucket_mb)}"


def _buckets(bucket_mb: float | None) -> str:
    return "" if bucket_mb is None else f", buckets of {bucket_mb:g} MB"


def main(argv: list[str] | None = None) -> int:
    """Measure and print the tables, or the reason why nothing can be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bytes", "times", "cpu", "arithmetic", "plan"])
    parser.add_argument("--nodes", nargs="+", default=LAYOUTS, metavar="NxL", help="nodes and ranks of each")
    parser.add_argument("--work", choices=["exchange", "train"], default="exchange")
    parser.add_argument("--hooks", nargs="+", metavar="EXPR")
    parser.add_argument("--link", default="1gbit,200mbit,50mbit", metavar="RATES")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each hook at each rate, or steps of arithmetic")
    parser.add_argument("--steps", type=int, help="steps of a turn (default 3 for bytes, 1 for times)")
    parser.add_argument("--bucket-mb", type=float, metavar="MB", help="DDP's bucket_cap_mb for all hooks (default 25)")
    parser.add_argument("--budget", type=float, default=600.0, metavar="S", help="start no round that would end later")
    parser.add_argument("--record", action="store_true", help="write sections of docs/measured/two-level.md")
    args = parser.parse_args(argv)
    if args.what == "plan":
        table = plan_table(args.hooks or ["allreduce", *BASES])
        print(table)
        if args.record:
            title = "MB that leave a node of eight ranks, planned"
            record.write("two-level", title, record.command("programs.links.nodes", argv), table)
        return 0
    if args.what == "arithmetic":
        sizes = shapes.gpt_shapes(LAYERS, WIDTH, VOCAB, CONTEXT)
        for nodes, hook in product(args.nodes, args.hooks or ["powersgd(rank=4)"]):
            count, each = map(int, nodes.split("x"))
            found = arithmetic.measure(hook, sizes, Topology.even(count * each, each), args.rounds, args.bucket_mb)
            body, title = arithmetic.table(found), f"Arithmetic of {hook}, {nodes}{_buckets(args.bucket_mb)}"
            print(f"{title}\n\n{body}\n", flush=True)
            if args.record:
                command = record.command("programs.links.nodes", argv)
                record.write("two-level", title, command, body, *arithmetic.NOTES)
        return 0
    if args.what == "cpu":
        hooks = args.hooks or ["noop", "powersgd(rank=4)", "two_level(powersgd(rank=4))"]
        plan = Plan([None], args.steps or 3, args.rounds, args.budget, args.bucket_mb)
    elif args.what == "bytes":
        hooks = args.hooks or [*TORCH, *(form for base in BASES for form in (base, f"two_level({base})"))]
        plan = Plan([None], args.steps or 3, 1, args.budget, args.bucket_mb)
    else:
        hooks = args.hooks or TIMED
        links = Link.parse_all(args.link)
        if any(link.delayed for link in links):
            parser.error(f"--link {args.link}: the limit of a node changes while it runs, so only rates are legal")
        rates: list[str | None] = [link.text for link in links]
        plan = Plan(rates, args.steps or 1, args.rounds, args.budget, args.bucket_mb)
    for hook in hooks:
        if hook not in LABELS:
            reduction_of(hook)
    if reason := netns.why_not():
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    for nodes in args.nodes:
        turns = run(nodes, args.work, hooks, plan)
        title = title_of(args.what, nodes, args.work, args.bucket_mb)
        if args.what == "cpu":
            body = cpu_table(turns)
        else:
            body = bytes_table(turns) if args.what == "bytes" else f"{times_table(turns)}\n\n{work_table(turns)}"
        print(f"{title}\n\n{body}\n", flush=True)
        if args.record:
            note = "all ranks of all nodes share the cores of one machine"
            record.write("two-level", title, record.command("programs.links.nodes", argv), body, note)
    return 0


if __name__ == "__main__":
    record.run_main(main)
