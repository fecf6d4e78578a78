"""torchtitan's own optimizers, checkpoints and overrides on a model that it would shard. `... FOLDER [--resume]`."""

import sys
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports


@dataclass(kw_only=True, slots=True)
class Config(Configurable.Config):
    checkpoint: CheckpointManager.Config = field(default_factory=CheckpointManager.Config)


class Counted:
    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state):
        self.step = int(state["step"])


# plain: folder, overrides = sys.argv[1], []
folder, overrides = sys.argv[1], ['ch_fsdp.torchtitan.attach={"hook": "powersgd(rank=2)"}']  # hook
config = Config(checkpoint=CheckpointManager.Config(enable=True, folder="checkpoint", interval=10))
apply_overrides(OverrideConfig(imports=parse_cli_imports(overrides)), config)

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp_replicate", "fsdp"))
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
for module in (model[0], model[2], model):
    fully_shard(module, mesh=mesh)
for module in model.modules():
    if isinstance(module, FSDPModule):
        module.set_gradient_divide_factor(1.0)  # torchtitan sums gradients and divides the loss by all tokens
groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})]
optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=[model])
trainer, dataloader, schedulers = Counted(), Counted(), Counted()
checkpointer = config.checkpoint.build(
    dataloader=dataloader,
    model_parts=[model],
    optimizers=optimizers,
    lr_schedulers=schedulers,
    states={"train_state": trainer},
    sd_adapter=None,
    base_folder=folder,
)
checkpointer.load(step=10 if "--resume" in sys.argv else -1)
while trainer.step < 20:
    generator = torch.Generator().manual_seed(1000 * trainer.step + dist.get_rank())
    numbers = torch.randn(8, 64, generator=generator)
    optimizers.zero_grad()
    (model(numbers).pow(2).sum() / (8 * 64 * dist.get_world_size())).backward()
    optimizers.step()
    trainer.step += 1
    checkpointer.save(trainer.step)
checkpointer.close()
