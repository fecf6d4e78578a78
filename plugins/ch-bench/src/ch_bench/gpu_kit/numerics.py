"""What CUDA does to numbers: products in TF32, sums that are not finite, and a failure that is told a step late."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

import commhooks
from ch_bench.gpu_kit import models
from ch_bench.gpu_kit.adapters import IDENTITY
from ch_bench.gpu_kit.rows import Rows, Values
from ch_bench.gpu_kit.setting import Setting
from commhooks import Bucket, Composite, Stages, StepContext

STEPS = 8
HOOKS = ["powersgd(rank=1)", "powersgd(rank=4)", "batched_powersgd(rank=4)", "error_feedback(bf16_compress)"]


def run(rows: Rows, setting: Setting) -> None:
    with setting.group() as device:
        for hook in HOOKS if not setting.tiny else HOOKS[1:2]:
            for precision in ("highest", "high", "medium"):
                name = f"{hook}: passed on + residual = gradient, float32_matmul_precision {precision}"
                rows.row(name, _identity, setting, device, hook, precision)
            rows.row(f"{hook}: the same bits twice", _twice, setting, device, hook)
            rows.row(f"{hook}: an Inf leaves the state alone", _not_finite, setting, device, hook)
        rows.row("a failing reduction leaves no finite gradient behind", _failing, setting, device)


@contextmanager
def precise(setting: str) -> Iterator[None]:
    """How products of fp32 are made meanwhile: "high" and "medium" allow TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _identity(setting: Setting, device: torch.device, hook: str, precision: str) -> Values:
    """The same gradients for both: those of a net without a hook, handed to the shapes of its parameters."""
    shapes = {name: p.shape for name, p in models.net(setting, device).named_parameters()}
    given = models.made_up(shapes, torch.float32, device)
    model = models.ddp(setting, device, models.ShapesOnly(given))
    handle = models.attach(model, hook)
    passed_on = torch.zeros(sum(g.numel() for g in given), dtype=torch.float64, device=device)
    with precise(precision):
        for _ in range(STEPS):
            model.zero_grad(set_to_none=False)
            model().backward()
            passed_on += models.gradients(model)
    residual = models.kept_back(handle, model)
    assert residual is not None
    wanted = STEPS * torch.cat([g.reshape(-1) for g in given]).double()
    error = models.distance(passed_on + residual, wanted)
    if error > IDENTITY:
        raise AssertionError(f"relative distance {error:.2e} after {STEPS} steps")
    return {"relative distance": error}


def _twice(setting: Setting, device: torch.device, hook: str) -> Values:
    def once() -> torch.Tensor:
        model = models.ddp(setting, device)
        models.attach(model, hook)
        return models.total(model, setting, device, STEPS)

    if not torch.equal(once(), once()):
        raise AssertionError("two runs on the same data differ")
    return {"same bits": True}


def _not_finite(setting: Setting, device: torch.device, hook: str) -> Values:
    model = models.ddp(setting, device)
    handle = models.attach(model, hook)
    models.total(model, setting, device, 2)
    before, steps = models.kept_back(handle, model), handle.stats()["steps"]
    models.backward(model, torch.full_like(models.batch(setting, device, 2), float("inf")))
    after = models.kept_back(handle, model)
    if before is None or after is None or not torch.equal(before, after):
        raise AssertionError("the residual is not what it was before the step")
    models.backward(model, models.batch(setting, device, 3))
    return {"steps": handle.stats()["steps"] - steps}


class Failing(Composite):
    """Raises in one step, between its collectives and the end."""

    name = "failing"

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        yield from self.inner.start(bucket, ctx)
        if ctx.step == 2 and bucket.device.type != "meta":
            raise RuntimeError("as told")


def _failing(setting: Setting, device: torch.device) -> Values:
    """The error is raised from ``backward()``, on CUDA a step later: until then the gradients must not be used."""
    model = models.ddp(setting, device)
    reduction = commhooks.create("powersgd(rank=4)").reduction
    assert reduction is not None
    handle = models.attach(model, Failing(reduction))
    found: torch.Tensor | None = None
    told = -1
    for step in range(5):
        try:
            gradients = models.backward(model, models.batch(setting, device, step))
        except RuntimeError:
            told = step
            gradients = models.gradients(model)
        if step == 2:
            found = gradients
        if told >= 0:
            break
    assert found is not None
    if bool(found.isfinite().all()) or told < 0:
        raise AssertionError(f"finite gradients after a failure, told at step {told}")
    handle.detach()
    return {"failed at step": 2, "told at step": told}
