"""Loads and bytes of ``two_level(powersgd)`` by the limits of the partition: `python -m tests.partition_limits`.

*Load*: elements of the fullest rank over the mean, on all buckets together. *Inside*: elements that a node exchanges with
padding, over the elements of the gradient. *Between*: rows and columns of all pieces, which are the factors that leave a node,
over those of flat ``powersgd`` on the links of a node.
"""

from itertools import product

from commhooks.bucket import BucketLayout
from commhooks.compositions import partition as module

GPT = {  # 10.8 M parameters
    "symbol": (128, 384),
    "position": (64, 384),
    **{
        f"{i}.{name}": shape
        for i in range(6)
        for name, shape in (("qkv", (1152, 384)), ("proj", (384, 384)), ("up", (1536, 384)), ("down", (384, 1536)))
    },
}
LLAMA = {"gate": (11008, 4096), "down": (4096, 11008), "q": (4096, 4096)}
LIMITS = ((1.25, 1.0, 99.0), (1.25, 1.5, 2.0), (1.25, 99.0, 2.0), (1.05, 99.0, 2.0))  # TOLERATED, EXTRA, MOST


def buckets(shapes: dict[str, tuple[int, ...]]) -> list[BucketLayout]:
    """Return buckets as DDP fills them: 1 MB, then 25 MB."""
    made: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in reversed(shapes.items()):
        made[-1][name] = shape
        if BucketLayout.of_shapes(made[-1]).size * 4 >= (1 << 20 if len(made) == 1 else 25 << 20):
            made.append({})
    return [BucketLayout.of_shapes(one) for one in made if one]


def row(layouts: list[BucketLayout], ranks: int, nodes: int = 2) -> tuple[float, float, float]:
    """Return load, inside and between of one model."""
    loads, padded, cut, whole = [0] * ranks, 0, 0, 0
    for layout in layouts:
        made = module.partition(layout, ranks, "rows")
        padded += ranks * made.numel
        whole += sum(sum(p.matrix_shape) for p in layout.params)
        for place, part in enumerate(made.owned):
            loads[place] += sum(piece.numel for piece in part)
            cut += sum(piece.numel // piece.param.matrix_shape[1] + piece.param.matrix_shape[1] for piece in part)
    world, total = nodes * ranks, sum(loads)
    between = (nodes - 1) / nodes * cut / ((world - 1) / world * whole)
    return max(loads) * ranks / total, padded / total, between


def main() -> None:
    print("| TOLERATED, EXTRA, MOST | model | ranks per node | load | inside | between |\n|---|---|---|---|---|---|")
    for limits, (name, shapes), ranks in product(LIMITS, (("GPT", GPT), ("Llama", LLAMA)), (4, 8)):
        module.TOLERATED, module.EXTRA, module.MOST = limits
        load, inside, between = row(buckets(shapes), ranks)
        shown = ", ".join("none" if limit == 99.0 else f"{limit:g}" for limit in limits)
        print(f"| {shown} | {name} | {ranks} | {load:.2f} | {inside:.2f} | {between:.3f} |")


if __name__ == "__main__":
    main()
