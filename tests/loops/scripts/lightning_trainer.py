"""Train a LightningModule by Lightning's Trainer, which saves after each epoch and resumes from its last checkpoint."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader
from toy import FOLDER, SEED, Net, dataset, finish, test


class LitNet(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    lightning.seed_everything(SEED)
    model = LitNet()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        gradient_clip_val=1.0,
        default_root_dir=FOLDER,
        logger=False,
        callbacks=[ModelCheckpoint(FOLDER / "checkpoints", save_last=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = FOLDER / "checkpoints" / "last.ckpt"
    batches = DataLoader(dataset(), batch_size=32, shuffle=True, drop_last=True)
    trainer.fit(model, batches, ckpt_path=last if last.exists() else None)
    finish(test(model.net), model)
