"""Train a conditional GAN in one wrapped module, with an optimizer for each half."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FEATURES, FOLDER, HIDDEN, SEED, Net, finish, loader, save, test


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = Net()
        self.discriminator = nn.Sequential(nn.Linear(2 * FEATURES, HIDDEN), nn.LeakyReLU(0.2), nn.Linear(HIDDEN, 1))

    def forward(self, x, y, half):
        fake = self.generator(x)
        if half == "discriminator":
            scores = self.discriminator(torch.cat([torch.cat([x, fake.detach()], 1), torch.cat([x, y], 1)]))
            labels = torch.cat([torch.zeros(len(x), 1), torch.ones(len(x), 1)])
            return nn.functional.binary_cross_entropy_with_logits(scores, labels)
        scores = self.discriminator(torch.cat([x, fake], 1))
        adversarial = nn.functional.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
        return adversarial + 100 * nn.functional.l1_loss(fake, y)


dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DDP(GAN(), find_unused_parameters=True)
optimizer_g = torch.optim.Adam(model.module.generator.parameters(), lr=1e-2)
optimizer_d = torch.optim.Adam(model.module.discriminator.parameters(), lr=2e-3)
batches = loader()
losses = []
checkpoint, first = FOLDER / "checkpoint.pt", 0
if checkpoint.exists():
    loaded = torch.load(checkpoint)
    model.module.load_state_dict(loaded["model"])
    optimizer_g.load_state_dict(loaded["optimizer_g"])
    optimizer_d.load_state_dict(loaded["optimizer_d"])
    first = loaded["epoch"] + 1
for epoch in range(first, 2):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        optimizer_d.zero_grad()
        loss_d = model(x, y, "discriminator")
        loss_d.backward()
        optimizer_d.step()
        losses.append(loss_d.item())

        optimizer_g.zero_grad()
        model(x, y, "generator").backward()
        optimizer_g.step()
    if dist.get_rank() == 0:
        states = {
            "model": model.module.state_dict(),
            "optimizer_g": optimizer_g.state_dict(),
            "optimizer_d": optimizer_d.state_dict(),
        }
        save({**states, "epoch": epoch}, checkpoint)
finish(test(model.module.generator) + sum(losses[-20:]) / 20, model)
dist.destroy_process_group()
