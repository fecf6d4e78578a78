"""Every hook and wrapper with its ways of attaching, and the method of the reference that it implements."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import ch_ddp
import ch_powersgd
import ch_quant
import commhooks
from ch_sparse.sizes import SIZES

from . import reference as ref

BF16, FP16 = torch.bfloat16, torch.float16
ATTACH, REGISTER, REDUCER, FAR = WAYS = ("attach", "register", "reducer", "attach far")
LINK = "1gbit,10s"  # on which every message is sent whole
WORLDS = (2, 3, 4)
Function = tuple[Callable[..., object], object]
"""A hook of PyTorch's signature, and its state."""


@dataclass(frozen=True)
class Row:
    """One hook.

    Attributes:
        expr: its expression. ``NODES`` stands for :func:`nodes`, ``PART`` for :func:`part`.
        method: returns the reference for a number of ranks.
        function: returns the function of PyTorch's signature and its state. By default :func:`commhooks.as_hook` makes it.
        ways: of attaching.
        in_rank_order: True if ranks add in rank order, so that more than two have the bits of simulated ranks.
        equal: False if ranks get different numbers.
        steps: after which it has compressed once with DDP's final buckets, twice with a residual.
    """

    expr: str
    method: Callable[[int], ref.Method]
    function: Callable[[int], Function] | None = None
    ways: tuple[str, ...] = WAYS
    in_rank_order: bool = False
    equal: bool = True
    steps: int = 3

    def expression(self, world: int) -> str:
        return self.expr.replace("NODES", str(nodes(world))).replace("PART", str(part(world)))

    def registered(self, world: int) -> Function:
        """Return the hook function and its state."""
        if self.function is not None:
            return self.function(world)
        reduction = commhooks.create(self.expression(world)).reduction
        assert reduction is not None
        return commhooks.as_hook(reduction), commhooks.HookState()


def nodes(world: int) -> int:
    """Return the ranks of a node: two nodes of two ranks, one of three, or two of one."""
    return world // 2 if world % 2 == 0 else world


def part(world: int) -> int:
    """Return the ranks of a subgroup."""
    return 2 if world % 2 == 0 and world > 2 else 1


def _row(expr: str, method: ref.Method, function: Function | None = None, **options: object) -> Row:
    make = None if function is None else lambda _: function
    return Row(expr, lambda _: method, make, **options)  # type: ignore[arg-type]


ROWS = (
    _row("allreduce", ref.Exact(), (ch_ddp.allreduce_hook, None)),
    _row("bf16_compress", ref.Cast(BF16, "bf16"), (ch_ddp.bf16_compress_hook, None)),
    _row("fp16_compress", ref.Cast(FP16, "fp16"), (ch_ddp.fp16_compress_hook, None)),
    _row("bf16_compress(accumulate='fp32')", ref.Cast(BF16, "bf16, fp32 sum"), in_rank_order=True),
    _row("fp16_compress(accumulate='fp32')", ref.Cast(FP16, "fp16, fp32 sum"), in_rank_order=True),
    _row(
        "bf16_wrapper(allreduce)",
        ref.Cast(BF16, "bf16"),
        (ch_ddp.bf16_compress_wrapper(ch_ddp.allreduce_hook), None),
    ),
    _row(
        "fp16_wrapper(allreduce)",
        ref.Cast(FP16, "fp16"),
        (ch_ddp.fp16_compress_wrapper(ch_ddp.allreduce_hook), None),
    ),
    _row("noop", ref.Alone(), (ch_ddp.noop_hook, None), equal=False),
    Row(
        "post_local_sgd(start_iter=2, subgroup_size=PART)",
        lambda world: ref.Alone(2, part(world)),
        lambda world: (ch_ddp.post_localSGD_hook, ch_ddp.PostLocalSGDState(None, None, 2, subgroup_size=part(world))),
        ways=(ATTACH, REGISTER, FAR),
        equal=False,
    ),
    _row("quant8", ref.Blocks(8), (ch_quant.quant8_hook, None), in_rank_order=True),
    _row("quant4", ref.Blocks(4), in_rank_order=True),
    _row("quant4(block=48, exempt=False)", ref.Blocks(4, 48, exempt=False), in_rank_order=True),
    _row("quant(rotation='hadamard')", ref.Blocks(4, rotated=True), in_rank_order=True),
    _row("quant4(rounding='stochastic')", ref.Blocks(4, random=True), in_rank_order=True),
    _row("quant4(error_feedback=True)", ref.Blocks(4, feedback=True), in_rank_order=True),
    _row(
        "quant8(error_feedback=True, residual='int8')",
        ref.Blocks(8, feedback=True, packed=True),
        in_rank_order=True,
    ),
    _row("quant2", ref.Blocks(2, feedback=True), in_rank_order=True),
    _row("sign", ref.Blocks(1, feedback=True), in_rank_order=True),
    _row("quantize_per_tensor", ref.Affine(), (ch_quant.quantization_pertensor_hook, None), in_rank_order=True),
    _row("quantize_per_channel", ref.Affine(512), (ch_quant.quantization_perchannel_hook, None), in_rank_order=True),
    _row("powersgd(rank=1)", ref.LowRank(1)),
    _row("powersgd(rank=4)", ref.LowRank(4)),
    _row("powersgd(rank=2, residual='averaged')", ref.LowRank(2, averaged=True)),
    _row("powersgd(rank=2, warm_start=False, error_feedback=False)", ref.LowRank(2, feedback=False, warm=False)),
    Row(
        "powersgd(rank=2, start_iter=2)",
        lambda _: ref.LowRank(2, start=2),
        lambda _: (ch_powersgd.powerSGD_hook, ch_powersgd.PowerSGDState(None, 2, 2)),
        steps=4,
    ),
    _row("batched_powersgd(rank=4)", ref.LowRank(4, bucket=True)),
    Row(
        "batched_powersgd(rank=2, start_iter=2)",
        lambda _: ref.LowRank(2, start=2, bucket=True),
        lambda _: (ch_powersgd.batched_powerSGD_hook, ch_powersgd.PowerSGDState(None, 2, 2)),
        steps=4,
    ),
    _row("bf16_wrapper(powersgd(rank=4))", ref.LowRank(4, wire=BF16)),
    _row("randomk", ref.RandomK()),
    _row("randomk(feedback=False)", ref.RandomK(feedback=False)),
    _row("bf16_wrapper(randomk)", ref.RandomK(wire=BF16)),
    _row("topk", ref.TopK(), in_rank_order=True),
    _row("topk(bits=2)", ref.TopK(bits=2), in_rank_order=True),
    _row("topk(bits=32, density=0.03, chunk=1000, decay=0.9)", ref.TopK(0.03, 1000, 32, 0.9), in_rank_order=True),
    _row("bf16_wrapper(topk(bits=32))", ref.TopK(bits=32, wire=BF16)),
    _row("error_feedback(bf16_compress)", ref.Feedback(ref.Cast(BF16, "bf16"))),
    _row(
        "error_feedback(fp16_compress(accumulate='fp32'))",
        ref.Feedback(ref.Cast(FP16, "fp16, fp32 sum")),
        in_rank_order=True,
    ),
    _row("error_feedback(topk(feedback=False))", ref.Feedback(ref.TopK(feedback=False)), in_rank_order=True),
    _row("warmup(bf16_compress, powersgd(rank=2), steps=1)", ref.Warmup(ref.Cast(BF16, "bf16"), ref.LowRank(2), 1)),
    _row(
        'policy({"*3*": bf16_compress, "*": quant4})',
        ref.Policy((("*3*", ref.Cast(BF16, "bf16")), ("*", ref.Blocks(4)))),
    ),
    _row("two_level(allreduce, nodes=NODES)", ref.Exact(), in_rank_order=True),
    _row(
        "two_level(bf16_compress, inside=bf16_compress, nodes=NODES)",
        ref.Cast(BF16, "bf16, two levels"),
        in_rank_order=True,
    ),
    _row("two_level(quant4, nodes=NODES)", ref.BlocksOnLevels(4), in_rank_order=True),
    _row("two_level(quant4, inside=quant8, nodes=NODES)", ref.BlocksOnLevels(4, inside=True), in_rank_order=True),
    _row("two_level(powersgd(rank=2), nodes=NODES)", ref.Conserved(), in_rank_order=True),
)
BLOCK = SIZES.largest_block
VARIANTS = tuple(
    _row(f"topk(density=0.0003, chunk={chunk})", ref.TopK(0.0003, chunk), in_rank_order=True)
    for chunk in ((BLOCK - 1) ** 2, BLOCK**2, (BLOCK + 1) ** 2)
)
"""Hooks for the sizes of one package. One entry of a chunk is found fastest with blocks of the root of the chunk."""
BY_EXPR = {row.expr: row for row in (*ROWS, *VARIANTS)}


def cases() -> list[tuple[Row, str, int]]:
    """Return every hook with each way and number of ranks."""
    return [(row, way, world) for row in ROWS for way in row.ways for world in WORLDS]
