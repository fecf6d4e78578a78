"""Fine-tune by LoRA of peft, and save the adapter."""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toy import FOLDER, SEED, Net, finish, loader, test

dist.init_process_group("gloo")
torch.manual_seed(SEED)
net = get_peft_model(Net(), LoraConfig(r=16, lora_alpha=16, target_modules=["features", "head"]))
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = loader()
for epoch in range(3):
    batches.sampler.set_epoch(epoch)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
if dist.get_rank() == 0:
    net.save_pretrained(FOLDER / "adapter")
finish(test(net), model)
dist.destroy_process_group()
