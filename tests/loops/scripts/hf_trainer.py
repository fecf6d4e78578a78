"""Train by the Trainer of Hugging Face transformers, which loads the best model at the end."""

import torch
from torch import nn
from toy import FOLDER, SEED, Net, dataset, finish, test
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x, labels):
        out = self.net(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


class Rows(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return {"x": x, "labels": y}


set_seed(SEED)
model = Model()
arguments = TrainingArguments(
    output_dir=str(FOLDER / "out"),
    seed=SEED,
    use_cpu=True,
    per_device_train_batch_size=32,
    per_device_eval_batch_size=256,
    num_train_epochs=2,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    eval_strategy="steps",
    eval_steps=16,
    save_strategy="steps",
    save_steps=16,
    save_total_limit=1,
    load_best_model_at_end=True,
    disable_tqdm=True,
    report_to=[],
)
trainer = Trainer(model, arguments, train_dataset=Rows(dataset()), eval_dataset=Rows(dataset(512, seed=4)))
trainer.train(resume_from_checkpoint=get_last_checkpoint(FOLDER / "out") if (FOLDER / "out").exists() else None)
finish(test(model.net), model)
