"""Where the milliseconds of a hook go: phases of a step, processor time of threads, and passes over memory.

    OMP_NUM_THREADS=1 python -m programs.cost.account [EXPR ...] [--width 384] [--buckets 0] [--link 1gbit] [--record]

Two gloo processes. A backward hands over given gradients (the shapes of a GPT of six layers), so a step has the cost of its
hook alone. The hooks take turns step by step, in a new random order each time. The first table has medians of rank 0, in
milliseconds of a step:

* cost: the backward, less that of `noop`;
* encode, wait, decode: of the engine's counters. Encode includes the start of messages;
* status: the rest of the hook;
* its thread, gloo's threads: processor time of the backward's thread, and of all others of the process;
* messages: collectives that the steps wait for, without the status; faults: pages that the step touched for the first time.

Then the profiler records further steps. It takes time itself, so its operations are slower than those of the first table.
"Between operations" is the time of encode and decode in which no operation ran: Python, and the profiler.
"""

import argparse
import json
import math
import random
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_bench import launch, record
from ch_bench.cost.bench import CAPS
from ch_bench.links import netns
from ch_bench.links.link import Link
from ch_bench.pytorch_hooks import LABELS, attach_pytorch
from ch_bench.shapes import ShapesOnly, gpt_shapes, random_gradients

HOOKS = [
    *("allreduce", "bf16_compress", "torch fp16"),
    *("quant8", "quant8(error_feedback=True)", "quant4", "quant4(error_feedback=True)"),
]
LAYERS, VOCABULARY, CONTEXT, WIDTH = 6, 96, 64, 384
WARM_UP, PROFILED = 4, 3  # steps
LONG = 1 << 13  # numbers; shorter operations treat one number of each block
PHASES = ("encode", "wait", "decode")
PASSES = {  # operation -> pass, if all of its numbers are of the gradient
    "amax": "largest and smallest of a block",
    "amin": "largest and smallest of a block",
    "mul": "multiply",
    "mul_": "multiply",
    "round_": "round",
    "add": "add",
    "add_": "add",
    "addcmul_": "multiply and add",
    "sum": "sum (finite?)",
}
NARROW = {"signed char", "c10::BFloat16", "c10::Half"}


def kind(name: str, types: Sequence[str], numbers: int) -> str:
    """Return the pass of an operation.

    >>> kind("aten::copy_", ["signed char", "float"], 1 << 17), kind("aten::amax", ["float"], 1 << 17)
    ('cast to a narrow type', 'largest and smallest of a block')
    >>> kind("aten::mul_", ["float"], 1024)
    'one number of each block'
    """
    name = name.removeprefix("aten::")
    if numbers < LONG:
        return "one number of each block"
    if name.startswith("bitwise"):
        return "pack and unpack"
    if name == "copy_":
        return {
            (True, False): "cast to a narrow type",
            (False, True): "cast from a narrow type",
        }.get((types[0] in NARROW, types[1] in NARROW), "copy")
    return PASSES.get(name, "other operations")


class Timed:
    """A model of given gradients with one hook, and the figures of its steps."""

    def __init__(self, hook: str, gradients: list[torch.Tensor], cap: float | None) -> None:
        self.model = DistributedDataParallel(ShapesOnly(gradients), bucket_cap_mb=cap, gradient_as_bucket_view=True)
        self.handle: Any = None
        if hook in LABELS:
            attach_pytorch(self.model, hook)
        else:
            self.handle = commhooks.attach(self.model, hook)
        self.rows: list[dict[str, float]] = []

    def step(self) -> None:
        loss = self.model()
        dist.barrier()
        before = self._read()
        loss.backward()
        self.rows.append({key: value - before[key] for key, value in self._read().items()})

    def _read(self) -> dict[str, float]:
        found = {"step": time.perf_counter(), "its thread": time.thread_time(), "process": time.process_time()}
        found["faults"] = float(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        stats = self.handle.stats() if self.handle is not None else defaultdict(float)
        found |= {phase: stats[f"{phase}_seconds"] for phase in (*PHASES, "hook")}
        return found | {"messages": stats["rounds"], "sent": stats["wire_bytes"]}


def worker(
    rank: int, world: int, device: torch.device, hooks: list[str], width: int, cap: float | None, steps: int, path: Path
) -> None:
    """Time all hooks in turns, then profile each. Rank 0 writes the result to ``path``."""
    shapes = gpt_shapes(LAYERS, width, VOCABULARY, CONTEXT)
    timed = {hook: Timed(hook, random_gradients(shapes, torch.float32, device), cap) for hook in hooks}
    for number in range(WARM_UP + steps):
        for hook in random.Random(number).sample(hooks, len(hooks)):
            timed[hook].step()
    rows = {hook: one.rows[WARM_UP:] for hook, one in timed.items()}
    found = {hook: {key: median(row[key] for row in steps) for key in steps[0]} for hook, steps in rows.items()}
    profiles = {hook: profiled(one) for hook, one in timed.items() if hook.startswith("quant")}
    if rank == 0:
        numel = sum(map(math.prod, shapes.values()))
        sizes = timed[hooks[0]].model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
        made = {"numel": numel, "buckets": len(sizes), "phases": found, "passes": profiles}
        path.write_text(json.dumps(made))


def profiled(one: Timed) -> dict[str, tuple[float, float]]:
    """Return seconds and calls in a step for each pass."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        for _ in range(PROFILED):
            one.step()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(str(Path(folder, "trace.json")))
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return passes(events)


def passes(events: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return seconds and calls in a step for each pass, of the outermost operations inside a reduction."""
    events = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: (e["ts"], -e["dur"]))
    thread = next(e["tid"] for e in events if e["name"].startswith("commhooks::"))  # of the backward
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    inside, operation = 0.0, 0.0  # ends of the range of a reduction and of the operation in it
    for event in (e for e in events if e["tid"] == thread):
        name, end = event["name"], event["ts"] + event["dur"]
        if name.startswith("commhooks::") and "::stage" in name:
            inside = end
            found["between operations"][0] += event["dur"]
        elif name.startswith("aten::") and operation <= event["ts"] < inside and end <= inside:
            operation = end
            dims, types = event["args"].get("Input Dims", []), event["args"].get("Input type", [])
            numbers = max((math.prod(d) for d in dims if d and not isinstance(d[0], list)), default=0)
            row = found["views" if name in VIEWS else kind(name, types, numbers)]
            row[0] += event["dur"]
            row[1] += 1
            found["between operations"][0] -= event["dur"]
    return {key: (seconds * 1e-6 / PROFILED, calls / PROFILED) for key, (seconds, calls) in found.items()}


VIEWS = {f"aten::{name}" for name in ("slice", "view", "unbind", "select", "split_with_sizes", "empty", "as_strided")}


def phase_table(found: dict[str, Any]) -> str:
    """Return the phases of each hook as Markdown."""
    noop = found["phases"]["noop"]["step"]
    heads = ["hook", "cost", *PHASES, "status", "its thread", "gloo's threads", "messages", "faults", "sent MB"]
    rows = []
    for hook, row in found["phases"].items():
        ms = [row["step"] - noop, *(row[phase] for phase in PHASES)]
        ms += [row["hook"] - sum(row[phase] for phase in PHASES), row["its thread"], row["process"] - row["its thread"]]
        known = hook not in LABELS  # of PyTorch's hooks only the step can be timed
        cells = [f"{1e3 * s:.1f}" if known or i in (0, 5, 6) else "" for i, s in enumerate(ms)]
        cells += [f"{row['messages']:.0f}" if known else "", f"{row['faults']:.0f}"]
        rows.append([f"`{hook}`", *cells, f"{row['sent'] / 1e6:.2f}" if known else ""])
    return record.markdown_table(heads, rows)


def pass_table(found: dict[str, Any]) -> str:
    """Return the passes of each quantized hook as Markdown: milliseconds, calls, nanoseconds per number."""
    hooks: dict[str, dict[str, tuple[float, float]]] = found["passes"]
    names = sorted(
        {name for row in hooks.values() for name in row}, key=lambda n: -max(r.get(n, (0,))[0] for r in hooks.values())
    )
    rows = [
        [name, *(f"{1e3 * row[name][0]:.1f} ({row[name][1]:.0f})" if name in row else "" for row in hooks.values())]
        for name in names
    ]
    return record.markdown_table(["ms and calls of a step", *(f"`{hook}`" for hook in hooks)], rows)


def cap(buckets: int, width: int) -> float | None:
    """Return DDP's ``bucket_cap_mb`` for a number of buckets; ``None`` for its default."""
    found = CAPS[buckets]
    return None if found is None else found * (width / WIDTH) ** 2


def main(argv: list[str] | None = None) -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hooks", nargs="*", default=HOOKS, metavar="EXPR", help=f"default {', '.join(HOOKS)}")
    parser.add_argument(
        "--width", type=int, nargs="+", default=[WIDTH], help="width of the GPT: 384 is 10.7 M, 104 0.8 M parameters"
    )
    parser.add_argument("--buckets", type=int, nargs="+", choices=list(CAPS), default=[0], help="0 is DDP's default")
    parser.add_argument("--link", type=Link.parse, help="as in 1gbit (needs root and iproute2); default loopback")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each hook (default 40)")
    parser.add_argument("--record", action="store_true", help="write the tables to docs/measured/codec.md")
    args = parser.parse_args(argv)
    hooks = list(dict.fromkeys(["noop", *args.hooks]))
    shown = []
    for width in args.width:
        for buckets in args.buckets:
            with netns.Network(2, args.link) if args.link else nullcontext() as net:
                found = launch.launch_and_read(
                    worker, 2, hooks, width, cap(buckets, width), args.steps, enter=net.enter if net else None
                )
            where = args.link.text if args.link else "loopback"
            shown.append(f"{found['numel'] / 1e6:.1f} M parameters, {found['buckets']} buckets, {where}")
            shown += [phase_table(found), pass_table(found)]
            print(*shown[-3:], sep="\n\n", flush=True)
    if args.record:
        made_by = record.command("programs.cost.account", argv, environment="OMP_NUM_THREADS=1")
        record.write("codec", "Account of a step", made_by, "\n\n".join(shown), "2 gloo processes")
    return 0


if __name__ == "__main__":
    record.run_main(main)
