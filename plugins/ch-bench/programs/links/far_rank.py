"""One rank of :mod:`programs.links.far`. It also runs in older installations, so it imports only names that these have."""

import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_bench.pytorch_hooks import LABELS, attach_pytorch
from ch_bench.shapes import ShapesOnly, random_gradients

SHAPES = {str(i): (512, 512) for i in range(4)}  # 1.05 M parameters
CAPS = {1: 1000.0, 4: 1.0}  # number of buckets -> bucket_cap_mb


def model_with(hook: str, buckets: int, link: str) -> tuple[DistributedDataParallel, Any]:
    """Return a model whose backward only hands over given gradients, and its hook."""
    gradients = random_gradients(SHAPES, torch.float32, torch.device("cpu"))
    model = DistributedDataParallel(ShapesOnly(gradients), bucket_cap_mb=CAPS[buckets], gradient_as_bucket_view=True)
    if hook in LABELS:
        return model, attach_pytorch(model, hook)
    options: dict[str, Any] = {"link": link} if link else {}  # an older installation does not know the option
    return model, commhooks.attach(model, hook, **options)


def traced(handle: Any, file: str) -> Any:
    """Return a context that writes a trace, or none without a file."""
    if not file:
        return nullcontext()
    from ch_trace import Trace  # an older installation has it elsewhere, and is not asked for one

    return Trace(handle, file)


def main() -> None:
    """Answer each ``BUCKETS HOOK`` with the times at which a step of this rank began and ended.

    A tab and the name of a file may follow. Three steps are then traced.
    """
    rank, world, store, link = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    models: dict[str, tuple[DistributedDataParallel, Any]] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        words, _, file = line.strip().partition("\t")
        buckets, hook = words.split(" ", 1)
        if words not in models:
            models[words] = model_with(hook, int(buckets), link)
        model, handle = models[words]
        with traced(handle, file):
            for _ in range(3 if file else 1):
                model.zero_grad(set_to_none=False)
                loss = model()
                begun = time.monotonic()  # one clock for all namespaces, because a barrier would cost a round trip
                loss.backward()
                ended = time.monotonic()
        made = model._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")  # empty in the first step
        if made and len(made.split(",")) != int(buckets):
            sys.exit(f"{words}: DDP made buckets of {made} bytes; adapt CAPS")
        print(begun, ended, flush=True)


if __name__ == "__main__":
    main()
