"""Whether a hook makes the host wait: ``torch.cuda.set_sync_debug_mode("error")`` during whole backwards over NCCL.

It tells of ``.item()``, copies to pageable memory and the like, at the line where they are. What waits for an event is not
seen by it: the part on kernels counts those.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ch_bench.gpu_kit import models
from ch_bench.gpu_kit.rows import Rows, Skipped, Values
from ch_bench.gpu_kit.setting import Setting

WARM_UP, STEPS = 4, 3


def run(rows: Rows, setting: Setting) -> None:
    with setting.group() as device:
        rows.row("plain DDP", _without, setting, device)
        rows.row("control: an .item() is told", _control, setting, device)
        for hook in models.hooks(setting):
            rows.row(hook, _hooked, setting, device, hook)
        for hook in ("powersgd(rank=4)", "error_feedback(bf16_compress)"):
            rows.row(f"{hook}, optimizer=", _watched, setting, device, hook, False)
            rows.row(f"{hook}, scaler=", _watched, setting, device, hook, True)


@contextmanager
def forbidden(setting: Setting) -> Iterator[None]:
    """Every wait of the host is an error."""
    if setting.cuda:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if setting.cuda:
            torch.cuda.set_sync_debug_mode("default")


def _backwards(model: nn.Module, setting: Setting, device: torch.device, after: Any = None) -> None:
    for step in range(WARM_UP + STEPS):
        model.zero_grad(set_to_none=False)
        loss = model(models.batch(setting, device, step)).square().mean()
        with forbidden(setting) if step >= WARM_UP else _allowed():
            loss.backward()
        if after is not None:
            after()


@contextmanager
def _allowed() -> Iterator[None]:
    yield


def _without(setting: Setting, device: torch.device) -> Values:
    _backwards(models.ddp(setting, device), setting, device)
    return {"waits": 0}


def _control(setting: Setting, device: torch.device) -> Values:
    if not setting.cuda:
        raise Skipped("on a CPU nothing is waited for")
    try:
        with forbidden(setting):
            torch.ones(1, device=device).item()
    except RuntimeError:
        return {"told": True}
    raise AssertionError("an .item() went unnoticed: this mode shows nothing here")


def _hooked(setting: Setting, device: torch.device, hook: str) -> Values:
    model = models.ddp(setting, device)
    handle = models.attach(model, hook)
    _backwards(model, setting, device)
    handle.check()
    return {"waits": 0}


def _watched(setting: Setting, device: torch.device, hook: str, scaled: bool) -> Values:
    """With who uses the gradients given to ``attach``: a step's end is told by the optimizer or the scaler."""
    model = models.ddp(setting, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(setting.device, enabled=setting.cuda) if scaled else None
    handle = models.attach(model, hook, optimizer=optimizer, scaler=scaler)

    def after() -> None:
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()

    for step in range(WARM_UP + STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss = model(models.batch(setting, device, step)).square().mean()
        loss = scaler.scale(loss) if scaler is not None else loss
        with forbidden(setting) if step >= WARM_UP else _allowed():
            loss.backward()
        after()
    handle.check()
    return {"waits": 0}
