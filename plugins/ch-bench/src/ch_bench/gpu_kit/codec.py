"""Packing and unpacking on the GPU with torch's operations and with Triton's kernels, which must send the same bytes.

One rank of two holds a bucket of DDP's default size, without a network. ``send`` packs both parts, ``share`` sums this rank's
part of two ranks and packs the sum, and ``deliver`` unpacks everything.
"""

import statistics
from collections.abc import Callable
from typing import Any, Literal

import torch

from ch_bench.gpu_kit.device import KitDevice
from ch_bench.gpu_kit.findings import Findings, Skipped, Values
from ch_quant import Codec, Feedback, TwoStageExchange
from commhooks import HookConfigError, StepContext

NUMBERS = 6_553_600  # 25 MB in fp32
VECTORS = 5  # of a bucket
ROUNDS = 15
CASES = {"quant8": (8, False), "quant4": (4, False), "quant4(error_feedback=True)": (4, True)}
STAGES = ("send", "share", "deliver")
Kernel = Literal["torch", "triton"]


def run(rows: Findings, kit: KitDevice) -> None:
    with kit.group() as device:
        for name, (bits, fed) in CASES.items():
            rows.row(name, _beside, kit, device, bits, fed)


class Side:
    """One exchange of two ranks that send the same messages."""

    def __init__(self, kernel: Kernel, bits: int, fed: bool, numbers: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        each = numbers // VECTORS
        self.vectors = [
            torch.randn(each, generator=generator, dtype=torch.float32, device=device) for _ in range(VECTORS)
        ]
        self.kept = [torch.zeros_like(v) for v in self.vectors]
        ctx = StepContext(world_size=2)
        self.exchange = TwoStageExchange(Codec(bits, 128), [each] * VECTORS, ctx, device, parts=2, kernel=kernel)
        self.feedback = Feedback([torch.ones_like(v) for v in self.vectors], self.kept) if fed else None
        self.steps: dict[str, Callable[[], Any]] = {"send": self.send, "share": self.share, "deliver": self.deliver}
        first = self.send()
        first.output.copy_(first.input)
        second = self.share()
        second.output.view(2, -1).copy_(second.input)
        self.sent = torch.cat([first.input, second.input])
        self.kept_once = [e.clone() for e in self.kept]  # the timed calls change the residuals
        self.vectors = [v.clone() for v in self.vectors]
        self.deliver()

    def send(self) -> Any:
        return self.exchange.send([self.vectors] * 2, [self.feedback] * 2 if self.feedback is not None else None)

    def share(self) -> Any:
        return self.exchange.share(self.feedback)

    def deliver(self) -> None:
        self.exchange.deliver([self.vectors] * 2)


def _beside(kit: KitDevice, device: torch.device, bits: int, fed: bool) -> Values:
    numbers = 10 * 128 if kit.tiny else NUMBERS
    torchs = Side("torch", bits, fed, numbers, device)
    try:
        tritons = Side("triton", bits, fed, numbers, device)
    except HookConfigError as why:
        raise Skipped(str(why)) from None
    if not torch.equal(torchs.sent, tritons.sent):
        raise AssertionError("the kernels send other bytes than torch's operations")
    for one, other in zip([*torchs.vectors, *torchs.kept_once], [*tritons.vectors, *tritons.kept_once], strict=True):
        if not torch.equal(one, other):
            raise AssertionError("the kernels leave other numbers than torch's operations")
    values: dict[str, Any] = {"numbers": numbers}
    sums = {"torch": 0.0, "triton": 0.0}
    for stage in STAGES:
        times = _taken(kit, {"torch": torchs.steps[stage], "triton": tritons.steps[stage]})
        for name, found in times.items():
            values[f"{name} {stage} ms"] = statistics.median(found)
            sums[name] += values[f"{name} {stage} ms"]
    return {
        **values,
        "triton / torch": sums["triton"] / sums["torch"],
        "faster": min(sums, key=lambda name: sums[name]),
    }


def _taken(kit: KitDevice, steps: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(3 if kit.tiny else ROUNDS):
        for name in list(steps) if round_ % 2 else list(reversed(steps)):
            found[name].append(kit.milliseconds(steps[name])[0])
    return found
