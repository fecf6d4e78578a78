"""Local SGD's state is a subclass of PyTorch's. Lightning looks for that class and then averages the model."""

import copy
import importlib.util
import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ch_ddp
from ch_ddp import PostLocalSGDState
from ch_testing import spawn


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 4))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_state_is_one_of_pytorchs() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState as Theirs

    state = PostLocalSGDState(None, None, 5, False, subgroup_size=2)
    assert isinstance(state, Theirs)
    state.iter = 3
    for twin in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert (twin.state_dict(), twin.subgroup_size) == (state.state_dict(), 2)
        assert twin.process_group is twin.subgroup is None
    old = {"process_group": None, "subgroup": None, "start_localSGD_iter": 5, "iter": 4}  # as version 0.1.0 pickled it
    state.__setstate__({**old, "post_local_gradient_allreduce": True, "subgroup_size": None})
    assert (state.iter, state.post_local_gradient_allreduce, state.subgroup_size) == (4, True, None)


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.timeout(180)
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed")
def test_lightnings_strategy_averages_the_model(tmp_path: Any) -> None:
    """``DDPStrategy`` looks for PyTorch's class. Without that class, Lightning would never average
    the drifting models.
    """
    spawn(body_lightning, 2, str(tmp_path), timeout=150)


def body_lightning(rank: int, world: int, folder: str) -> None:
    import lightning.pytorch as pl

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
    )  # fmt: skip

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_fit_start(self) -> None:
            # Lightning registers comm hooks on CUDA devices only.
            self.trainer.strategy.model.register_comm_hook(state, ch_ddp.post_localSGD_hook)

    state = PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)
    strategy = pl.strategies.DDPStrategy(
        ddp_comm_state=state, ddp_comm_hook=ch_ddp.post_localSGD_hook, model_averaging_period=3, bucket_cap_mb=0.001
    )
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, max_steps=6, default_root_dir=folder, strategy=strategy, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = torch.utils.data.DataLoader(torch.randn(48, 12, generator=torch.Generator().manual_seed(1)), batch_size=2)
    apart: list[bool] = []

    class Compare(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            every: list[Any] = [None] * world
            dist.all_gather_object(every, flat(module))
            apart.append(not torch.equal(every[0], every[1]))

    trainer.callbacks.append(Compare())
    trainer.fit(module, data)
    assert apart == [False, False, False, True, True, False]  # gradients twice; averages at steps 2 and 5
