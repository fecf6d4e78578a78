"""Lightning's Trainer, after its tutorial in fifteen minutes."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class AutoEncoder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 64))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[0])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", torch.nn.functional.mse_loss(self.layers(batch[0]), batch[0]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
loader = DataLoader(TensorDataset(torch.randn(48, 64)), batch_size=4)
trainer = lightning.Trainer(
    max_epochs=1, max_steps=6, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(AutoEncoder(), loader, loader)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()  # gloo may abort a process that ends without it
