"""The cases: every hook with every way and several numbers of ranks."""

import random

import commhooks
from tests.sizes.hooks import ATTACH, REDUCER, REGISTER, ROWS

from .ways import FUNCTIONS, Case

FSDP1 = [spec.name for spec in commhooks.list_hooks(kind="fsdp")]
METHODS = (  # one hook of each method, for the ways that differ in the adapter only
    "allreduce",
    "bf16_compress",
    "quant4(error_feedback=True)",
    "powersgd(rank=4)",
    "topk(bits=2)",
    "error_feedback(bf16_compress)",
)
ADAPTERS = (
    "attach, views",
    "attach, traced",
    "attach, stopped backward",
    "replicate()",
    "OverlappedOptimizer",
    "inside a user's hook",
    "Reducer, dropped and moved rounds",
    "OuterOptimizer, overlap",
    "OuterOptimizer, overlap and moves",
)
ORDINARY = {
    "attach to DDP": ("allreduce", "bf16_compress", "quant4(error_feedback=True)", "powersgd(rank=4)"),
    "register_comm_hook": ("allreduce", "bf16_compress", "fp16_wrapper(allreduce)", "topk(bits=2)"),
    "Reducer": ("allreduce", "quantize_per_tensor"),
    "Reducer, dropped and moved rounds": ("allreduce", "quant4(error_feedback=True)"),
}


def every() -> list[Case]:
    """Return all cases."""
    found = []
    for row in ROWS:
        worlds = (2, 3, 4) if row.expr.startswith("two_level") else (2, 3)
        ways = {"attach to DDP": ATTACH, "register_comm_hook": REGISTER, "Reducer": REDUCER}
        found += [Case(way, row.expr, world) for way, kind in ways.items() if kind in row.ways for world in worlds]
        if REDUCER in row.ways:
            found += [Case("simulated", row.expr, world) for world in (2, 3, 4)]
    for way in ADAPTERS:
        found += [Case(way, hook, world) for hook in METHODS for world in (2, 3)]
    found += [Case(way, hook) for way in ("register_comm_hook", "inside a user's hook") for hook in FUNCTIONS]
    found += [Case("local SGD", "post_local_sgd(start_iter=2, subgroup_size=PART)", world) for world in (2, 4)]
    found += [Case("AllGatherGrad", "", world) for world in (2, 3)]
    found += [Case("simulated Reducer, dropped rounds", hook, world) for hook in METHODS for world in (2, 3)]
    for world in (2, 3):
        quantized = ("quant8", "quant4(error_feedback=True)")
        found += [Case("FSDP2, shard", hook, world) for hook in ("allreduce", "bf16_compress", *quantized)]
        found += [Case("FSDP2, gather", hook, world) for hook in ("bf16_compress", "quant8", "quant4")]
        found += [Case("FSDP2, replicate", hook, world) for hook in METHODS]
        found += [Case("FSDP1, NO_SHARD", hook, world) for hook in FSDP1 if hook != "reduce_scatter"]
        found += [Case("FSDP1, FULL_SHARD", hook, world) for hook in FSDP1 if hook != "allreduce"]
    found += [Case("FSDP2, replicate", hook, 4) for hook in METHODS]
    found += [Case("ch-ft, no hook", ""), Case("ch-ft, pure", ""), Case("ch-ft, failed attempt", "")]
    found += [Case(way, hook) for way in ("ch-ft", "ch-ft, Reducer", "ch-ft, failed attempt") for hook in METHODS]
    found += [
        Case(way, hook, world, "ordinary") for way, hooks in ORDINARY.items() for hook in hooks for world in (2, 3)
    ]
    return found


def sample(seed: int, count: int) -> list[Case]:
    """Return some of the cases, at least one of each way."""
    cases, rng = every(), random.Random(seed)
    rng.shuffle(cases)
    first = {case.way: case for case in cases}
    rest = [case for case in cases if case is not first[case.way]]
    return [*first.values(), *rest][:count]
