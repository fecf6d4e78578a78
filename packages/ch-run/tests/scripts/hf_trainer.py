"""The Hugging Face Trainer with a tiny GPT-2, after its tutorial on language modelling."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
texts = torch.randint(64, (64, 16))
data = [{"input_ids": row, "labels": row} for row in texts]
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
arguments = TrainingArguments(
    output_dir="out", max_steps=6, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no",
    disable_tqdm=True, ddp_bucket_cap_mb=1,
)  # fmt: skip
Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=data).train()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()  # gloo may abort a process that ends without it
