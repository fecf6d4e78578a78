"""The hooks that a case may use, and the distance from the exact average that each may have.

``exact``     the average, to a rounding or two of the gradient's dtype
``wire``      every element within a few roundings of 16 bits, relative to the mean of the ranks' magnitudes
``integer``   every element within a few steps of an 8-bit grid over the largest magnitude
``projected`` per parameter, an error of at most the average's norm, as a projection has
``residual``  applied + mean residual = sum of the averages, within the rounding of the messages
``silent``    sends nothing, and every rank keeps its own gradient
"""

from dataclasses import dataclass, replace

FP32, FP16, BF16 = 2.0**-24, 2.0**-11, 2.0**-8
ROUNDING = {"float64": 2.0**-53, "float32": FP32, "float16": FP16, "bfloat16": BF16, "complex64": FP32}


@dataclass(frozen=True)
class Entry:
    """One expression.

    Attributes:
        expr: argument of ``attach``.
        promise: see the module.
        wire: relative rounding of messages that no residual returns.
        places: the kinds of model it runs on.
        bits: True if the docs promise the bits of DDP without a hook.
    """

    expr: str
    promise: str
    wire: float = 0.0
    places: tuple[str, ...] = ("ddp", "simulated", "replicate")
    bits: bool = False


DDP = ("ddp",)
SHARDABLE = ("ddp", "simulated", "replicate", "shard")

HOOKS = [
    Entry("allreduce", "exact", places=SHARDABLE, bits=True),
    Entry("warmup(powersgd(rank=2), steps=100)", "exact"),
    Entry("powersgd(rank=2, start_iter=100)", "exact"),
    Entry('policy({"*.bias": allreduce, "*": allreduce})', "exact"),
    Entry("post_local_sgd(start_iter=100, subgroup_size=1)", "exact", places=DDP),
    Entry("torch:allreduce_hook", "exact", places=DDP),
    Entry("torch:bf16_compress_wrapper", "wire", BF16, places=DDP),
    Entry("noop", "silent", places=("ddp", "simulated")),
    Entry("reduce_scatter", "exact", places=("shard",)),
    Entry("fp16_compress", "wire", FP16, places=SHARDABLE),
    Entry("bf16_compress", "wire", BF16, places=SHARDABLE),
    Entry('bf16_compress(accumulate="fp32")', "wire", BF16, places=("ddp", "simulated", "replicate", "shard")),
    Entry('fp16_compress(accumulate="fp32")', "wire", FP16),
    Entry("bf16_wrapper(allreduce)", "wire", BF16),
    Entry("fp16_wrapper(allreduce)", "wire", FP16),
    Entry("warmup(bf16_compress, steps=2)", "wire", BF16),
    Entry("quant8", "integer"),
    Entry("quant8(exempt=False)", "integer"),
    Entry("quantize_per_tensor", "integer"),
    Entry("quantize_per_channel", "integer"),
    Entry("powersgd(rank=2, error_feedback=False)", "projected", FP32),
    Entry("powersgd(rank=1)", "residual", FP32),
    Entry("powersgd(rank=2)", "residual", FP32),
    Entry("powersgd(rank=4, min_compression_rate=0.5)", "residual", FP32),
    Entry("powersgd(rank=2, warm_start=False)", "residual", FP32),
    Entry('powersgd(rank=2, residual="averaged")', "residual", FP32),
    Entry("powersgd(rank=2, start_iter=2)", "residual", FP32),
    Entry("batched_powersgd(rank=2)", "residual", FP32),
    Entry("warmup(powersgd(rank=2), steps=2)", "residual", FP32),
    Entry("warmup(bf16_compress, powersgd(rank=2), steps=2)", "residual", BF16),
    Entry("warmup(powersgd(rank=1), error_feedback(bf16_compress), steps=2)", "residual", BF16),
    Entry('policy({"*bias": allreduce, "*": powersgd(rank=2)})', "residual", FP32),
    Entry('policy({"*bias": bf16_compress, "*": powersgd(rank=2)})', "residual", BF16),
    Entry('policy({"*weight": powersgd(rank=1), "*": quant8(error_feedback=True)})', "residual", FP32),
    Entry("bf16_wrapper(powersgd(rank=2))", "residual", BF16),
    Entry("fp16_wrapper(powersgd(rank=2))", "residual", FP16),
    Entry("bf16_wrapper(warmup(powersgd(rank=2), steps=1))", "residual", BF16),
    Entry("error_feedback(bf16_compress)", "residual", BF16),
    Entry('error_feedback(bf16_compress(accumulate="fp32"))', "residual", BF16),
    Entry("error_feedback(fp16_compress)", "residual", FP16),
    Entry("quant8(error_feedback=True)", "residual", FP32, places=SHARDABLE),
    Entry("quant4(error_feedback=True)", "residual", FP32, places=SHARDABLE),
    Entry('quant(bits=2, rotation="hadamard", error_feedback=True, exempt=False)', "residual", FP32),
    Entry("quant2(block=32)", "residual", FP32, places=SHARDABLE),
    Entry("sign", "residual", FP32, places=SHARDABLE),
    Entry("topk(density=0.1, chunk=64, exempt=False)", "residual", FP32),
    Entry("topk(density=0.2, bits=2)", "residual", FP32),
    Entry("error_feedback(topk(density=0.2, feedback=False))", "residual", FP32),
    Entry("randomk(density=0.2)", "residual", FP32),
]
BY_EXPR = {entry.expr: entry for entry in HOOKS}
BETWEEN = [
    e.expr for e in HOOKS if "simulated" in e.places and e.promise != "silent" and "start_iter=100" not in e.expr
]
"""Hooks that ``two_level`` runs between nodes."""
INSIDE = {"": 0.0, "bf16": BF16, "fp16": FP16, "quant8": 0.0}
"""Numbers inside a node, and their relative rounding. A grid of 8 bits is bounded as ``integer``."""
AROUND = {
    "": "{}",
    "warmup": "warmup({}, steps=2)",
    "bf16_wrapper": "bf16_wrapper({})",
    "policy": 'policy({{"*bias": allreduce, "*": {}}})',
}
"""Wrappers around ``two_level``."""
GATHERS = {"bf16_compress": BF16, "quant8(block=16)": 1 / 127, "quant8": 1 / 127, "quant4(block=32)": 1 / 7}
"""Hooks of FSDP2's weight gathers, and the error of a decoded weight, relative to the largest one."""
GATHER_INSIDE = {"": 0.0, "bf16_compress": BF16, "quant8(block=16)": 1 / 127}
"""Hooks inside a node of a gather over two levels, and the error of a decoded weight."""
GATHER_NODES = {
    2: ("1", "2", "2", "3"),
    3: ("1", "3", "[[0], [1, 2]]"),
    4: ("1", "2", "2", "2", "4", "[[0, 2], [1, 3]]", "[[0, 1], [2]]"),
}
"""Ranks that gather -> ranks per node, or the ranks of each node, of a gather over two levels. Some are refused."""
FUNCTIONS = ("allreduce", "fp16_compress", "bf16_compress", "powersgd(rank=2)", "batched_powersgd(rank=2)", "quant8")
"""Those that ``register_comm_hook`` is given too, as functions with torch's signature."""


def entry_of(expr: str) -> Entry:
    """Return the entry of an expression. A planted hook has the promise of the hook that it imitates."""
    if expr.startswith("planted:"):
        kind = expr.partition(":")[2]
        return Entry(expr, "residual" if kind == "forgetful" else "exact", FP32 if kind == "forgetful" else 0.0)
    return BY_EXPR[expr]


def between_nodes(entry: Entry, inside: str, around: str) -> Entry:
    """Return what a hook promises inside ``two_level``: its own promise, and the rounding inside a node."""
    wire = max(entry.wire, INSIDE[inside], BF16 if around == "bf16_wrapper" else 0.0)
    promise = "wire" if entry.promise == "exact" and wire else entry.promise
    promise = "integer" if inside == "quant8" else promise
    return replace(entry, promise=promise, wire=wire, bits=False)
