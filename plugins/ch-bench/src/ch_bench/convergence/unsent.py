"""What error feedback makes of the error of an exchange over many steps, with the residual in fp32 and in 8 bits.

Several hooks are given the gradients of one exact run, which none of them changes:

* *noise*: ``vNMSE`` of a step, the mean over all steps;
* *descent*: ``<u, g> / <v, g>``, with g the exact mean gradient, u the update that Adam (0.9, 0.999) makes of the results and v
  the one that it makes of g; the mean over all steps. Noise makes Adam's second moment larger, and its updates shorter;
* *unsent* after T steps: ``|sum of results - sum of g| / |sum of g|``, the part of all gradients that the model lacks;
* *forgotten*: the same with the mean residual added to the results: what no later step will send either. In fp32 that is
  rounding alone; a residual in 8 bits is rounded anew in every step.

*Plain* feedback sends all of the residual in the next step, where the hooks send a quarter of it (:mod:`ch_quant.feedback`).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from rich.table import Table

import commhooks
from ch_quant import Feedback, PackedFeedback, Quantized
from commhooks import Bucket, StepContext
from commhooks.testing import SimulatedRanks

Gradients = dict[str, torch.Tensor]


class Plain(Quantized):
    """Sends all of the residual in the next step."""

    def _feedback(self, bucket: Bucket, ctx: StepContext) -> Feedback | PackedFeedback:
        found = super()._feedback(bucket, ctx)
        found.released = 1.0
        return found


HOOKS: dict[str, tuple[Callable[..., Any], str]] = {  # label -> how a handle is made, colour and dash
    "4 bits": (partial(Quantized, 4), "#999999 -"),
    "4 bits, plain feedback": (partial(Plain, 4, error_feedback=True), "#56b4e9 -"),
    "4 bits, feedback": (partial(Quantized, 4, error_feedback=True), "#0072b2 -"),
    "4 bits, feedback int8": (partial(Quantized, 4, error_feedback=True, residual="int8"), "#0072b2 --"),
    "2 bits": (partial(Quantized, 2), "#555555 -"),
    "2 bits, plain feedback": (partial(Plain, 2, error_feedback=True), "#e69f00 -"),
    "2 bits, feedback": (partial(Quantized, 2, error_feedback=True), "#d55e00 -"),
    "2 bits, feedback int8": (partial(Quantized, 2, error_feedback=True, residual="int8"), "#d55e00 --"),
}
AT = (10, 50, 200)  # steps of the table


class Point(NamedTuple):
    """The figures of the module's docstring, up to one step."""

    noise: float
    descent: float
    unsent: float
    forgotten: float


Curves = dict[str, dict[str, list[Point]]]  # data, hook -> a point for each step


class Adam:
    """Its update of a gradient, the rate left out."""

    def __init__(self) -> None:
        self.first: Gradients = {}
        self.second: Gradients = {}
        self.steps = 0

    def __call__(self, gradient: Gradients) -> Gradients:
        self.steps += 1
        made = {}
        for name, g in gradient.items():
            m = self.first.setdefault(name, torch.zeros_like(g)).lerp_(g, 0.1)
            v = self.second.setdefault(name, torch.zeros_like(g)).lerp_(g * g, 0.001)
            made[name] = (m / (1.0 - 0.9**self.steps)) / ((v / (1.0 - 0.999**self.steps)).sqrt() + 1e-8)
        return made


class _Run:
    """One hook over the gradients, and what has come of them."""

    def __init__(self, make: Callable[..., Any], world: int, like: Gradients) -> None:
        self.ranks = SimulatedRanks(lambda: commhooks.create(make()), world, like, buckets=1)
        self.total = {name: torch.zeros(g.shape, dtype=torch.float64) for name, g in like.items()}
        self.adam = Adam()
        self.sums = [0.0, 0.0]

    def step(self, every: Sequence[Gradients], mean: Gradients, truth: Gradients, exact: Gradients) -> Point:
        done = self.ranks.step(list(every))
        for failure in done.errors:
            if failure is not None:
                raise failure
        self.ranks.settle()
        got = {name: done.gradients[0][name].double() for name in mean}
        update = self.adam(got)
        self.sums[0] += _norm({n: got[n] - g for n, g in mean.items()}) ** 2 / _norm(mean) ** 2
        self.sums[1] += _product(update, mean) / _product(exact, mean)
        for name, total in self.total.items():
            total += got[name]
        residual = {name: torch.zeros_like(t) for name, t in self.total.items()}
        for engine in self.ranks.engines:
            for name, field, tensor in engine.state.entries():
                if field == "residual":
                    residual[name] += tensor.view(residual[name].shape) / self.ranks.world_size
        size = _norm(truth)
        lacking = {name: total - truth[name] for name, total in self.total.items()}
        forgotten = _norm({n: t + residual[n] for n, t in lacking.items()}) / size
        noise, descent = (total / self.adam.steps for total in self.sums)
        return Point(noise, descent, _norm(lacking) / size, forgotten)


def measure(run: Iterable[list[Gradients]], world: int) -> dict[str, list[Point]]:
    """Hook -> a point for each step of a run's gradients, which are a dict for each rank."""
    runs: dict[str, _Run] = {}
    truth: Gradients = {}
    exact = Adam()
    found: dict[str, list[Point]] = {label: [] for label in HOOKS}
    for every in run:
        if not runs:
            runs = {label: _Run(make, world, every[0]) for label, (make, _) in HOOKS.items()}
            truth = {name: torch.zeros(g.shape, dtype=torch.float64) for name, g in every[0].items()}
        mean = {name: torch.stack([one[name].double() for one in every]).mean(0) for name in truth}
        for name, total in truth.items():
            total += mean[name]
        update = exact(mean)
        for label, one in runs.items():
            found[label].append(one.step(every, mean, truth, update))
    return found


def _norm(tensors: Gradients) -> float:
    return _product(tensors, tensors) ** 0.5


def _product(one: Gradients, other: Gradients) -> float:
    return sum(float((t * other[name]).sum()) for name, t in one.items())


def table(curves: Curves) -> Table:
    """Noise and descent of all steps, what is unsent after `AT` steps, and forgotten after the last of them."""
    made = Table(
        title="Gradients of an exact run: noise and descent of a step; of their sum, what is unsent after so many"
    )
    made.add_column("")
    for name in curves:
        for column in (f"{name}: noise", "descent", *(f"after {step}" for step in AT), "forgotten"):
            made.add_column(column, justify="right")
    for label in HOOKS:
        cells = []
        for found in curves.values():
            last = found[label][AT[-1] - 1]
            cells += [f"{last.noise:.2e}", f"{last.descent:.3f}"]
            cells += [f"{found[label][step - 1].unsent:.1e}" for step in AT]
            cells += [f"{last.forgotten:.0e}" if "feedback" in label else ""]
        made.add_row(label, *cells)
    return made


def draw(curves: Curves, axes: Axes) -> None:
    """Unsent against steps, of the first data; dotted what is forgotten with 8 bits."""
    name = next(iter(curves))
    for label, (_, style) in HOOKS.items():
        points, (colour, dash) = curves[name][label], style.split()
        steps = range(1, 1 + len(points))
        axes.plot(steps, [point.unsent for point in points], color=colour, linestyle=dash, label=label)
        if "int8" in label:
            axes.plot(steps, [point.forgotten for point in points], color=colour, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="steps")
    axes.set_ylabel("of the sum of all gradients: unsent (dotted: forgotten)")
    axes.set_title(f"Error that adds up over steps, {name}", loc="left", fontweight="bold")
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_ylim(bottom=3e-5)  # room for the legend
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="lower left")
