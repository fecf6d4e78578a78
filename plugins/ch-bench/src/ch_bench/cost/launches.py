"""How many operations a hook starts in a step, which on a GPU are kernels to launch: `python -m ch_bench.cost.launches`.

Counted without numbers: the reduction runs on meta tensors, as it would on a GPU, over the shapes of GPT-2 small (124 M
parameters), all buckets of a step at once; a fused operation over many tensors counts once, a view not at all. What the
engine adds, to every message alike, is not in it: a scaling, a copy where several are merged, and a sum that tells whether
the result is finite.
"""

import argparse
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import commhooks
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
_VIEWS = frozenset(
    [
        *(
            "view",
            "_unsafe_view",
            "as_strided",
            "transpose",
            "t",
            "split_with_sizes",
            "split",
            "slice",
            "select",
            "unbind",
        ),
        *("expand", "diagonal", "unsqueeze", "squeeze", "detach", "alias", "narrow", "permute", "reshape"),
        *("empty", "empty_strided", "empty_like", "new_empty"),
    ]
)


def started(name: str) -> bool:
    """Whether an operation of this name does something on the device: a view does not.

    >>> started("add_"), started("select")
    (True, False)
    """
    return name not in _VIEWS


class Operations(TorchDispatchMode):
    """Counts what is started while it is entered, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if started(name):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def cut(shapes: Mapping[str, tuple[int, ...]], cap: int) -> list[dict[str, tuple[int, ...]]]:
    """Parameters into buckets of at most ``cap`` bytes (fp32), last first, as DDP does."""
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
    """What a hook starts in its third step on two ranks, by name."""
    reduction = commhooks.create(hook).reduction
    assert reduction is not None
    state = HookState()
    made = []
    for index, shapes in enumerate(buckets):
        layout = BucketLayout.of_shapes(shapes, device="meta")
        made.append(Bucket(layout, torch.empty(layout.numel, device="meta"), index))

    contexts = [StepContext(0, 2, state=state, owner=bucket.index) for bucket in made]  # with scratch that lives on

    def step() -> None:
        for ctx in contexts:
            ctx.step = state.step
        live = [reduction.start(bucket, ctx) for bucket, ctx in zip(made, contexts, strict=True)]
        while live:
            live = [one for one in live if next(one, None) is not None]
        state.commit()

    step()
    step()
    with Operations() as found:
        step()
    counts: Counter[str] = found.counts
    return counts


def table(hooks: list[str]) -> str:
    """Operations per step, in DDP's default buckets and in one, as Markdown."""
    shapes = gpt_shapes(12, 768, 50257, 1024)
    several, one = cut(shapes, DEFAULT_CAP), cut(shapes, ONE_BUCKET)
    lines = [f"| hook | {len(several)} buckets | 1 bucket | most, in one bucket |", "|---|---|---|---|"]
    for hook in hooks:
        counts = [operations(hook, buckets) for buckets in (several, one)]
        most = ", ".join(f"{name} {n}" for name, n in counts[1].most_common(4))
        lines.append(f"| `{hook}` | {counts[0].total()} | {counts[1].total()} | {most} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hooks", nargs="*", default=HOOKS)
    print(table(parser.parse_args(argv).hooks))


if __name__ == "__main__":
    main()
