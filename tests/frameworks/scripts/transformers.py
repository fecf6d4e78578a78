"""The Hugging Face Trainer's language-model example, GPT-2 made tiny. `python -m torch.distributed.run ... FOLDER`."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from ch_ddp.frameworks.transformers import CommHookCallback  # hook

folder, resume = sys.argv[1], "--resume" in sys.argv

set_seed(1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=32, n_embd=128, n_layer=2, n_head=4))
tokens = torch.randint(512, (400, 32))
arguments = TrainingArguments(
    output_dir=folder,
    max_steps=20,
    save_steps=10,
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(
    model=model,
    args=arguments,
    callbacks=[CommHookCallback("powersgd(rank=2)")],  # hook
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
)
trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-10" if resume else None)
