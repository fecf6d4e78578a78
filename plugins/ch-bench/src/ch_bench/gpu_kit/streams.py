"""Streams: order of hand-overs, waits of the host, and CUDA graphs.

Order: a kernel delays its stream for 10 ms before each hand-over. Code that did not wait would read old data, and the numbers
would differ from a run without delays. Controls leave out one wait, and the numbers must differ.

Waits: ``torch.cuda.set_sync_debug_mode("error")`` during whole backwards over NCCL reports ``.item()``, copies to pageable
memory and the like, with their line. It does not report waits for events; the part on kernels counts those.

Graphs: whether a backward with a hook can be captured as a CUDA graph and replayed.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch import nn

from ch_bench.gpu_kit import models
from ch_bench.gpu_kit.device import KitDevice
from ch_bench.gpu_kit.findings import Findings, Skipped, Values
from ch_bench.pytorch_hooks import reduction_of
from ch_core import Engine, ProcessGroupTransport, SideStream
from commhooks import Bucket, BucketLayout, Composite, Reduction, Stages, StepContext

ORDER_STEPS = 4
PLACES = {
    "gradient": "before the gradient that DDP gives to the hook",
    "encode": "before the tensors that the hook gives to the collective",
    "resume": "before the tensors that the hook returns to DDP",
    "everywhere": "all of them",
}


def run_order(rows: Findings, kit: KitDevice) -> None:
    with kit.group() as device:
        for hook in models.REPRESENTATIVE if not kit.tiny else models.REPRESENTATIVE[1:3]:
            plain = _trained(kit, device, hook, "")
            for place, meaning in PLACES.items():
                rows.row(f"{hook}: {meaning}", _same, kit, device, hook, place, plain)
            rows.row(f"{hook}: before the result of a collective", _collective, kit, device, hook)
        rows.row("control: a side stream that does not wait", _control_side, kit, device)
        rows.row("control: a collective that is not waited for", _control_collective, kit, device)


class Delayed(Composite):
    """A reduction that delays its stream before it encodes or after it is resumed."""

    name = "delayed"

    def __init__(self, inner: Reduction, kit: KitDevice, place: str) -> None:
        super().__init__(inner)
        self._setting, self._place = kit, place

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        if bucket.device.type != "meta" and self._place in ("encode", "everywhere"):
            self._setting.delay()
        for requests in self.inner.start(bucket, ctx):
            yield requests
            if bucket.device.type != "meta" and self._place in ("resume", "everywhere"):
                self._setting.delay()


def _trained(kit: KitDevice, device: torch.device, hook: str, place: str) -> torch.Tensor:
    """Return the gradients of several steps on DDP."""
    model = models.ddp(kit, device)
    models.attach(model, Delayed(reduction_of(hook), kit, place))

    def late(gradient: torch.Tensor) -> None:
        if place in ("gradient", "everywhere"):
            kit.delay()

    def behind(module: object, inputs: object, output: torch.Tensor) -> None:
        output.register_hook(late)

    for layer in model.module:
        layer.register_forward_hook(behind)
    return torch.stack([models.backward(model, models.batch(kit, device, step)) for step in range(ORDER_STEPS)])


def _same(kit: KitDevice, device: torch.device, hook: str, place: str, plain: torch.Tensor) -> Values:
    found = _trained(kit, device, hook, place)
    if not torch.equal(found, plain):
        raise AssertionError(f"a delay changes the numbers: relative distance {models.distance(found, plain):.2e}")
    return {"same bits": True}


class LateTransport(ProcessGroupTransport):
    """Collectives that end late on a second stream and change their tensors, which reveals code that does not wait."""

    def __init__(self, kit: KitDevice, late: bool, waits: bool = True) -> None:
        super().__init__()
        self._setting, self._late, self._waits = kit, late, waits
        self._stream = torch.cuda.Stream() if kit.cuda else None

    def all_reduce(self, tensor: torch.Tensor, op: str) -> "_Work":
        return self._run_late(tensor, tensor)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> "_Work":
        return self._run_late(output, input)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> "_Work":
        return self._run_late(output, input)

    def _run_late(self, output: torch.Tensor, input: torch.Tensor) -> "_Work":
        with self._beside():
            if self._late:
                self._setting.delay()
            if output.is_floating_point() and output.numel() > 2:  # not the status, which would report failures
                torch.mul(input.view(-1), 2.0, out=output.view(-1))
            elif output is not input:
                output.copy_(input)
            return _Work(self._stream if self._waits else None)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield


class _Work:
    def __init__(self, stream: "torch.cuda.Stream | None") -> None:
        self._done = stream.record_event() if stream is not None else None

    def wait(self, timeout: float | None) -> None:
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)


def _driven(kit: KitDevice, device: torch.device, hook: str, *, late: bool, waits: bool = True) -> torch.Tensor:
    """Return the results of several steps of an engine over the late transport, in a side stream."""
    shapes = {"a": (64, 64), "b": (64,), "c": (64, 128)}
    layout = BucketLayout.of_shapes(shapes, device=device)
    engine, side = Engine(reduction_of(hook), LateTransport(kit, late, waits)), SideStream()
    found = []
    for step in range(ORDER_STEPS):
        generator = torch.Generator().manual_seed(step)
        buffer = torch.randn(layout.numel, generator=generator, dtype=torch.float32, device="cpu").to(device)
        with side.on(buffer):
            engine.submit(Bucket(layout, buffer))
            error = engine.finish()
        if kit.cuda:
            torch.cuda.current_stream().wait_stream(_stream_of(side, device))
        if error is not None:
            raise error
        found.append(buffer)
    return torch.stack(found)


def _stream_of(side: SideStream, device: torch.device) -> "torch.cuda.Stream":
    with side.on(torch.empty(0, dtype=torch.float32, device=device)):
        return torch.cuda.current_stream()


def _collective(kit: KitDevice, device: torch.device, hook: str) -> Values:
    found, plain = (_driven(kit, device, hook, late=late) for late in (True, False))
    if not torch.equal(found, plain):
        raise AssertionError(f"a late collective changes the numbers: distance {models.distance(found, plain):.2e}")
    return {"same bits": True}


def _control_collective(kit: KitDevice, device: torch.device) -> Values:
    if not kit.cuda:
        raise Skipped("a CPU has no streams")
    found = _driven(kit, device, "bf16_compress", late=True, waits=False)
    return _must_differ(found, _driven(kit, device, "bf16_compress", late=False))


def _control_side(kit: KitDevice, device: torch.device) -> Values:
    if not kit.cuda:
        raise Skipped("a CPU has no streams")
    stream = torch.cuda.Stream()

    @contextmanager
    def without_waiting(self: SideStream, tensor: torch.Tensor) -> Iterator[None]:
        with torch.cuda.stream(stream):
            yield

    plain = _trained(kit, device, "powersgd(rank=4)", "")
    with mock.patch.object(SideStream, "on", without_waiting):
        found = _trained(kit, device, "powersgd(rank=4)", "gradient")
    return _must_differ(found, plain)


def _must_differ(found: torch.Tensor, plain: torch.Tensor) -> Values:
    if torch.equal(found, plain):
        raise AssertionError("the numbers are the same without the wait: the delay is too short")
    return {"differs": True}


# -- waits of the host

WARM_UP, WAIT_STEPS = 4, 3


def run_waits(rows: Findings, kit: KitDevice) -> None:
    with kit.group() as device:
        rows.row("plain DDP", _plain_waits, kit, device)
        rows.row("control: an .item() is reported", _item_control, kit, device)
        for hook in models.hooks(kit):
            rows.row(hook, _waits_of, kit, device, hook)
        for hook in ("powersgd(rank=4)", "error_feedback(bf16_compress)"):
            rows.row(f"{hook}, optimizer=", _watched, kit, device, hook, False)
            rows.row(f"{hook}, scaler=", _watched, kit, device, hook, True)


@contextmanager
def forbidden(kit: KitDevice) -> Iterator[None]:
    """Make every wait of the host an error."""
    if kit.cuda:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if kit.cuda:
            torch.cuda.set_sync_debug_mode("default")


def _backwards(
    model: nn.Module,
    kit: KitDevice,
    device: torch.device,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    for step in range(WARM_UP + WAIT_STEPS):
        model.zero_grad(set_to_none=False)
        loss = model(models.batch(kit, device, step)).square().mean()
        loss = scaler.scale(loss) if scaler is not None else loss
        with forbidden(kit) if step >= WARM_UP else nullcontext():
            loss.backward()
        if scaler is not None and optimizer is not None:
            scaler.step(optimizer)
            scaler.update()
        elif optimizer is not None:
            optimizer.step()


def _plain_waits(kit: KitDevice, device: torch.device) -> Values:
    _backwards(models.ddp(kit, device), kit, device)
    return {"waits": 0}


def _item_control(kit: KitDevice, device: torch.device) -> Values:
    if not kit.cuda:
        raise Skipped("a CPU has no waits")
    try:
        with forbidden(kit):
            torch.ones(1, dtype=torch.float32, device=device).item()
    except RuntimeError:
        return {"reported": True}
    raise AssertionError("an .item() went unnoticed: this mode detects nothing here")


def _waits_of(kit: KitDevice, device: torch.device, hook: str) -> Values:
    model = models.ddp(kit, device)
    handle = models.attach(model, hook)
    _backwards(model, kit, device)
    handle.check()
    return {"waits": 0}


def _watched(kit: KitDevice, device: torch.device, hook: str, scaled: bool) -> Values:
    """Run with ``optimizer=`` or ``scaler=``, which then decide the outcome of a step."""
    model = models.ddp(kit, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(kit.device, enabled=kit.cuda) if scaled else None
    handle = models.attach(model, hook, optimizer=optimizer, scaler=scaler)
    _backwards(model, kit, device, optimizer, scaler)
    handle.check()
    return {"waits": 0}


# -- CUDA graphs

CAPTURE_WARM_UP = 11  # iterations that DDP needs before a capture


def run_graphs(rows: Findings, kit: KitDevice) -> None:
    with kit.group() as device:
        for hook in ("plain", "allreduce", "bf16_compress", "powersgd(rank=4)"):
            rows.row(hook, _captured, kit, device, hook)


def _captured(kit: KitDevice, device: torch.device, hook: str) -> Values:
    if not kit.cuda:
        raise Skipped("a CPU has no CUDA graphs")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model = models.ddp(kit, device)
        handle = models.attach(model, hook) if hook != "plain" else None
        inputs = models.batch(kit, device, 0)
        for _ in range(CAPTURE_WARM_UP):
            models.backward(model, inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=False)
    with torch.cuda.graph(graph):
        for p in model.parameters():
            assert p.grad is not None
            p.grad.zero_()
        model(inputs).square().mean().backward()
    graph.replay()
    torch.cuda.synchronize()
    replayed = models.gradients(model)
    if not bool(replayed.isfinite().all()) or not bool(replayed.any()):
        raise AssertionError("the replayed gradients are zero or not finite")
    return {"captured": True, "handle": "-" if handle is None else handle.expr}
