"""One rank of one installation for `trees`: a file to run, on public names that both installations have."""

import json
import os
import random
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_bench import gpt, text

CONTEXT = 64


def main() -> None:
    """Read "step hook" lines, answer with the seconds of each."""
    rank, world, store, hooks = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    draw = random.Random(int(sys.argv[5]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be read as an answer
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    data = text.load()
    batches = text.Batches(data.train, 1, CONTEXT, rank, seed=0)
    candidates, models, gaps = [*hooks, (None, 25.0)], {}, []
    for number in draw.sample(range(len(candidates)), len(candidates)):
        expression, cap = candidates[number]
        gaps.append(torch.empty(draw.randrange(1 << 22), dtype=torch.uint8))  # elsewhere in memory at every start
        torch.manual_seed(0)
        model = DistributedDataParallel(
            gpt.GPT(data.vocab, CONTEXT, 384, 6, 6), bucket_cap_mb=cap, gradient_as_bucket_view=True
        )
        if expression is None:
            model.register_comm_hook(None, noop_hook)
        else:
            commhooks.attach(model, expression)  # in place as long as the model lives
        models[number] = model, torch.optim.SGD(model.parameters(), lr=1e-3)
    for line in sys.stdin:
        step, hook = map(int, line.split())
        model, optimizer = models[hook]
        x, y = batches[step]
        start = time.perf_counter()
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
        answers.write(f"{time.perf_counter() - start}\n")
        answers.flush()


if __name__ == "__main__":
    main()
