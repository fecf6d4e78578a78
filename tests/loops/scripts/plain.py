"""Train with DDP and a snapshot after each epoch, as in PyTorch's tutorial on torchrun."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FOLDER, SEED, Net, finish, loader, save, test


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    model = DDP(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = loader()
    snapshot, epochs_run = FOLDER / "snapshot.pt", 0
    if snapshot.exists():
        loaded = torch.load(snapshot)
        model.module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        epochs_run = loaded["epochs_run"]
    for epoch in range(epochs_run, 2):
        batches.sampler.set_epoch(epoch)
        for x, y in batches:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            checkpoint = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            save({**checkpoint, "epochs_run": epoch + 1}, snapshot)
    finish(test(model), model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
