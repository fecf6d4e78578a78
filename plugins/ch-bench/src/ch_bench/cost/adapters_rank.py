"""One rank of `adapters`: a block of steps under a framework, with its adapter or with a manual attach."""

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import commhooks
from ch_bench import gpt

WARM = 6  # steps of a block that are not counted: DDP lays its buckets out anew, the framework gets going


class Timed(gpt.GPT):
    """Notes CPU and wall clock, and how many Python functions have been called, whenever a step begins."""

    calls = 0  # counted while `counting` is set

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(64, 64, 192, 4, 6)
        self.began: list[tuple[float, float, int]] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        self.began.append((time.process_time(), time.perf_counter(), Timed.calls))
        return super().forward(x, x)

    def taken(self) -> list[list[float]]:
        """CPU seconds, wall seconds and calls of the steps that count."""
        steps = list(pairwise(self.began[WARM:]))
        return [[after[kind] - before[kind] for before, after in steps] for kind in (0, 1, 2)]


def counting(frame: object, event: str, argument: object) -> None:
    """For `sys.setprofile`."""
    Timed.calls += event == "call"


def data(step: int) -> torch.Tensor:
    """A batch of one line."""
    return torch.randint(64, (1, 64), generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """What is stepped."""
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def loop(
    model: Callable[..., Any], optimizer: Any, steps: int, backward: Callable[..., Any] = torch.Tensor.backward
) -> None:
    """Where the framework leaves it to its user."""
    for step in range(steps):
        optimizer.zero_grad()
        backward(model(data(step)))
        optimizer.step()


def lightning(model: Timed, hook: str, adapter: bool, steps: int) -> None:
    """The Trainer."""
    import lightning as L

    from ch_ddp.frameworks.lightning import CommHookCallback

    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def on_fit_start(self) -> None:
            if not adapter:
                commhooks.attach(self.trainer.strategy.model, hook)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return sgd(self)

    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randint(64, (2 * steps, 64))))
    L.Trainer(
        max_steps=steps, accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", logger=False,
        callbacks=[CommHookCallback(hook)] if adapter else [], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, barebones=False,
    ).fit(Module(), batches)  # fmt: skip


def fabric(model: Timed, hook: str, adapter: bool, steps: int) -> None:
    """Fabric."""
    import lightning as L

    from ch_ddp.frameworks.fabric import CommHookDDPStrategy

    strategy = CommHookDDPStrategy(hook) if adapter else "ddp"
    run = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    run.launch()
    wrapped, optimizer = run.setup(model, sgd(model))
    if not adapter:
        commhooks.attach(wrapped, hook)
    loop(wrapped, optimizer, steps, run.backward)


def accelerate(model: Timed, hook: str, adapter: bool, steps: int) -> None:
    """Accelerate."""
    from accelerate import Accelerator

    from ch_ddp.frameworks.accelerate import CommHookKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[CommHookKwargs(hook)] if adapter else [])
    wrapped, optimizer = accelerator.prepare(model, sgd(model))
    if not adapter:
        commhooks.attach(wrapped, hook)
    loop(wrapped, optimizer, steps, accelerator.backward)


def transformers(model: Timed, hook: str, adapter: bool, steps: int) -> None:
    """The Hugging Face Trainer."""
    from transformers import Trainer, TrainingArguments

    from ch_ddp.frameworks.transformers import CommHookCallback

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(x)}

    class ByHand(Trainer):  # type: ignore[misc]
        def training_step(self, *given: Any, **options: Any) -> Any:
            commhooks.attach(self.model_wrapped, hook)
            setattr(self, "training_step", super().training_step)  # noqa: B010  # later steps as they are
            return self.training_step(*given, **options)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, save_strategy="no", per_device_train_batch_size=1, use_cpu=True,
            report_to=[], disable_tqdm=True, logging_steps=steps, optim="sgd",
        )  # fmt: skip
        lines = [{"x": line, "labels": line} for line in torch.randint(64, (2 * steps, 64))]
        callbacks = [CommHookCallback(hook)] if adapter else []
        (Trainer if adapter else ByHand)(model=Loss(), args=arguments, train_dataset=lines, callbacks=callbacks).train()


def titan(model: Timed, hook: str, adapter: bool, steps: int) -> None:
    """Torchtitan: `fully_shard`, its optimizers, and its checkpointer, which is called after every step and saves none."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
    from torchtitan.config import Configurable
    from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):  # type: ignore[misc]
        checkpoint: Any

    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp_replicate", "fsdp"))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=[model])
    config = Config(checkpoint=CheckpointManager.Config(enable=True, folder="checkpoint", interval=10 * steps))
    if adapter:
        override = f'ch_fsdp.titan.attach={{"hook": "{hook}"}}'
        apply_overrides(OverrideConfig(imports=parse_cli_imports([override])), config)
    kept = _Nothing()
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = config.checkpoint.build(
            dataloader=kept, model_parts=[model], optimizers=optimizers, lr_schedulers=kept,
            states={"train_state": kept}, sd_adapter=None, base_folder=folder,
        )  # fmt: skip
        if not adapter:
            commhooks.attach(model, hook)
        for step in range(steps):
            optimizers.zero_grad()
            model(data(step)).backward()
            optimizers.step()
            checkpointer.save(step + 1)
        checkpointer.close()


class _Nothing:
    """A part of torchtitan's trainer that has no state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to load."""


def ray(model: Timed, hook: str, adapter: bool, steps: int) -> None:
    """Ray Train, in a worker of its."""
    from ray.train.torch import prepare_model

    from ch_ddp.frameworks.ray import prepare_model as ours

    if adapter:
        wrapped, _ = ours(model, hook)
    else:
        wrapped = prepare_model(model)
        commhooks.attach(wrapped, hook)
    loop(wrapped, sgd(model), steps)


def pairs(train: Callable[..., None], hook: str, blocks: int, steps: int) -> Iterator[list[Any]]:
    """Seconds of a block by hand and of one by the adapter, in an order drawn anew, again and again."""
    torch.set_num_threads(1)
    for block in range(blocks):
        found: list[Any] = [None, None]
        for adapter in random.Random(block).sample((False, True), 2):
            model = Timed()
            train(model, hook, adapter, steps + 1)
            found[adapter] = model.taken()
        yield found


def main(name: str, hook: str, blocks: str, steps: str, out: str) -> None:
    """Time pairs of blocks under one framework; rank 0 writes them."""
    train: Callable[..., None] = globals()[name]

    def rank() -> None:
        found = list(pairs(train, hook, int(blocks), int(steps)))
        sys.setprofile(counting)  # in a pair of its own, whose times are not used
        found += pairs(train, hook, 1, int(steps))
        sys.setprofile(None)
        if dist.get_rank() == 0:
            Path(out).write_text(json.dumps(found))

    if name == "ray":
        _in_ray(rank)
        return
    dist.init_process_group("gloo")
    rank()
    dist.barrier()
    dist.destroy_process_group()


def _in_ray(rank: Callable[[], None]) -> None:
    import ray as package
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    package.init(num_cpus=3, include_dashboard=False)
    with tempfile.TemporaryDirectory() as storage:
        TorchTrainer(
            lambda: rank(), scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=storage)
        ).fit()


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main(*sys.argv[1:])
