"""Operations that a hook starts in a step; on a GPU each one is a kernel launch.

    python -m programs.cost.kernel_launches [EXPR ...] [--record]

The reduction runs on meta tensors with the shapes of GPT-2 small (124 M parameters), all buckets of a step at once. A fused
operation over many tensors counts once, and views do not count. The engine's own operations are not included.
"""

import argparse
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ch_bench.pytorch_hooks import reduction_of
from ch_bench.record import command, markdown_table, run_main, write
from ch_bench.shapes import gpt_shapes
from commhooks import Bucket, BucketLayout, HookState, StepContext

HOOKS = [
    "allreduce",
    "bf16_compress",
    "powersgd(rank=1)",
    "powersgd(rank=4)",
    "batched_powersgd(rank=4)",
    "error_feedback(bf16_compress)",
    "quant8",
    "quantize_per_tensor",
    "quantize_per_channel",
]
DEFAULT_CAP, ONE_BUCKET = 25 * 2**20, 1 << 62  # bytes
_VIEWS = {
    *(
        "alias",
        "as_strided",
        "detach",
        "diagonal",
        "expand",
        "narrow",
        "permute",
        "reshape",
        "select",
        "slice",
        "split",
    ),
    *("split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "_unsafe_view", "view"),
    *("empty", "empty_like", "empty_strided", "new_empty"),
}


def launches_kernel(name: str) -> bool:
    """Return True if an operation of this name does work on the device.

    >>> launches_kernel("add_"), launches_kernel("select")
    (True, False)
    """
    return name not in _VIEWS


class Operations(TorchDispatchMode):
    """Counts operations by name while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if launches_kernel(name):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def cut(shapes: Mapping[str, tuple[int, ...]], cap: int) -> list[dict[str, tuple[int, ...]]]:
    """Divide parameters into buckets of at most ``cap`` bytes (fp32), last parameter first, as DDP does."""
    buckets: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name in reversed(list(shapes)):
        bytes_ = 4 * torch.Size(shapes[name]).numel()
        if buckets[-1] and size + bytes_ > cap:
            buckets.append({})
            size = 0
        buckets[-1][name] = shapes[name]
        size += bytes_
    return buckets


def operations(hook: str, buckets: list[dict[str, tuple[int, ...]]]) -> Counter[str]:
    """Return the operations of a hook's third step on two ranks, by name."""
    reduction = reduction_of(hook)
    state = HookState()
    made = []
    for index, shapes in enumerate(buckets):
        layout = BucketLayout.of_shapes(shapes, device="meta")
        made.append(Bucket(layout, torch.empty(layout.numel, dtype=torch.float32, device="meta"), index))
    contexts = [StepContext(0, 2, draft=state.draft, owner=bucket.index) for bucket in made]  # scratch outlives a step

    def step() -> None:
        for ctx in contexts:
            ctx.step = state.step
        live = [reduction.start(bucket, ctx) for bucket, ctx in zip(made, contexts, strict=True)]
        while live:
            live = [one for one in live if next(one, None) is not None]
        state.versions.commit()

    step()
    step()
    with Operations() as found:
        step()
    counts: Counter[str] = found.counts
    return counts


def table(hooks: list[str]) -> str:
    """Return operations per step in DDP's default buckets and in one bucket, as Markdown."""
    shapes = gpt_shapes(12, 768, 50257, 1024)
    several, one = cut(shapes, DEFAULT_CAP), cut(shapes, ONE_BUCKET)
    rows = []
    for hook in hooks:
        counts = [operations(hook, buckets) for buckets in (several, one)]
        most = ", ".join(f"{name} {n}" for name, n in counts[1].most_common(4))
        rows.append([f"`{hook}`", str(counts[0].total()), str(counts[1].total()), most])
    return markdown_table(["hook", f"{len(several)} buckets", "1 bucket", "most frequent, in one bucket"], rows)


def main(argv: list[str] | None = None) -> None:
    """Print the table, and write the record if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hooks", nargs="*", default=HOOKS, metavar="EXPR")
    parser.add_argument("--record", action="store_true", help="write the table to docs/measured/cost-table.md")
    chosen = parser.parse_args(argv)
    found = table(chosen.hooks)
    print(found)
    if chosen.record:
        made_by = command("programs.cost.kernel_launches", argv)
        write("cost-table", "Operations per step, counted on meta tensors", made_by, found)


if __name__ == "__main__":
    run_main(main)
