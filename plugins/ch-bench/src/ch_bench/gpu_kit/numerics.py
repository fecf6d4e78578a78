"""Numbers on CUDA: products in TF32, sums that are not finite, and failures that are reported a step late."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ch_bench.gpu_kit import models
from ch_bench.gpu_kit.adapters import IDENTITY
from ch_bench.gpu_kit.device import KitDevice
from ch_bench.gpu_kit.findings import Findings, Values
from ch_bench.pytorch_hooks import reduction_of
from ch_bench.shapes import ShapesOnly, random_gradients
from commhooks import Bucket, Composite, Stages, StepContext

STEPS = 8
HOOKS = ["powersgd(rank=1)", "powersgd(rank=4)", "batched_powersgd(rank=4)", "error_feedback(bf16_compress)"]


def run(rows: Findings, kit: KitDevice) -> None:
    with kit.group() as device:
        for hook in HOOKS if not kit.tiny else HOOKS[1:2]:
            for precision in ("highest", "high", "medium"):
                name = f"{hook}: passed on + residual = gradient, float32_matmul_precision {precision}"
                rows.row(name, _identity, kit, device, hook, precision)
            rows.row(f"{hook}: the same bits twice", _twice, kit, device, hook)
            rows.row(f"{hook}: an Inf leaves the state alone", _not_finite, kit, device, hook)
        rows.row("a failing reduction leaves no finite gradient behind", _failing, kit, device)


@contextmanager
def precise(kit: str) -> Iterator[None]:
    """Set the precision of fp32 products; "high" and "medium" allow TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(kit)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _identity(kit: KitDevice, device: torch.device, hook: str, precision: str) -> Values:
    """Check ``passed on + residual = gradient`` with given gradients."""
    shapes = {name: p.shape for name, p in models.net(kit, device).named_parameters()}
    given = random_gradients(shapes, torch.float32, device)
    model = models.ddp(kit, device, ShapesOnly(given))
    handle = models.attach(model, hook)
    passed_on = torch.zeros(sum(g.numel() for g in given), dtype=torch.float64, device=device)
    with precise(precision):
        for _ in range(STEPS):
            model.zero_grad(set_to_none=False)
            model().backward()
            passed_on += models.gradients(model)
    residual = models.residual_of(handle, model)
    assert residual is not None
    wanted = STEPS * torch.cat([g.reshape(-1) for g in given]).double()
    error = models.distance(passed_on + residual, wanted)
    if error > IDENTITY:
        raise AssertionError(f"relative distance {error:.2e} after {STEPS} steps")
    return {"relative distance": error}


def _twice(kit: KitDevice, device: torch.device, hook: str) -> Values:
    def once() -> torch.Tensor:
        model = models.ddp(kit, device)
        models.attach(model, hook)
        return models.total(model, kit, device, STEPS)

    if not torch.equal(once(), once()):
        raise AssertionError("two runs on the same data differ")
    return {"same bits": True}


def _not_finite(kit: KitDevice, device: torch.device, hook: str) -> Values:
    model = models.ddp(kit, device)
    handle = models.attach(model, hook)
    models.total(model, kit, device, 2)
    before, steps = models.residual_of(handle, model), handle.stats()["steps"]
    models.backward(model, torch.full_like(models.batch(kit, device, 2), float("inf")))
    after = models.residual_of(handle, model)
    if before is None or after is None or not torch.equal(before, after):
        raise AssertionError("the residual differs from the one before the step")
    models.backward(model, models.batch(kit, device, 3))
    return {"steps": handle.stats()["steps"] - steps}


class Failing(Composite):
    """A reduction that raises in one step after its collectives."""

    name = "failing"

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        yield from self.inner.start(bucket, ctx)
        if ctx.step == 2 and bucket.device.type != "meta":
            raise RuntimeError("injected")


def _failing(kit: KitDevice, device: torch.device) -> Values:
    """Check that gradients are not finite until ``backward()`` raises, on CUDA a step later."""
    model = models.ddp(kit, device)
    handle = models.attach(model, Failing(reduction_of("powersgd(rank=4)")))
    found: torch.Tensor | None = None
    reported = -1
    for step in range(5):
        try:
            gradients = models.backward(model, models.batch(kit, device, step))
        except RuntimeError:
            reported = step
            gradients = models.gradients(model)
        if step == 2:
            found = gradients
        if reported >= 0:
            break
    assert found is not None
    if bool(found.isfinite().all()) or reported < 0:
        raise AssertionError(f"finite gradients after a failure, reported at step {reported}")
    handle.detach()
    return {"failed at step": 2, "reported at step": reported}
