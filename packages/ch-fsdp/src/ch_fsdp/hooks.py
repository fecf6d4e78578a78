"""FSDP1's communication hooks, with PyTorch's names and signatures, on CPU as on CUDA.

``hook(state, grad)`` for ``NO_SHARD``, ``hook(state, grad, output)`` for the sharded strategies. The gradient is
divided by ``state.gradient_predivide_factor``, cast, summed, cast back and divided by
``state.gradient_postdivide_factor``. PyTorch casts before it divides and divides again in 16 bits: here a value
survives fp16 if its pre-divided self does, and the last division is made in the parameter's precision.

They are stateless: hand one to ``model.register_comm_hook(state, hook)``, or let ``commhooks.attach`` do it. PyTorch's
own ``DefaultState`` and ``LowPrecisionState`` will do as well.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from ch_fsdp.flat_reduction import FlatSum, flat_bucket, flat_version
from commhooks import DefaultState, LowPrecisionState, Plain, Reduction, WireCast
from commhooks.adapters import ProcessGroupTransport, StatelessEngine

__all__ = [
    "DefaultState",
    "LowPrecisionState",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "reduce_scatter_hook",
]


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """Average ``grad`` over the ranks, in place (``NO_SHARD``).

    Args:
        state: group and divide factors.
        grad: 1-D floating tensor, the unit's flat gradient.
    """
    _run(_PLAIN, state, grad, None)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """Average ``grad`` over the ranks and leave this rank's shard in ``output``.

    Args:
        state: group and divide factors.
        grad: 1-D, ``W * n`` elements; scaled in place.
        output: 1-D, ``n`` elements.
    """
    _run(_PLAIN, state, grad, output)


def fp16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """As :func:`allreduce_hook` or :func:`reduce_scatter_hook`, with fp16 on the wire.

    The result has ``state.parameter_type``. A gradient of 16 bits travels as it is.
    """
    _run(_FP16, state, grad, output)


def bf16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """As :func:`fp16_compress_hook`, with bf16 on the wire.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> grad = torch.tensor([1.0, 1.001])
        >>> bf16_compress_hook(LowPrecisionState(dist.group.WORLD), grad)
        >>> grad
        tensor([1., 1.])
        >>> dist.destroy_process_group()
    """
    _run(_BF16, state, grad, output)


_PLAIN: Reduction = Plain()
_FP16 = WireCast(Plain(), "fp16", name="fp16_compress")
_BF16 = WireCast(Plain(), "bf16", name="bf16_compress")

# What commhooks.attach runs when it is given one of these functions.
allreduce_hook.reduction = reduce_scatter_hook.reduction = _PLAIN  # type: ignore[attr-defined]
fp16_compress_hook.reduction = _FP16  # type: ignore[attr-defined]
bf16_compress_hook.reduction = _BF16  # type: ignore[attr-defined]


class Factors(Protocol):
    """What the hooks read of a state: this package's, PyTorch's, or one of the user's own."""

    process_group: dist.ProcessGroup | None
    gradient_predivide_factor: float
    gradient_postdivide_factor: float


class _Bare:
    """What the plain hooks keep for one process group, but not the group: it would live for ever."""

    def __init__(self) -> None:
        self.runner = StatelessEngine()
        self.sums: dict[tuple[int, bool], tuple[FlatSum, Reduction]] = {}

    def run(self, reduction: Reduction, state: Factors, grad: torch.Tensor, output: torch.Tensor | None) -> None:
        key = (id(reduction), output is not None)
        if key not in self.sums:
            self.sums[key] = flat_version(reduction, scatter=output is not None)
        flat, whole = self.sums[key]
        divide_twice(flat, state)
        flat.output = output
        self.runner.run(whole, flat_bucket("flat", grad), ProcessGroupTransport(state.process_group))
        flat.output = None


def divide_twice(flat: FlatSum, state: Factors) -> None:
    """Take the factors before and after the sum from an FSDP1 state (the first is a power of two: exact)."""
    flat.premultiply = 1.0 / state.gradient_predivide_factor
    flat.divide = state.gradient_postdivide_factor


_BARE = WeakIdKeyDictionary()  # process group -> _Bare; not state: PyTorch's classes take no weak references


def _run(reduction: Reduction, state: Factors, grad: torch.Tensor, output: torch.Tensor | None) -> None:
    group = state.process_group if state.process_group is not None else dist.group.WORLD
    bare = _BARE.get(group)
    if bare is None:
        bare = _BARE[group] = _Bare()
    wanted: torch.dtype | None = getattr(state, "parameter_type", None)
    target = grad if output is None else output
    if wanted is not None and output is not None and output.dtype != grad.dtype:
        output.data = output.data.to(grad.dtype)
    bare.run(reduction, state, grad, output)
    if wanted is not None and target.dtype != wanted:
        held = target.data
        target.data = held.to(wanted)
        if held.is_cuda:  # this stream still reads it when the allocator may hand it to another
            held.record_stream(torch.cuda.current_stream(held.device))
