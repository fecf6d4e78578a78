"""Costs of one step: kernels and launches, milliseconds, and memory, of our hooks, PyTorch's and plain DDP.

The gradients are given, so that a step costs only its hook. Timed steps take turns in one process. On a CPU the kernels are ATen
operations.
"""

import gc
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ch_bench.gpu_kit import models
from ch_bench.gpu_kit.device import KitDevice
from ch_bench.gpu_kit.findings import Findings, Values
from ch_bench.pytorch_hooks import PYTORCH, attach_pytorch
from ch_bench.shapes import ShapesOnly, Sizes, gpt_shapes, random_gradients

STEPS = 3
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")
GPT2_SMALL = (12, 768, 50257, 1024)
TINY = (1, 32, 97, 16)
GPT3_XL = (24, 2048, 50257, 2048)


def run_kernels(rows: Findings, kit: KitDevice) -> None:
    with kit.group() as device:
        shapes = gpt_shapes(*(TINY if kit.tiny else GPT2_SMALL))
        given = random_gradients(shapes, torch.float32, device)
        hooks = ["plain", *models.hooks(kit)]
        for hook in hooks:
            rows.row(hook, _profiled, kit, device, given, hook, False)
        for hook in PYTORCH:
            rows.row(f"PyTorch's {hook}", _profiled, kit, device, given, hook, True)


def hooked(
    given: list[torch.Tensor], kit: KitDevice, device: torch.device, hook: str, pytorch: bool
) -> Callable[[], None]:
    """Return a step that costs only its hook, ours or PyTorch's, in DDP's default buckets of 25 MB."""
    cap = 0.02 if kit.tiny else 25
    if pytorch and not kit.cuda:
        cap = 1000  # on gloo PyTorch's PowerSGD hangs with more than one bucket
    model = models.ddp(kit, device, ShapesOnly(given), bucket_cap_mb=cap)
    if pytorch:
        attach_pytorch(model, hook)
    elif hook != "plain":
        models.attach(model, hook)

    def step() -> None:
        model.zero_grad(set_to_none=False)
        model().backward()

    for _ in range(
        4
    ):  # DDP rebuilds its buckets, hooks make scratch, PyTorch's PowerSGD compresses from the third step
        step()
    return step


def _profiled(kit: KitDevice, device: torch.device, given: list[torch.Tensor], hook: str, pytorch: bool) -> Values:
    step = hooked(given, kit, device, hook, pytorch=pytorch)
    kit.settle()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if kit.cuda else [])]
    with profile(activities=kinds) as found:
        for _ in range(STEPS):
            step()
        kit.settle()
    counts: Counter[str] = Counter()
    microseconds = 0.0
    for event in found.events():
        if event.device_type == DeviceType.CUDA:
            counts["copies" if event.name.startswith(("Memcpy", "Memset")) else "kernels"] += 1
            microseconds += event.self_device_time_total
        elif event.name.startswith("cuda"):
            counts["launches"] += event.name.startswith("cudaLaunch")
            counts["waits"] += event.name in WAITS
        elif event.name.startswith("aten::"):
            counts["aten"] += 1
    del found
    times = [kit.milliseconds(step) for _ in range(5)]
    per_step = {name: round(counts[name] / STEPS, 1) for name in ("kernels", "copies", "launches", "waits", "aten")}
    per_step["waits"] -= round(1 / STEPS, 1) if kit.cuda else 0  # the wait that ends the profile
    return {
        **per_step,
        "device busy ms": microseconds / STEPS / 1e3,
        "device ms": sorted(t for t, _ in times)[2],
        "host ms": sorted(t for _, t in times)[2],
    }


# -- milliseconds

ROUNDS = 15
ALONE = ["noop", "quant8", "batched_powersgd(rank=4)", "error_feedback(bf16_compress)"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def run_costs(rows: Findings, kit: KitDevice, sizes: Sizes = GPT2_SMALL) -> None:
    with kit.group() as device:
        for label, dtype in DTYPES.items():
            given = random_gradients(gpt_shapes(*(TINY if kit.tiny else sizes)), dtype, device)
            for hook in PYTORCH if not kit.tiny else PYTORCH[:1]:
                name = f"{label}, {hook}, ours and PyTorch's"
                rows.row(name, _beside, kit, device, given, hook, True)
            for hook in ALONE if not kit.tiny else ALONE[:1]:
                rows.row(f"{label}, {hook}", _beside, kit, device, given, hook)
            del given
            if kit.cuda:
                torch.cuda.empty_cache()


def _beside(kit: KitDevice, device: torch.device, given: list[torch.Tensor], hook: str, theirs: bool = False) -> Values:
    steps = {"plain": hooked(given, kit, device, "plain", False)}
    steps["ours"] = hooked(given, kit, device, hook, False)
    refused = ""
    if theirs:
        try:
            steps["PyTorch's"] = hooked(given, kit, device, hook, True)
        except (RuntimeError, NotImplementedError) as error:  # PyTorch's PowerSGD has no QR of bf16
            refused = f"fails: {error}".splitlines()[0][:80]
    times = _taken(kit, steps)
    values: dict[str, Any] = {"parameters": sum(g.numel() for g in given)}
    middle = {name: statistics.median(t for t, _ in found) for name, found in times.items()}
    for name, found in times.items():
        values[f"{name} ms"] = middle[name]
        values[f"{name} quartiles"] = [round(q, 3) for q in statistics.quantiles([t for t, _ in found], n=4)[::2]]
        values[f"{name} host ms"] = statistics.median(h for _, h in found)
    if theirs:
        values["ratio"] = refused or middle["ours"] / middle["PyTorch's"]
    return values


def _taken(kit: KitDevice, steps: dict[str, Callable[[], None]]) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for round_ in range(3 if kit.tiny else ROUNDS):
        order = list(steps) if round_ % 2 else list(reversed(steps))
        for name in order:
            found[name].append(kit.milliseconds(steps[name]))
    return found


def run_costs_large(rows: Findings, kit: KitDevice) -> None:
    """Measure the costs with the shapes of a GPT of 1.3 G parameters (Brown et al. 2020, table 2.1)."""
    run_costs(rows, kit, GPT3_XL)


# -- memory


def run_memory(rows: Findings, kit: KitDevice) -> None:
    with kit.group() as device:
        given = random_gradients(gpt_shapes(*(TINY if kit.tiny else GPT2_SMALL)), torch.float32, device)
        plain = _held(kit, device, given, "plain", False)
        for hook in models.hooks(kit):
            rows.row(hook, _over, plain, kit, device, given, hook, False)
        for hook in PYTORCH:
            rows.row(f"PyTorch's {hook}", _over, plain, kit, device, given, hook, True)


def _held(
    kit: KitDevice, device: torch.device, given: list[torch.Tensor], hook: str, pytorch: bool
) -> tuple[float, float]:
    """Return the bytes per parameter of the hook's model at rest and at the peak."""
    before = _in_use(kit)
    step = hooked(given, kit, device, hook, pytorch=pytorch)
    kit.settle()
    if kit.cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step()
    kit.settle()
    peak = float(torch.cuda.max_memory_allocated()) if kit.cuda else _in_use(kit)
    rest, numel = _in_use(kit), sum(g.numel() for g in given)
    del step
    gc.collect()
    return (rest - before) / numel, (peak - before) / numel


def _in_use(kit: KitDevice) -> float:
    gc.collect()
    if kit.cuda:
        return float(torch.cuda.memory_allocated())
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def _over(
    plain: tuple[float, float],
    kit: KitDevice,
    device: torch.device,
    given: list[torch.Tensor],
    hook: str,
    pytorch: bool,
) -> Values:
    rest, peak = _held(kit, device, given, hook, pytorch)
    return {"at rest B/parameter": rest - plain[0], "at the peak B/parameter": peak - plain[1]}
