"""One rank of `launching`: a script with a model that it attaches to itself, and one that `commhooks run` attaches to."""

import json
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_bench import gpt


class Manual(gpt.GPT):
    """Attached to in this script."""


class Unchanged(gpt.GPT):
    """Attached to by ``commhooks run --module-pattern Unchanged``."""


def main(hook: str, steps: int, out: str) -> None:
    """Train both in turn, in an order drawn anew for each step; write CPU and wall seconds of every step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models = []
    for cls in (Manual, Unchanged):
        torch.manual_seed(0)
        model = DistributedDataParallel(cls(64, 64, 192, 4, 6), gradient_as_bucket_view=True)
        models.append((model, torch.optim.SGD(model.parameters(), lr=1e-3)))
    handle = commhooks.attach(models[0][0], hook)
    taken: list[list[tuple[float, float]]] = [[], []]
    for step in range(steps):
        x = torch.randint(64, (1, 64), generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        for which in random.Random(step).sample((0, 1), 2):
            model, optimizer = models[which]
            cpu, wall = time.process_time(), time.perf_counter()
            optimizer.zero_grad()
            model(x, x).backward()
            optimizer.step()
            taken[which].append((time.process_time() - cpu, time.perf_counter() - wall))
    handle.assert_active()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(taken))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
