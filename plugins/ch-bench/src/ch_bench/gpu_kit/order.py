"""Whether work waits for what it needs: a kernel that does nothing for 10 ms stands before each hand-over.

If whoever takes over did not wait, it would read what was there before, and the numbers would differ from those of a run
without delays. That the delay is long enough is shown by controls: with one wait taken out, the numbers must differ.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

import commhooks
from ch_bench.gpu_kit import models
from ch_bench.gpu_kit.rows import Rows, Skipped, Values
from ch_bench.gpu_kit.setting import Setting
from commhooks import Bucket, BucketLayout, Composite, Reduction, Stages, StepContext
from commhooks.adapters import Engine, ProcessGroupTransport, SideStream

STEPS = 4
PLACES = {
    "gradient": "before the gradient that DDP hands to the hook",
    "encode": "before what the hook hands to the collective",
    "resume": "before what the hook hands back to DDP",
    "everywhere": "all of them",
}


def run(rows: Rows, setting: Setting) -> None:
    with setting.group() as device:
        for hook in models.TELLING if not setting.tiny else models.TELLING[1:3]:
            plain = _trained(setting, device, hook, "")
            for place, meaning in PLACES.items():
                rows.row(f"{hook}: {meaning}", _same, setting, device, hook, place, plain)
            rows.row(f"{hook}: before what a collective hands back", _collective, setting, device, hook)
        rows.row("control: a side stream that does not wait", _control_side, setting, device)
        rows.row("control: a collective that is not waited for", _control_collective, setting, device)


class Delayed(Composite):
    """A reduction that lets its stream stand still before it encodes, or whenever it is resumed."""

    name = "delayed"

    def __init__(self, inner: Reduction, setting: Setting, place: str) -> None:
        super().__init__(inner)
        self._setting, self._place = setting, place

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        if bucket.device.type != "meta" and self._place in ("encode", "everywhere"):
            self._setting.delay()
        for requests in self.inner.start(bucket, ctx):
            yield requests
            if bucket.device.type != "meta" and self._place in ("resume", "everywhere"):
                self._setting.delay()


def _trained(setting: Setting, device: torch.device, hook: str, place: str) -> torch.Tensor:
    """All gradients of some steps, on DDP."""
    model = models.ddp(setting, device)
    reduction = commhooks.create(hook).reduction
    assert reduction is not None
    models.attach(model, Delayed(reduction, setting, place))

    def late(gradient: torch.Tensor) -> None:
        if place in ("gradient", "everywhere"):
            setting.delay()

    def behind(module: object, inputs: object, output: torch.Tensor) -> None:
        output.register_hook(late)

    for layer in model.module:
        layer.register_forward_hook(behind)
    return torch.stack([models.backward(model, models.batch(setting, device, step)) for step in range(STEPS)])


def _same(setting: Setting, device: torch.device, hook: str, place: str, plain: torch.Tensor) -> Values:
    found = _trained(setting, device, hook, place)
    if not torch.equal(found, plain):
        raise AssertionError(f"a delay changes the numbers: relative distance {models.distance(found, plain):.2e}")
    return {"same bits": True}


class LateTransport(ProcessGroupTransport):
    """Collectives that end late, on a stream of their own, and change what they are given, so that it shows who has not
    waited: with one rank the others leave it as it is.
    """

    def __init__(self, setting: Setting, late: bool, waits: bool = True) -> None:
        super().__init__()
        self._setting, self._late, self._waits = setting, late, waits
        self._stream = torch.cuda.Stream() if setting.cuda else None

    def all_reduce(self, tensor: torch.Tensor, op: str) -> "_Work":
        return self._carry_out(tensor, tensor)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> "_Work":
        return self._carry_out(output, input)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> "_Work":
        return self._carry_out(output, input)

    def _carry_out(self, output: torch.Tensor, input: torch.Tensor) -> "_Work":
        with self._beside():
            if self._late:
                self._setting.delay()
            if output.is_floating_point() and output.numel() > 2:  # not the status: it would tell of failures
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


def _driven(setting: Setting, device: torch.device, hook: str, *, late: bool, waits: bool = True) -> torch.Tensor:
    """What an engine makes of some steps over the transport above, in a side stream."""
    shapes = {"a": (64, 64), "b": (64,), "c": (64, 128)}
    reduction = commhooks.create(hook).reduction
    assert reduction is not None
    layout = BucketLayout.of_shapes(shapes, device=device)
    engine, side = Engine(reduction, LateTransport(setting, late, waits)), SideStream()
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        buffer = torch.randn(layout.numel, generator=generator).to(device)
        with side.on(buffer):
            engine.submit(Bucket(layout, buffer))
            error = engine.finish()
        if setting.cuda:
            torch.cuda.current_stream().wait_stream(_stream_of(side, device))
        if error is not None:
            raise error
        found.append(buffer)
    return torch.stack(found)


def _stream_of(side: SideStream, device: torch.device) -> "torch.cuda.Stream":
    with side.on(torch.empty(0, device=device)):
        return torch.cuda.current_stream()


def _collective(setting: Setting, device: torch.device, hook: str) -> Values:
    found, plain = (_driven(setting, device, hook, late=late) for late in (True, False))
    if not torch.equal(found, plain):
        raise AssertionError(f"a late collective changes the numbers: distance {models.distance(found, plain):.2e}")
    return {"same bits": True}


def _control_collective(setting: Setting, device: torch.device) -> Values:
    if not setting.cuda:
        raise Skipped("a CPU has no streams")
    found = _driven(setting, device, "bf16_compress", late=True, waits=False)
    return _must_differ(found, _driven(setting, device, "bf16_compress", late=False))


def _control_side(setting: Setting, device: torch.device) -> Values:
    if not setting.cuda:
        raise Skipped("a CPU has no streams")
    stream = torch.cuda.Stream()

    @contextmanager
    def without_waiting(self: SideStream, tensor: torch.Tensor) -> Iterator[None]:
        with torch.cuda.stream(stream):
            yield

    plain = _trained(setting, device, "powersgd(rank=4)", "")
    with mock.patch.object(SideStream, "on", without_waiting):
        found = _trained(setting, device, "powersgd(rank=4)", "gradient")
    return _must_differ(found, plain)


def _must_differ(found: torch.Tensor, plain: torch.Tensor) -> Values:
    if torch.equal(found, plain):
        raise AssertionError("the numbers are the same without the wait: the delay is too short to show anything")
    return {"differs": True}
