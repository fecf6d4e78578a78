"""Training runs of the convergence study: which hooks on which tasks, and one run on simulated ranks."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import commhooks
from ch_testing import SimulatedRanks
from programs.convergence.tasks import SETTINGS, TASKS, Setting, Task, measured_at

BASELINE = "bf16_compress"
PANELS = (("cnn", "iid"), ("cnn", "sorted"), ("gpt", "iid"), ("gpt_cosine", "iid"))  # task, shards
LEFT_OUT = {
    "noop": "sends nothing: every rank would train a different model",
    "post_local_sgd": "averages parameters, not gradients, so the ranks' models differ in between. ch-ddp's tests show that it "
    "gives exactly the parameters of a loop written by hand",
}
POWERSGD = "powersgd(rank=4)"
VARIANTS = {  # of a hook, instead of its example
    "bf16_compress": (BASELINE, "bf16_compress(accumulate='fp32')"),
    "powersgd": ("powersgd(rank=1)", "powersgd(rank=2)", POWERSGD),
    "quant": ("quant(bits=4, rotation='hadamard')",),
    "quant8": ("quant8", "quant8(error_feedback=True)"),
    "quant4": ("quant4", "quant4(error_feedback=True)", "quant4(error_feedback=True, residual='int8')"),
    "topk": ("topk", "topk(bits=2)"),
    "randomk": ("randomk",),
    "bf16_wrapper": (f"bf16_wrapper({POWERSGD})",),
    "fp16_wrapper": (f"fp16_wrapper({POWERSGD})",),
    "warmup": (f"warmup({POWERSGD}, steps=20)",),
}
CURVES = ("step", "train", "test", "wire")
Record = dict[str, Any]


def expressions() -> list[str]:
    """Return every installed gradient reduction and wrapper, the baseline first.

    Hooks without an entry in `VARIANTS` are compared by their example.

    Raises:
        KeyError: a foreign hook, which cannot be simulated, has no entry in `LEFT_OUT`.
    """
    found = []
    for kind in ("reduction", "wrapper", "ddp"):
        for spec in commhooks.list_hooks(kind=kind):
            if spec.name in LEFT_OUT:
                continue
            if kind == "ddp":
                raise KeyError(f"{spec.id} is a foreign hook and cannot be simulated: give a reason in LEFT_OUT")
            found += [commhooks.create(expr).expr for expr in VARIANTS.get(spec.name, (spec.example,))]
    return list(dict.fromkeys([BASELINE, *found]))


@dataclass(frozen=True)
class TrainingRun:
    """One training run.

    Attributes:
        setting: task and its hyperparameters.
        kind: of shards, ``"iid"`` or ``"sorted"``.
        seed: of weights and data.
        expr: of the hook.
    """

    setting: Setting
    kind: str
    seed: int
    expr: str

    @property
    def key(self) -> str:
        """Key of the finished run."""
        return f"{self.setting.task}/{self.kind}/{self.seed}/{self.expr}"

    def run(self) -> Record:
        """Train and return the record."""
        torch.set_num_threads(1)
        return train(self.setting, self.expr, self.kind, self.seed)


def runs(tasks: list[str], exprs: list[str] | None, seeds: int, steps: int | None) -> list[TrainingRun]:
    """Return all runs, seed by seed, so that an interrupted study has complete tables of few seeds.

    Args:
        tasks: names of `SETTINGS`.
        exprs: expressions; ``None`` means all.
        seeds: number of seeds.
        steps: of every run; ``None`` means the task's own number.
    """

    def every() -> Iterator[TrainingRun]:
        for seed in range(seeds):
            for task, kind in PANELS:
                for expr in expressions() if exprs is None else exprs:
                    if task in tasks:
                        yield TrainingRun(setting(task), kind, seed, expr)

    def setting(task: str) -> Setting:
        return replace(SETTINGS[task], steps=steps or SETTINGS[task].steps)

    return list(every())


# -- simulated ranks


def train(setting: Setting, expr: str, kind: str, seed: int) -> Record:
    """Train one model with the gradients of several simulated ranks.

    All ranks of data parallelism have the same weights, so one model is enough. It differentiates the loss of each rank's
    batch in turn. The gradients pass through one engine for each rank, in several buckets, as in DDP. Every step checks that
    all ranks receive the same bits.

    Returns:
        ``step``, ``train``, ``test``, ``wire``: lists with one entry for each measurement. ``wire`` is the number of
        bytes that one rank has sent.
        ``payload``, ``compressed_steps`` and ``seconds`` are of the whole run.
    """
    begun = time.perf_counter()
    task: Task = TASKS[setting.task](setting, seed, kind)
    params = dict(task.model.named_parameters())
    ranks = SimulatedRanks(lambda: commhooks.create(expr), setting.ranks, params, buckets=setting.buckets)
    optimizer = task.optimizer()
    rows: list[tuple[float, ...]] = []
    wanted = list(measured_at(setting.steps))
    for step in range(setting.steps + 1):
        if step in wanted:
            ranks.resolve_step()
            rows.append((step, *task.measure(), ranks.handles[0].stats()["wire_bytes"]))
        if step < setting.steps:
            _step(task, params, ranks, step)
            for group in optimizer.param_groups:
                group["lr"] = task.rate(step)
            optimizer.step()
    figures = ranks.handles[0].stats()
    return {
        **_curves(rows),
        "payload": figures["payload_bytes"],
        "compressed_steps": figures["compressed_steps"],
        "seconds": time.perf_counter() - begun,
    }


def _step(task: Task, params: dict[str, torch.nn.Parameter], ranks: SimulatedRanks, step: int) -> None:
    """Set the reduced gradient of one step on the parameters."""
    every = []
    for rank in range(ranks.world_size):
        found = torch.autograd.grad(task.loss(task.model, rank, step), list(params.values()))
        every.append(dict(zip(params, found, strict=True)))
    result = ranks.step(every)
    for error in result.errors:
        if error is not None:
            raise error
    first, *others = result.gradients
    for name, parameter in params.items():
        if not all(torch.equal(first[name], other[name]) for other in others):
            raise RuntimeError(f"{ranks.handles[0].expr}: the ranks have different gradients of {name}")
        parameter.grad = first[name]


def _curves(rows: list[tuple[float, ...]]) -> dict[str, list[float]]:
    """Return one list for each of `CURVES`, with six digits."""
    columns = zip(CURVES, zip(*rows, strict=True), strict=True)
    return {name: [float(f"{v:.6g}") for v in values] for name, values in columns}
