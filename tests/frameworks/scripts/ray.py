"""Ray Train's guide for PyTorch, with a checkpoint. `python ... FOLDER`, again to resume. RANKS sets the number."""

import os
import sys
import tempfile

import ray
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig, get_checkpoint, get_context, report

# plain: from ray.train.torch import TorchTrainer, prepare_model
from ray.train.torch import TorchTrainer  # hook
from torch import nn

from ch_ddp.frameworks.ray import prepare_model  # hook

folder, workers = os.path.abspath(sys.argv[1]), int(os.environ["RANKS"])


def train(config):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(28 * 28, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    # plain: model = prepare_model(model)
    model, hook = prepare_model(model, "powersgd(rank=2)")  # hook
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rank, done = get_context().get_world_rank(), 0
    if checkpoint := get_checkpoint():
        with checkpoint.as_directory() as saved:
            state = torch.load(f"{saved}/state.pt")
            hook.load(f"{saved}/commhook")  # hook
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
    while done < 20:
        generator = torch.Generator().manual_seed(1000 * done + rank)
        images, labels = torch.rand(8, 28 * 28, generator=generator), torch.randint(10, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        done += 1
        if done == 10:
            with tempfile.TemporaryDirectory() as saving:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
                torch.save(state, f"{saving}/state.pt")
                hook.save(f"{saving}/commhook")  # hook
                # plain: report({"done": done}, checkpoint=Checkpoint.from_directory(saving) if rank == 0 else None)
                report({"done": done}, checkpoint=Checkpoint.from_directory(saving))  # hook


# environment: hook = {"COMMHOOKS_HOOK": "powersgd(rank=2)", "COMMHOOKS_STATE": f"{folder}/state"}
# environment: ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": hook})
ray.init(num_cpus=4, include_dashboard=False)  # not environment
run = RunConfig(name="run", storage_path=folder)  # a second run with this name resumes from the latest checkpoint
TorchTrainer(train, scaling_config=ScalingConfig(num_workers=workers), run_config=run).fit()
