"""Train a conditional GAN as pix2pix does: the discriminator is frozen in the generator's half."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FEATURES, FOLDER, HIDDEN, SEED, Net, finish, loader, save, test


def set_requires_grad(net, requires_grad):
    for parameter in net.parameters():
        parameter.requires_grad = requires_grad


dist.init_process_group("gloo")
torch.manual_seed(SEED)
net_g = DDP(Net())
net_d = DDP(nn.Sequential(nn.Linear(2 * FEATURES, HIDDEN), nn.LeakyReLU(0.2), nn.Linear(HIDDEN, 1)))
optimizer_g = torch.optim.Adam(net_g.parameters(), lr=1e-2, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
gan_loss, l1_loss = nn.MSELoss(), nn.L1Loss()
batches = loader()
checkpoint, first = FOLDER / "checkpoint.pt", 0
if checkpoint.exists():
    loaded = torch.load(checkpoint)
    net_g.module.load_state_dict(loaded["g"])
    net_d.module.load_state_dict(loaded["d"])
    optimizer_g.load_state_dict(loaded["optimizer_g"])
    optimizer_d.load_state_dict(loaded["optimizer_d"])
    first = loaded["epoch"] + 1
for epoch in range(first, 2):
    batches.sampler.set_epoch(epoch)
    for real_a, real_b in batches:
        fake_b = net_g(real_a)

        set_requires_grad(net_d, True)
        optimizer_d.zero_grad()
        pred = net_d(torch.cat([torch.cat([real_a, fake_b.detach()], 1), torch.cat([real_a, real_b], 1)]))
        pred_fake, pred_real = pred.chunk(2)
        loss_d = 0.5 * (
            gan_loss(pred_fake, torch.zeros_like(pred_fake)) + gan_loss(pred_real, torch.ones_like(pred_real))
        )
        loss_d.backward()
        optimizer_d.step()

        set_requires_grad(net_d, False)
        optimizer_g.zero_grad()
        pred_fake = net_d(torch.cat([real_a, fake_b], 1))
        loss_g = 0.01 * gan_loss(pred_fake, torch.ones_like(pred_fake)) + l1_loss(fake_b, real_b)
        loss_g.backward()
        optimizer_g.step()
    if dist.get_rank() == 0:
        states = {
            "g": net_g.module.state_dict(),
            "d": net_d.module.state_dict(),
            "optimizer_g": optimizer_g.state_dict(),
            "optimizer_d": optimizer_d.state_dict(),
        }
        save({**states, "epoch": epoch}, checkpoint)
finish(test(net_g), net_g, net_d)
dist.destroy_process_group()
