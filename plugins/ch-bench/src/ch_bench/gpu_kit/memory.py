"""Bytes per parameter that a hook holds over plain DDP: between steps, and at the peak inside one; PyTorch's beside it."""

import gc
from pathlib import Path

import torch

from ch_bench.gpu_kit import models
from ch_bench.gpu_kit.kernels import GPT2_SMALL, TINY, hooked
from ch_bench.gpu_kit.rows import Rows, Values
from ch_bench.gpu_kit.setting import Setting
from ch_bench.shapes import gpt_shapes


def run(rows: Rows, setting: Setting) -> None:
    with setting.group() as device:
        given = models.made_up(gpt_shapes(*(TINY if setting.tiny else GPT2_SMALL)), torch.float32, device)
        plain = _held(setting, device, given, "plain", False)
        for hook in models.hooks(setting):
            rows.row(hook, _over, plain, setting, device, given, hook, False)
        for hook in models.PYTORCHS:
            rows.row(f"PyTorch's {hook}", _over, plain, setting, device, given, hook, True)


def _held(
    setting: Setting, device: torch.device, given: list[torch.Tensor], hook: str, torchs: bool
) -> tuple[float, float]:
    """``(at rest, at the peak)`` in bytes per parameter, all that the hook's model has made."""
    before = _in_use(setting)
    step = hooked(given, setting, device, hook, torchs=torchs)
    setting.settle()
    if setting.cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step()
    setting.settle()
    peak = float(torch.cuda.max_memory_allocated()) if setting.cuda else _in_use(setting)
    rest, numel = _in_use(setting), sum(g.numel() for g in given)
    del step
    gc.collect()
    return (rest - before) / numel, (peak - before) / numel


def _in_use(setting: Setting) -> float:
    gc.collect()
    if setting.cuda:
        return float(torch.cuda.memory_allocated())
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def _over(
    plain: tuple[float, float],
    setting: Setting,
    device: torch.device,
    given: list[torch.Tensor],
    hook: str,
    torchs: bool,
) -> Values:
    rest, peak = _held(setting, device, given, hook, torchs)
    return {"at rest B/parameter": rest - plain[0], "at the peak B/parameter": peak - plain[1]}
