"""The cells of the convergence study: which hooks it compares, on what, and the file that lets it resume."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import commhooks
from ch_bench.convergence import study_peer, study_ranks
from ch_bench.convergence.study_tasks import SETTINGS, Setting

BASELINE = "bf16_compress"
PANELS = (("cnn", "iid"), ("cnn", "sorted"), ("gpt", "iid"), ("gpt_cosine", "iid"))  # task, shards
LEFT_OUT = {
    "noop": "sends nothing: every rank would train a model of its own",
    "post_local_sgd": "averages parameters, not gradients: the ranks' models differ in between. That it gives exactly the "
    "parameters of the loop written by hand, at every step, is what ch-ddp's tests show",
}
POWERSGD = "powersgd(rank=4)"
VARIANTS = {  # of a hook, in place of its example
    "bf16_compress": (BASELINE, "bf16_compress(accumulate='fp32')"),
    "powersgd": ("powersgd(rank=1)", "powersgd(rank=2)", POWERSGD),
    "quant": ("quant(bits=3)", "quant4(rotation='hadamard')"),
    "quant8": ("quant8", "quant8(error_feedback=True)"),
    "quant4": ("quant4", "quant4(error_feedback=True)", "quant4(error_feedback=True, residual='int8')"),
    "topk": ("topk", "topk(bits=2)"),
    "randomk": ("randomk",),
    "bf16_wrapper": (f"bf16_wrapper({POWERSGD})",),
    "fp16_wrapper": (f"fp16_wrapper({POWERSGD})",),
    "warmup": (f"warmup({POWERSGD}, steps=20)",),
}
RANK, START = 2, 10  # of the residual study, as in the run that it repeats
_LOCAL = f"powersgd(rank={RANK}, start_iter={START})"
_AVERAGED = f"powersgd(rank={RANK}, start_iter={START}, residual='averaged')"
RESIDUAL_SEEDS = 2  # long runs, for an effect of twenty times: more seeds would not fit into 25 minutes on two cores
TORCH = "torch PowerSGD, bf16"
RESIDUAL = {  # what the tables call it -> expression
    "all-reduce": "allreduce",
    "local residual, bf16 wire": f"bf16_wrapper({_LOCAL})",
    "averaged residual, fp32 wire": _AVERAGED,
    "averaged residual, bf16 wire": f"bf16_wrapper({_AVERAGED})",
    "PyTorch's own, bf16 wrapper": TORCH,
}


def expressions() -> list[str]:
    """Every gradient reduction that is installed, and every wrapper, by discovery; the baseline first.

    A hook that this file does not know is compared by its example. A foreign hook has collectives of its own and is in
    `LEFT_OUT`, or an error.

    Raises:
        KeyError: a foreign hook was found, and no reason to leave it out is given.
    """
    found = []
    for kind in ("reduction", "wrapper", "ddp"):
        for spec in commhooks.list_hooks(kind=kind):
            if spec.name in LEFT_OUT:
                continue
            if kind == "ddp":
                raise KeyError(f"{spec.id} is a foreign hook and cannot be simulated: say why in LEFT_OUT")
            found += [commhooks.create(expr).expr for expr in VARIANTS.get(spec.name, (spec.example,))]
    return list(dict.fromkeys([BASELINE, *found]))


@dataclass(frozen=True)
class Cell:
    """One training run."""

    setting: Setting
    kind: str  # of shards
    seed: int
    expr: str

    @property
    def key(self) -> str:
        return f"{self.setting.task}/{self.kind}/{self.seed}/{self.expr}"

    @property
    def alone(self) -> bool:
        """Whether it starts processes of its own."""
        return self.expr == TORCH

    def run(self) -> dict[str, Any]:
        """Train, and return the record."""
        torch.set_num_threads(1)
        if self.alone:
            return study_peer.train(self.setting, RANK, START, self.kind, self.seed)
        return study_ranks.train(self.setting, self.expr, self.kind, self.seed)


def cells(tasks: list[str], exprs: list[str] | None, seeds: int, steps: int | None) -> list[Cell]:
    """All cells that were asked for, seed by seed, so that a run that was stopped has whole tables of few seeds.

    ``exprs`` are any expressions; the ``mlp`` runs those of them that :data:`RESIDUAL` has.
    """

    def every() -> Iterator[Cell]:
        for seed in range(seeds):
            for task, kind in PANELS:
                for expr in expressions() if exprs is None else exprs:
                    if task in tasks and expr != TORCH:
                        yield Cell(setting(task), kind, seed, expr)
            for expr in RESIDUAL.values():
                if "mlp" in tasks and seed < RESIDUAL_SEEDS and (exprs is None or expr in exprs):
                    yield Cell(setting("mlp"), "sorted", seed, expr)

    def setting(task: str) -> Setting:
        return replace(SETTINGS[task], steps=steps or SETTINGS[task].steps)

    return list(every())


class Cache:
    """Finished cells in a JSON file, written anew after each, so that a killed run loses no finished one.

    Args:
        path: the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """The record of a cell, unless it was made with another setting."""
        found = self.data.get(cell.key)
        record: dict[str, Any] | None = (
            found["record"] if found and found["setting"] == cell.setting.as_dict() else None
        )
        return record

    def put(self, cell: Cell, record: dict[str, Any]) -> None:
        self.data[cell.key] = {"setting": cell.setting.as_dict(), "record": record}
        self._write()

    def extract(self, path: Path, wanted: list[Cell]) -> None:
        """Leave the records of these cells alone, in their order, in another file."""
        other = Cache(path)
        other.data = {cell.key: self.data[cell.key] for cell in wanted}
        other._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".new")
        beside.write_text(
            "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in self.data.items()) + "\n}\n"
        )
        beside.replace(self.path)
