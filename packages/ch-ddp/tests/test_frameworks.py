"""Adapters of trainers. The framework's own save and resume restore the hook, and one process trains without it.

`tests/frameworks/matrix.py` does the same with whole scripts, SIGKILL and other numbers of ranks.
"""

import importlib.util
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_ddp import TrainerHook
from ch_ddp.frameworks.transformers import refuse_second_weights
from ch_testing import spawn
from commhooks import HookNotSupportedError, StateError
from commhooks.checkpoint.one_file import gather, load_gathered

from .test_registering import as_torchrun

pytestmark = [pytest.mark.timeout(240), pytest.mark.gloo]

EXPR = "error_feedback(bf16_compress)"  # each rank has a separate residual


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 4)
    )  # two buckets


def batches(rank: int, first: int, last: int) -> Iterator[torch.Tensor]:
    for step in range(first, last):
        yield torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def residuals(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: row["residual"] for name, row in state["entries"].items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# -- shared parts


def trained(rank: int, steps: int) -> tuple[nn.Module, TrainerHook]:
    model, hook = DistributedDataParallel(net()), TrainerHook(EXPR, {})
    hook.attach(model)
    for x in batches(rank, 0, steps):
        model(x).pow(2).mean().backward()
    return model, hook


def body_save(rank: int, world: int, folder: str) -> dict[str, torch.Tensor]:
    _, hook = trained(rank, 3)
    assert hook.handle is not None
    own = hook.handle.state_dict()
    everything = hook.gather()
    assert bool(everything) == (rank == 0)
    if rank == 0:
        torch.save(everything, Path(folder, "one_file"))
        assert same(residuals(everything["ranks"][0]), residuals(own))
    hook.save(Path(folder, "folder"))
    return residuals(own)


def body_load(rank: int, world: int, folder: str, wanted: list[dict[str, torch.Tensor]]) -> None:
    saved = torch.load(Path(folder, "one_file"), weights_only=True)
    for way in ("one_file", "folder"):
        _, hook = trained(rank, 1)
        if way == "folder":
            hook.load(Path(folder, way))
        else:
            hook.load_gathered(saved)
        assert hook.handle is not None
        state = hook.handle.state_dict()
        assert state["step"] == 3
        mean = {name: torch.stack([one[name].double() for one in wanted]).mean(0).float() for name in wanted[0]}
        assert same(residuals(state), wanted[rank] if world == len(wanted) else mean)
    if world != len(wanted):
        return
    _, hook = trained(rank, 1)
    assert hook.handle is not None
    before = residuals(hook.handle.state_dict())
    damaged = {"ranks": [{**one, "step": -1} if rank == 1 else one for one in saved["ranks"]]}
    with pytest.raises((StateError, commhooks.RankMismatchError), match="step is an integer"):  # on both ranks
        load_gathered(hook.handle, damaged)
    with pytest.raises(StateError, match=r"expected a dict with 'ranks'"):
        load_gathered(hook.handle, {"ranks": []})
    assert same(residuals(hook.handle.state_dict()), before)


@pytest.mark.full
def test_every_rank_gets_its_own_back_and_other_numbers_of_ranks_the_mean(tmp_path: Path) -> None:
    saved = spawn(body_save, 2, str(tmp_path))
    assert not same(*saved)
    spawn(body_load, 2, str(tmp_path), saved)
    with pytest.raises(AssertionError, match="the state is of rank 0 of 2, this is rank 0 of 3"):
        spawn(body_refuse, 3, str(tmp_path))
    spawn(body_load, 3, str(tmp_path), saved)


def body_refuse(rank: int, world: int, folder: str) -> None:
    _, hook = trained(rank, 1)
    assert hook.handle is not None
    load_gathered(hook.handle, torch.load(Path(folder, "one_file"), weights_only=True))


def body_foreign(rank: int, world: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    stateless = TrainerHook(allreduce_hook, {})
    stateless.attach(DistributedDataParallel(net()))
    assert stateless.gather() == {}  # nothing to save is no error
    keeping = TrainerHook(allreduce_hook, {"state": dist.group.WORLD})
    keeping.attach(DistributedDataParallel(net()))
    with pytest.raises(StateError, match="keeps its state itself"):
        keeping.gather()
    assert keeping.handle is not None
    with pytest.raises(StateError, match="keeps its state itself"):
        gather(keeping.handle)


def test_saving_a_hook_that_keeps_its_state_itself_is_refused() -> None:
    spawn(body_foreign, 2)


def test_one_process_trains_without_a_hook(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    hook = TrainerHook(EXPR, {})
    with caplog.at_level(logging.WARNING, "commhooks"):
        for _ in range(2):
            hook.attach(net())
        hook.save(tmp_path / "nothing")
        hook.load(tmp_path / "nothing")
    assert hook.handle is None
    assert [record.message for record in caplog.records] == [
        f"{EXPR} is not attached: this process trains alone, without peers"
    ]
    assert not (tmp_path / "nothing").exists()
    hook.load_gathered({"ranks": [{}]})
    assert "is not loaded" in caplog.records[-1].message


def body_alone(rank: int, world: int) -> None:
    hook = TrainerHook(EXPR, {"single_process": True})
    model = DistributedDataParallel(net())
    hook.attach(model)
    model(next(batches(0, 0, 1))).sum().backward()
    assert hook.handle is not None
    hook.handle.assert_active()


def test_one_process_with_the_hook_when_asked() -> None:
    spawn(body_alone, 1)


def test_a_trainer_that_weighs_the_ranks_itself_gets_no_weighted_hook() -> None:
    class Arguments:  # of transformers, whose Trainer gives them to its callbacks
        average_tokens_across_devices = True

    with pytest.raises(HookNotSupportedError, match="weighed twice"):
        refuse_second_weights({"weighted": True}, Arguments())
    refuse_second_weights({}, Arguments())
    Arguments.average_tokens_across_devices = False
    refuse_second_weights({"weighted": True}, Arguments())


@pytest.mark.full
@pytest.mark.parametrize(
    ("module", "name", "install"),
    [
        ("lightning", "CommHookCallback", "lightning"),
        ("fabric", "CommHookDDPStrategy", "lightning"),
        ("accelerate", "CommHookKwargs", "accelerate"),
        ("transformers", "CommHookCallback", "transformers"),
        ("ray", "prepare_model", "ray"),
    ],
)
def test_a_missing_framework_is_named_when_its_adapter_is_made(module: str, name: str, install: str) -> None:
    code = f"""
import importlib.abc, sys

class Hiding(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        hidden = {{"lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers", "ray"}}
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hiding())
import ch_ddp
from ch_ddp.frameworks.{module} import {name} as adapter
try:
    adapter(*["noop"] * {2 if name == "prepare_model" else 1})
except ImportError as error:
    assert "pip install" in str(error) and {install!r} in str(error), error
else:
    raise SystemExit("made without its framework")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


# -- each framework: ten steps at once, or five steps, a save, and five more in a new trainer


def body_lightning(rank: int, world: int, folder: str, package: str) -> None:
    as_torchrun(rank, world)
    pl = importlib.import_module(package)
    from ch_ddp.frameworks.lightning import CommHookCallback

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).pow(2).mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    rows = torch.randn(5 * 4 * world, 16, generator=torch.Generator().manual_seed(1))

    def fit(epochs: int, checkpoint: str | None = None) -> tuple[Any, Any, nn.Module]:
        callback, module = CommHookCallback(EXPR), Module()
        trainer = pl.Trainer(
            accelerator="cpu", devices=world, max_epochs=epochs, callbacks=[callback], default_root_dir=folder,
            strategy="ddp", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4), ckpt_path=checkpoint)
        return trainer, callback.handle, module

    _, whole, straight = fit(2)
    assert whole.stats()["compressed_steps"] == whole.stats()["steps"] == 10
    trainer, _, _ = fit(1)
    trainer.save_checkpoint(f"{folder}/one.ckpt")
    _, resumed, module = fit(2, f"{folder}/one.ckpt")
    assert resumed.stats()["steps"] == 5
    assert resumed.state_dict()["step"] == 10
    assert torch.equal(flat(module), flat(straight))
    assert same(residuals(resumed.state_dict()), residuals(whole.state_dict()))


@pytest.mark.full
@needs("lightning")
def test_lightning_resumes(tmp_path: Path) -> None:
    spawn(body_lightning, 2, str(tmp_path), "lightning.pytorch", timeout=200)


@pytest.mark.full
@needs("pytorch_lightning")
def test_pytorch_lightning_resumes(tmp_path: Path) -> None:
    spawn(body_lightning, 2, str(tmp_path), "pytorch_lightning", timeout=200)


def loop(rank: int, first: int, last: int, model: nn.Module, optimizer: torch.optim.Optimizer, backward: Any) -> None:
    for x in batches(rank, first, last):
        optimizer.zero_grad()
        backward(model(x).pow(2).mean())
        optimizer.step()


def body_fabric(rank: int, world: int, folder: str) -> None:
    as_torchrun(rank, world)
    from lightning.fabric import Fabric

    from ch_ddp.frameworks.fabric import CommHookDDPStrategy

    def made() -> tuple[Any, Any, dict[str, Any]]:
        strategy = CommHookDDPStrategy(EXPR)
        fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
        fabric.launch()
        plain = net()
        model, optimizer = fabric.setup(plain, torch.optim.Adam(plain.parameters()))
        return fabric, strategy.hooks[0].handle, {"model": model, "optimizer": optimizer, "step": 0}

    fabric, whole, state = made()
    loop(rank, 0, 5, state["model"], state["optimizer"], fabric.backward)
    fabric.save(f"{folder}/one.ckpt", state)
    loop(rank, 5, 10, state["model"], state["optimizer"], fabric.backward)
    assert whole.stats()["compressed_steps"] == 10
    fabric, resumed, again = made()
    assert fabric.load(f"{folder}/one.ckpt", again) == {}
    loop(rank, 5, 10, again["model"], again["optimizer"], fabric.backward)
    assert torch.equal(flat(again["model"]), flat(state["model"]))
    assert same(residuals(resumed.state_dict()), residuals(whole.state_dict()))


@pytest.mark.full
@needs("lightning")
def test_fabric_resumes(tmp_path: Path) -> None:
    spawn(body_fabric, 2, str(tmp_path), timeout=200)


def body_accelerate(rank: int, world: int, folder: str) -> list[str]:
    as_torchrun(rank, world)
    from accelerate import Accelerator

    from ch_ddp.frameworks.accelerate import CommHookKwargs

    told: list[str] = []
    listening = logging.Handler()
    listening.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commhooks").addHandler(listening)

    def made() -> tuple[Any, Any, nn.Module, Any]:
        handler = CommHookKwargs(EXPR, bucket_cap_mb=1)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        plain = net()
        model, optimizer = accelerator.prepare(plain, torch.optim.Adam(plain.parameters()))
        assert model.bucket_bytes_cap == 1 << 20
        return accelerator, handler.hooks[0].handle, model, optimizer

    accelerator, whole, model, optimizer = made()
    loop(rank, 0, 5, model, optimizer, accelerator.backward)
    accelerator.save_state(f"{folder}/one")
    loop(rank, 5, 10, model, optimizer, accelerator.backward)
    assert whole.stats()["compressed_steps"] == 10
    accelerator, resumed, again, optimizer = made()
    accelerator.load_state(f"{folder}/one")
    loop(rank, 5, 10, again, optimizer, accelerator.backward)
    assert torch.equal(flat(again), flat(model))
    assert same(residuals(resumed.state_dict()), residuals(whole.state_dict()))
    assert not told or all("starts afresh" not in line for line in told)
    if rank == 0:
        (Path(folder) / "one" / "commhook" / ".metadata").unlink()
    dist.barrier()
    accelerator.load_state(f"{folder}/one")
    with pytest.raises(commhooks.AttachError, match="registered by"):
        CommHookKwargs(EXPR).register_comm_hook(model)
    return told


@needs("accelerate")
def test_accelerate_resumes_or_raises(tmp_path: Path) -> None:
    for told in spawn(body_accelerate, 2, str(tmp_path), timeout=200):
        assert f"{EXPR}: its step and residuals start afresh" in told[-1]


def body_transformers(rank: int, world: int, folder: str) -> None:
    as_torchrun(rank, world)
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    from ch_ddp.frameworks.transformers import CommHookCallback

    tokens = torch.randint(256, (80, 16), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]

    def train(where: str, resume: str | None = None, **options: Any) -> tuple[Any, nn.Module]:
        set_seed(1)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=16, n_embd=128, n_layer=2, n_head=2))
        arguments = TrainingArguments(
            output_dir=f"{folder}/{where}", max_steps=10, save_steps=5, per_device_train_batch_size=4, use_cpu=True,
            report_to=[], disable_tqdm=True, logging_steps=2,
        )  # fmt: skip
        callback = CommHookCallback(EXPR, **options)
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback])
        trainer.train(resume_from_checkpoint=resume)
        return callback.handle, model

    whole, straight = train("one")
    assert whole.stats()["compressed_steps"] == whole.stats()["steps"] == 10
    resumed, model = train("one", f"{folder}/one/checkpoint-5")
    assert resumed.stats()["steps"] == 5
    assert torch.equal(flat(model), flat(straight))
    assert same(residuals(resumed.state_dict()), residuals(whole.state_dict()))
    with pytest.raises(StateError, match=r"CommHookCallback\(\.\.\., resume_from_checkpoint=folder\)"):
        train("two", f"{folder}/one/checkpoint-5")
    moved, model = train("two", f"{folder}/one/checkpoint-5", resume_from_checkpoint=f"{folder}/one/checkpoint-5")
    assert torch.equal(flat(model), flat(straight))
    assert moved.state_dict()["step"] == 10


@pytest.mark.full
@needs("transformers")
def test_the_hugging_face_trainer_resumes(tmp_path: Path) -> None:
    spawn(body_transformers, 2, str(tmp_path), timeout=220)
