"""Cost of a trace and of the drift alarm, and a trace compared with the time that a shaped link must take.

    python -m programs.cost.trace_cost overhead
    python -m programs.cost.trace_cost truth --rate 200mbit   # needs root and iproute2

``overhead`` trains one model in short blocks, each with one of four settings in random order: off, off again, traced, and a
comparison of the ranks in every step. The alarm at every 100 steps costs a hundredth of the last. It compares the time of a
step, and the CPU time of the whole process, with the mean of the two blocks that are off. Both change with the load of the
machine. So it also adds up the time that the thread of the backward spends in the calls of the trace, or of the alarm,
including its waits for the peers' digests. ``truth`` compares the time in which a trace sees messages on the wire with bytes /
bandwidth, and the exposed time with the difference to ``noop``.
"""

import argparse
import pkgutil
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_bench.gpt import GPT
from ch_bench.launch import launch
from ch_bench.links.netns import Network
from ch_bench.record import command, interval, markdown_table, run_main, write
from ch_core import RankCheck
from ch_trace import Trace
from commhooks import CommHook

VARIANTS = ("off", "off again", "trace", "alarm in every step")
MODELS = ("gpt", "mlp")
HOOK = "powersgd(rank=4)"
BURST = "16kb"  # more would travel at once after each pause, which is much compared with a short message
EVERY = 100  # steps between two comparisons, in the table


def model_of(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model and one batch.

    ``"gpt"`` has a long step and ``"mlp"`` a short one. ``"wide"`` sends much and computes little, so that a slow link decides.
    """
    torch.manual_seed(0)
    if name == "gpt":
        tokens = torch.randint(256, (4, 129), dtype=torch.int64, device="cpu")
        return GPT(vocab=256, context=128, width=256, layers=4, heads=4), (tokens[:, :-1], tokens[:, 1:])
    width, batch = (2048, 8) if name == "wide" else (256, 32)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers), (torch.randn(batch, width, dtype=torch.float32, device="cpu"),)


class Loop:
    """One rank's model with a hook."""

    def __init__(self, name: str, hook: str, bucket_cap_mb: float) -> None:
        model, self.batch = model_of(name)
        self.model = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
        self.handle: CommHook = commhooks.attach(self.model, hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        self.optimizer.zero_grad()
        found = self.model(*self.batch)
        (found if found.dim() == 0 else found.square().mean()).backward()
        self.optimizer.step()

    def steps(self, count: int) -> float:
        """Return seconds per step."""
        return self.block(count)[0]

    def block(self, count: int) -> tuple[float, float]:
        """Return seconds and CPU seconds of this process per step."""
        dist.barrier()
        begun, spent = time.perf_counter(), time.process_time()
        for _ in range(count):
            self.step()
        return (time.perf_counter() - begun) / count, (time.process_time() - spent) / count


CALLS = {
    "trace": [
        *(f"ch_trace.recording:EngineTrace.{name}" for name in
          ("begin", "computed", "waited", "sending", "started", "finishing", "agreed", "end", "message")),
        *(f"ch_trace.session:_ModelWatch.{name}" for name in ("_enter", "_leave", "_arrive")),
        "ch_trace.recording:TracedTransport._traced",
    ],
    "alarm in every step": [f"ch_core:RankCheck.{name}" for name in ("begin", "finish")],
}  # fmt: skip
"""Functions whose time a setting adds. Calls inside other calls count once."""


class Inside:
    """Adds up the seconds that this thread spends inside some functions.

    Attributes:
        seconds: so far. The clock's own calls are included.
    """

    def __init__(self) -> None:
        self.seconds, self._depth, self._thread = 0.0, 0, threading.get_ident()

    @contextmanager
    def counted(self, names: list[str]) -> Iterator[None]:
        with ExitStack() as patches:
            for name in names:
                owner, _, attribute = name.replace(":", ".").rpartition(".")
                counted = self._counted(pkgutil.resolve_name(name))
                patches.enter_context(mock.patch.object(pkgutil.resolve_name(owner), attribute, counted))
            yield

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth or threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            begun = time.perf_counter()
            self._depth = 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth = 0
                self.seconds += time.perf_counter() - begun

        return call


@contextmanager
def variant(name: str, loop: Loop, folder: str) -> Iterator[None]:
    """Run a block with one of the :data:`VARIANTS`. Start and end of a trace are outside of the timed steps."""
    binding = loop.handle.binding
    assert binding is not None and binding.engine is not None
    if name == "trace":
        with Trace(loop.handle, Path(folder) / "trace.json"):
            yield
        return
    if name.startswith("alarm"):
        binding.check_ranks(RankCheck(1, "raise"))
    yield
    binding.engine.rank_check = None


def overhead_worker(rank: int, world: int, device: torch.device, name: str, seconds: float, out: str) -> None:
    loop = Loop(name, HOOK, 1.0 if name == "gpt" else 0.1)
    loop.steps(5)
    count = max(1, round(0.25 / loop.steps(5)))
    agreed = torch.tensor([count], dtype=torch.int64, device="cpu")
    dist.broadcast(agreed, 0)
    count = int(agreed)
    rows: dict[str, list[tuple[float, float]]] = {one: [] for one in VARIANTS}
    inside: dict[str, list[float]] = {
        one: [] for one in CALLS
    }  # of further blocks, because the count itself costs time
    order, begun = random.Random(0), time.perf_counter()
    while True:
        for one in order.sample([*VARIANTS, *(f"count {one}" for one in CALLS)], len(VARIANTS) + len(CALLS)):
            setting = one.removeprefix("count ")
            with ExitStack() as stack:
                clock = Inside()
                if one != setting:
                    stack.enter_context(clock.counted(CALLS[setting]))
                stack.enter_context(variant(setting, loop, out))
                loop.steps(1)
                clock.seconds = 0.0
                found = loop.block(count)
                spent = clock.seconds / count
            if one != setting:
                inside[setting].append(spent)
            else:
                rows[one].append(found)
        agreed[0] = time.perf_counter() - begun > seconds
        dist.broadcast(agreed, 0)
        if agreed[0]:
            break
    if rank == 0:
        torch.save({"rows": rows, "inside": inside, "count": count}, Path(out) / f"{name}.pt")


def overhead(seconds: float) -> str:
    """Return the table of overheads as Markdown, with the blocks."""
    table, raw = [], []
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            launch(overhead_worker, 2, name, seconds / len(MODELS), folder)
            found = torch.load(Path(folder) / f"{name}.pt", weights_only=True)
        rows = found["rows"]
        off = [
            tuple(sum(pair) / 2 for pair in zip(*pairs, strict=True))
            for pairs in zip(rows["off"], rows["off again"], strict=True)
        ]
        step = median(seconds for seconds, _ in off)
        for one in VARIANTS[1:]:
            share = 1.0 / EVERY if one.startswith("alarm") else 1.0
            base = rows["off"] if one == "off again" else off
            cells = []
            for kind in (0, 1):
                pairs = zip(rows[one], base, strict=True)
                cells += _cells([100 * share * (value[kind] / without[kind] - 1) for value, without in pairs])
            spent = found["inside"].get(one)
            cells += _cells([100 * share * value / step for value in spent]) if spent else ["", ""]
            title = f"alarm, every {EVERY} steps" if one.startswith("alarm") else one
            table.append([name, title, f"{1e3 * median(row[0] for row in rows[one]):.2f}", *cells, str(len(off))])
        for one in VARIANTS:
            raw.append(f"{name}, {one}, ms per step: " + " ".join(f"{1e3 * row[0]:.2f}" for row in rows[one]))
            raw.append(f"{name}, {one}, CPU ms per step: " + " ".join(f"{1e3 * row[1]:.2f}" for row in rows[one]))
        for one, spent in found["inside"].items():
            raw.append(f"{name}, inside the calls, {one}, µs per step: " + " ".join(f"{1e6 * x:.0f}" for x in spent))
        raw.append(f"{name}: {found['count']} steps in a block")
    heads = ["model", "setting", "ms per step", "% of a step", "95 % interval", "% of CPU time", "95 % interval"]
    heads += ["inside the calls, % of a step", "95 % interval", "blocks"]
    return markdown_table(heads, table) + "\n\n```text\n" + "\n".join(raw) + "\n```"


def _cells(percents: list[float]) -> list[str]:
    middle, low, high = interval(percents)
    return [f"{middle:+.2f}", f"{low:+.2f} to {high:+.2f}"]


def truth_worker(rank: int, world: int, device: torch.device, hook: str, steps: int, out: str) -> None:
    silent, loop = Loop("wide", "noop", 25.0), Loop("wide", hook, 25.0)
    loop.steps(2)
    silent.steps(2)
    with Trace(loop.handle, Path(out) / "trace.json") as trace:
        pairs = [(silent.steps(steps), loop.steps(steps)) for _ in range(3)]
    if rank == 0:
        final = trace.final
        sent = sum(row.sent_bytes for row in final.buckets)
        kept = {
            "wire": final.wire,
            "exposed": final.exposed,
            "hidden": final.hidden or 0.0,
            "sent": sent,
            "pairs": pairs,
        }
        torch.save(kept, Path(out) / "truth.pt")


def truth(rate: str, hooks: list[str], steps: int, connections: int) -> str:
    """Return the comparison of traces with a shaped link as Markdown."""
    table, raw = [], []
    with Network(2, rate, burst=BURST, connections=connections) as net:
        for hook in hooks:
            before = net.verify()
            with tempfile.TemporaryDirectory() as folder:
                launch(truth_worker, 2, hook, steps, folder, enter=net.enter)
                found: dict[str, Any] = torch.load(Path(folder) / "truth.pt", weights_only=True)
            bits = (before + net.verify()) / 2
            wire, exposed = found["wire"], found["exposed"]
            least = 8 * found["sent"] / bits
            apart = median(with_hook - silent for silent, with_hook in found["pairs"])
            table.append(
                [
                    f"`{hook}`",
                    f"{found['sent'] / 1e6:.2f}",
                    f"{1e3 * least:.1f}",
                    f"{1e3 * wire:.1f}",
                    f"{100 * (wire / least - 1):+.1f}",
                    f"{1e3 * apart:.1f}",
                    f"{1e3 * exposed:.1f}",
                    f"{100 * (exposed / apart - 1):+.1f}",
                    f"{100 * found['hidden']:.0f}",
                ]
            )
            shown = " ".join(f"{1e3 * a:.1f}/{1e3 * b:.1f}" for a, b in found["pairs"])
            raw.append(f"{hook}: link {bits / 1e6:.1f} Mbit/s, ms per step with noop/with the hook: {shown}")
    heads = ["hook", "MB sent", "bytes / bandwidth, ms", "on the wire, ms", "difference, %"]
    heads += ["step minus noop, ms", "exposed, ms", "difference, %", "hidden, %"]
    return markdown_table(heads, table) + "\n\n```text\n" + "\n".join(raw) + "\n```"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m programs.cost.trace_cost", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("what", choices=["overhead", "truth"])
    parser.add_argument("--seconds", type=float, default=240.0, help="of measured blocks")
    parser.add_argument("--rate", default="200mbit", help="of the shaped link")
    parser.add_argument("--steps", type=int, default=3, help="of each block of the comparison with the link")
    parser.add_argument("--hooks", nargs="+", default=["allreduce", "bf16_compress", "quant4"])
    parser.add_argument("--connections", type=int, default=1, help="of gloo between the ranks")
    given = parser.parse_args()
    if given.what == "overhead":
        made = write(
            "trace", "Overhead", command("programs.cost.trace_cost"), overhead(given.seconds), "2 gloo processes"
        )
    else:
        text = truth(given.rate, given.hooks, given.steps, given.connections)
        title = f"Compared with a link of {given.rate}"
        title += "" if given.connections == 1 else f", {given.connections} connections"
        made = write(
            "trace", title, command("programs.cost.trace_cost"), text, "2 gloo processes, each in a network namespace"
        )
    sys.stdout.write(made.read_text())


if __name__ == "__main__":
    run_main(main)
