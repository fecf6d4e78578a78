"""Milliseconds of a step whose gradients are given: ours, PyTorch's and plain DDP take turns, in the same process."""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from ch_bench.gpu_kit import models
from ch_bench.gpu_kit.kernels import GPT2_SMALL, TINY, hooked
from ch_bench.gpu_kit.rows import Rows, Values
from ch_bench.gpu_kit.setting import Setting
from ch_bench.shapes import gpt_shapes

ROUNDS = 15
ALONE = ["noop", "quant8", "batched_powersgd(rank=4)", "error_feedback(bf16_compress)"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def run(rows: Rows, setting: Setting, sizes: tuple[int, int, int, int] = GPT2_SMALL) -> None:
    with setting.group() as device:
        for label, dtype in DTYPES.items():
            given = models.made_up(gpt_shapes(*(TINY if setting.tiny else sizes)), dtype, device)
            for hook in models.PYTORCHS if not setting.tiny else models.PYTORCHS[:1]:
                name = f"{label}, {hook}, ours and PyTorch's"
                rows.row(name, _beside, setting, device, given, hook, True)
            for hook in ALONE if not setting.tiny else ALONE[:1]:
                rows.row(f"{label}, {hook}", _beside, setting, device, given, hook)
            del given
            if setting.cuda:
                torch.cuda.empty_cache()


def _beside(
    setting: Setting, device: torch.device, given: list[torch.Tensor], hook: str, theirs: bool = False
) -> Values:
    steps = {"plain": hooked(given, setting, device, "plain", False)}
    steps["ours"] = hooked(given, setting, device, hook, False)
    refused = ""
    if theirs:
        try:
            steps["PyTorch's"] = hooked(given, setting, device, hook, True)
        except (RuntimeError, NotImplementedError) as error:  # its PowerSGD has no QR of bf16
            refused = f"fails: {error}".splitlines()[0][:80]
    times = _taken(setting, steps)
    values: dict[str, Any] = {"parameters": sum(g.numel() for g in given)}
    middle = {name: statistics.median(t for t, _ in found) for name, found in times.items()}
    for name, found in times.items():
        values[f"{name} ms"] = middle[name]
        values[f"{name} quartiles"] = [round(q, 3) for q in statistics.quantiles([t for t, _ in found], n=4)[::2]]
        values[f"{name} host ms"] = statistics.median(h for _, h in found)
    if theirs:
        values["ratio"] = refused or middle["ours"] / middle["PyTorch's"]
    return values


def _taken(setting: Setting, steps: dict[str, Callable[[], None]]) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for round_ in range(3 if setting.tiny else ROUNDS):
        order = list(steps) if round_ % 2 else list(reversed(steps))
        for name in order:
            found[name].append(setting.milliseconds(steps[name]))
    return found
