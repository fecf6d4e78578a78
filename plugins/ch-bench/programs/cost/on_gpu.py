"""Costs of one step next to PyTorch's hooks and plain DDP, with one rank: milliseconds, kernels, launches and memory.

    python -m programs.cost.on_gpu --device cuda --seconds 190 --out costs.jsonl

The gradients are given, so that a step costs only its hook, in DDP's default buckets. Timed steps take turns. Every row is
written when it is measured, and rows begin with the most important. ``--device cpu --tiny`` rehearses all of it; its numbers
mean nothing.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import commhooks
from ch_bench.pytorch_hooks import PYTORCH, attach_pytorch
from ch_bench.shapes import ShapesOnly, gpt_shapes, random_gradients

MODELS = {"124 M": (12, 768, 50257, 1024), "1.3 G": (24, 2048, 50257, 2048)}
TINY = {"tiny": (1, 32, 97, 16)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OURS = [*PYTORCH, "quant8", "quant4(error_feedback=True)", "error_feedback(bf16_compress)", "noop"]
ROUNDS, STEPS = 11, 3
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")
Step = Callable[[], None]


class Device:
    """Device of the measurements, with its clock and memory."""

    def __init__(self, kind: str) -> None:
        self.cuda = kind == "cuda"
        self.device = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)

    def settle(self) -> None:
        """Wait until the device is idle."""
        if self.cuda:
            torch.cuda.synchronize()

    def milliseconds(self, step: Step) -> tuple[float, float]:
        """Return the milliseconds until the device has finished, and until the call returns."""
        self.settle()
        begun = time.perf_counter()
        step()
        host = 1e3 * (time.perf_counter() - begun)
        self.settle()
        return 1e3 * (time.perf_counter() - begun), host

    def memory(self, *, peak: bool = False) -> int:
        """Return the bytes in use; 0 on a CPU."""
        if not self.cuda:
            return 0
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()

    def hooked(self, given: list[torch.Tensor], attach: Callable[[DistributedDataParallel], object]) -> Step:
        """Return a step that costs only its hook."""
        ids = [0] if self.cuda else None
        # PyTorch's PowerSGD hangs on gloo with more than one bucket.
        cap = 25 if self.cuda else 1000
        model = DistributedDataParallel(ShapesOnly(given), ids, bucket_cap_mb=cap, gradient_as_bucket_view=True)
        attach(model)

        def step() -> None:
            model.zero_grad(set_to_none=False)
            model().backward()

        for _ in range(4):  # DDP rebuilds its buckets, hooks make scratch, PyTorch's PowerSGD compresses from the third
            step()
        return step


def ours(hook: str) -> Callable[[DistributedDataParallel], object]:
    """Return a function that attaches our hook, which then compresses also with one rank."""
    return lambda model: commhooks.attach(model, hook, single_process=True)


def theirs(hook: str) -> Callable[[DistributedDataParallel], object]:
    """Return a function that registers PyTorch's hook."""
    return lambda model: attach_pytorch(model, hook)


def launched(device: Device, step: Step) -> dict[str, float]:
    """Return kernels, copies, launches and waits of the host per step; on a CPU, ATen operations."""
    counts: Counter[str] = Counter()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.cuda else [])]
    with profile(activities=kinds) as found:
        step()  # the profiler loses kernels of its first step
        device.settle()
    with profile(activities=kinds) as found:
        for _ in range(STEPS):
            step()
        device.settle()
    for event in found.events():
        if event.device_type == DeviceType.CUDA:
            counts["copies" if event.name.startswith(("Memcpy", "Memset")) else "kernels"] += 1
        elif event.name.startswith(("cudaLaunch", "cuLaunch")):
            counts["launches"] += 1
        elif event.name in WAITS:
            counts["waits"] += 1
        elif event.name.startswith("aten::"):
            counts["aten"] += 1
    counts["waits"] -= device.cuda  # the wait that ends the profile
    return {name: round(count / STEPS, 1) for name, count in counts.items()}


def held(device: Device, given: list[torch.Tensor], attach: Callable[[DistributedDataParallel], object]) -> list[float]:
    """Return the bytes per parameter of a hook's model at rest and at the peak of a step."""
    gc.collect()  # a dropped model lives until a collection
    before = device.memory()
    step = device.hooked(given, attach)
    device.settle()
    if device.cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step()
    device.settle()
    peak = device.memory(peak=True)
    gc.collect()
    numel = sum(g.numel() for g in given)
    return [round((each - before) / numel, 2) for each in (device.memory(), peak)]


def compared(device: Device, given: list[torch.Tensor], hook: str) -> dict[str, Any]:
    """Measure one hook: plain DDP, ours, and PyTorch's if it has one."""
    kinds = {"plain": lambda model: None, "ours": ours(hook)} | ({"PyTorch's": theirs(hook)} if hook in PYTORCH else {})
    row: dict[str, Any] = {}
    steps: dict[str, Step] = {}
    for name, attach in kinds.items():
        try:
            row[f"{name} B/parameter"] = held(device, given, attach)
            steps[name] = device.hooked(given, attach)
        except (RuntimeError, NotImplementedError) as error:  # PyTorch's PowerSGD has no QR of bf16
            row[name] = f"fails: {error}".splitlines()[0][:80]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(ROUNDS):
        for name in list(steps) if number % 2 else list(reversed(steps)):
            times[name].append(device.milliseconds(steps[name]))
    for name, found in times.items():
        row[f"{name} ms"] = [round(q, 3) for q in statistics.quantiles([t for t, _ in found], n=4)]
        row[f"{name} host ms"] = round(statistics.median(h for _, h in found), 3)
        row[f"{name} per step"] = launched(device, steps[name])
    if "PyTorch's ms" in row:
        row["ratio"] = round(row["ours ms"][1] / row["PyTorch's ms"][1], 3)
    return row


def main() -> None:
    """Measure until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters")
    parser.add_argument("--seconds", type=float, default=190.0, help="no row begins later")
    parser.add_argument("--out", type=Path, default=Path("costs.jsonl"))
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    device = Device(options.device)
    with tempfile.TemporaryDirectory() as folder, options.out.open("a") as out:
        store = FileStore(str(Path(folder, "store")), 1)
        dist.init_process_group("nccl" if device.cuda else "gloo", store=store, rank=0, world_size=1)
        for hook in OURS:
            for size, sizes in (TINY if options.tiny else MODELS).items():
                for dtype, kind in DTYPES.items():
                    if time.monotonic() > end:
                        print("no time is left for", hook, size, dtype, flush=True)
                        continue
                    given = random_gradients(gpt_shapes(*sizes), kind, device.device)
                    row = {"hook": hook, "model": size, "dtype": dtype}
                    try:
                        row |= compared(device, given, hook)
                    except Exception as error:  # the other rows are worth having
                        row["error"] = f"{type(error).__name__}: {error}"[:300]
                    del given
                    gc.collect()
                    if device.cuda:
                        torch.cuda.empty_cache()
                    print(json.dumps(row), file=out, flush=True)
                    print(row, flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
