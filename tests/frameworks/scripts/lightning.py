"""Lightning's "in 15 minutes": an autoencoder under a Trainer. `python -m torch.distributed.run ... FOLDER [--resume]`."""

import os
import sys

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from ch_ddp.frameworks.lightning import CommHookCallback  # hook

folder, resume = sys.argv[1], "--resume" in sys.argv


class LitAutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 512), nn.ReLU(), nn.Linear(512, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 512), nn.ReLU(), nn.Linear(512, 28 * 28))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.decoder(self.encoder(batch)), batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


L.seed_everything(1)
ranks = int(os.environ.get("WORLD_SIZE", "1"))
images = torch.utils.data.DataLoader(torch.rand(10 * 4 * ranks, 28 * 28), batch_size=4)
checkpoints = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
trainer = L.Trainer(
    max_epochs=2,
    accelerator="cpu",
    strategy="ddp",
    devices=ranks,
    # plain: callbacks=[checkpoints],
    callbacks=[checkpoints, CommHookCallback("powersgd(rank=2)")],  # hook
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(LitAutoEncoder(), images, ckpt_path=f"{folder}/epoch=0.ckpt" if resume else None)
