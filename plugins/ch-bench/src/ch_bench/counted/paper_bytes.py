"""The data column of the PowerSGD paper, from shapes alone.

    python -m ch_bench.counted.paper_bytes

Vogels et al. 2019 (https://arxiv.org/abs/1905.13727) train ResNet-18 on CIFAR-10 with 16 workers of batch 128, hence 24
full steps per epoch, and report the megabytes (2**20 bytes) that a worker sends per epoch. Here the same column comes
out of ``Reduction.plan``: the requests of one step, known from the layout without running anything. Each convolution
``(out, in, k, k)`` is a matrix of ``out`` by ``in * k * k``; vectors are averaged as they are.
"""

from rich import box
from rich.console import Console
from rich.table import Table

import commhooks
from commhooks import BucketLayout, StepContext

WORKERS, BATCH, IMAGES = 16, 128, 50_000
STEPS = IMAGES // (WORKERS * BATCH)  # per epoch
MIB = 2**20
STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))  # channels, stride of the first block


def resnet18(classes: int = 10) -> dict[str, tuple[int, ...]]:
    """Parameter name -> shape of ResNet-18 for 32 x 32 images (3 x 3 stem, two blocks in each of four stages)."""
    shapes = {"conv1": (64, 3, 3, 3)} | _norm("bn1", 64)
    before = 64
    for i, (width, stride) in enumerate(STAGES, 1):
        for j in range(2):
            name = f"layer{i}.{j}"
            shapes |= {f"{name}.conv1": (width, before, 3, 3)} | _norm(f"{name}.bn1", width)
            shapes |= {f"{name}.conv2": (width, width, 3, 3)} | _norm(f"{name}.bn2", width)
            if j == 0 and (stride != 1 or before != width):
                shapes |= {f"{name}.shortcut": (width, before, 1, 1)} | _norm(f"{name}.shortcut_bn", width)
            before = width
    return shapes | {"linear.weight": (classes, before), "linear.bias": (classes,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def payload_per_epoch(expr: str) -> float:
    """MiB that one worker gives to collectives in an epoch under the hook ``expr``."""
    reduction = commhooks.create(expr).reduction
    if reduction is None:
        raise ValueError(f"{expr} is a foreign hook: its collectives cannot be planned")
    plan = reduction.plan(BucketLayout.of_shapes(resnet18()), StepContext(world_size=WORKERS))
    return STEPS * sum(request.payload_bytes for stage in plan for request in stage) / MIB


def main() -> None:
    """Print the column beside the paper's."""
    paper = {"allreduce": 1023, "powersgd(rank=1)": 4, "powersgd(rank=2)": 8, "powersgd(rank=4)": 14}
    plain = payload_per_epoch("allreduce")
    table = Table(title=f"ResNet-18 on CIFAR-10, {WORKERS} workers: data per epoch", box=box.SIMPLE_HEAD)
    for name in ("hook", "planned MB", "paper MB", "ratio"):
        table.add_column(name, justify="left" if name == "hook" else "right")
    for expr, printed in paper.items():
        planned = payload_per_epoch(expr)
        table.add_row(expr, f"{planned:.1f}", str(printed), f"{plain / planned:.0f}×")
    Console().print(table)


if __name__ == "__main__":
    main()
