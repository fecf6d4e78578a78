"""Kernels, launches, host waits and time of one step, from the profiler; on a CPU the operations of a step."""

from collections import Counter
from collections.abc import Callable

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ch_bench.gpu_kit import models
from ch_bench.gpu_kit.rows import Rows, Values
from ch_bench.gpu_kit.setting import Setting
from ch_bench.shapes import gpt_shapes

STEPS = 3
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")
GPT2_SMALL = (12, 768, 50257, 1024)
TINY = (1, 32, 97, 16)


def run(rows: Rows, setting: Setting) -> None:
    with setting.group() as device:
        shapes = gpt_shapes(*(TINY if setting.tiny else GPT2_SMALL))
        given = models.made_up(shapes, torch.float32, device)
        hooks = ["plain", *models.hooks(setting)]
        for hook in hooks:
            rows.row(hook, _profiled, setting, device, given, hook, False)
        for hook in models.PYTORCHS:
            rows.row(f"PyTorch's {hook}", _profiled, setting, device, given, hook, True)


def hooked(
    given: list[torch.Tensor], setting: Setting, device: torch.device, hook: str, torchs: bool
) -> Callable[[], None]:
    """A step that costs what the hook (PyTorch's, if ``torchs``) costs, in DDP's own buckets of 25 MB."""
    cap = 0.02 if setting.tiny else 25
    if torchs and not setting.cuda:
        cap = 1000  # on gloo PyTorch's PowerSGD hangs with more than one bucket
    model = models.ddp(setting, device, models.ShapesOnly(given), bucket_cap_mb=cap)
    if torchs:
        models.register_torch(model, hook)
    elif hook != "plain":
        models.attach(model, hook)

    def step() -> None:
        model.zero_grad(set_to_none=False)
        model().backward()

    for _ in range(4):  # PyTorch's PowerSGD begins with the third; buckets are rebuilt, scratch is made
        step()
    return step


def _profiled(setting: Setting, device: torch.device, given: list[torch.Tensor], hook: str, torchs: bool) -> Values:
    step = hooked(given, setting, device, hook, torchs=torchs)
    setting.settle()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.cuda else [])]
    with profile(activities=kinds) as found:
        for _ in range(STEPS):
            step()
        setting.settle()
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
    times = [setting.milliseconds(step) for _ in range(5)]
    per_step = {name: round(counts[name] / STEPS, 1) for name in ("kernels", "copies", "launches", "waits", "aten")}
    per_step["waits"] -= round(1 / STEPS, 1) if setting.cuda else 0  # the one that ends the profile
    return {
        **per_step,
        "device busy ms": microseconds / STEPS / 1e3,
        "device ms": sorted(t for t, _ in times)[2],
        "host ms": sorted(t for _, t in times)[2],
    }
