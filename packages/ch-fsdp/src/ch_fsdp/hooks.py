"""FSDP1's communication hooks with PyTorch's names and signatures, on CPU and CUDA.

The signature is ``hook(state, grad)`` for ``NO_SHARD`` and ``hook(state, grad, output)`` for the sharded strategies. A hook
divides the gradient by ``state.gradient_predivide_factor``, casts it, sums it, casts it back and divides it by
``state.gradient_postdivide_factor``. PyTorch casts before it divides, and divides a second time in 16 bits. Here a value
fits fp16 if the divided value fits, and the last division has the parameter's precision.

The hooks are stateless. Give one to ``model.register_comm_hook(state, hook)``. PyTorch's own ``DefaultState`` and
``LowPrecisionState`` also work.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from ch_core import ProcessGroupTransport, StatelessEngine, record_use
from ch_fsdp.flat_sum import FlatSum, flat_bucket, flat_version
from ch_wrappers import WireCast
from commhooks import DefaultState, LowPrecisionState, Plain, Reduction

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
    """Run :func:`allreduce_hook` or :func:`reduce_scatter_hook` with fp16 on the wire.

    The result has ``state.parameter_type``. A gradient of 16 bits is not cast.

    Args:
        state: group and divide factors.
        grad: 1-D floating tensor, ``(n,)`` or ``(W * n,)``.
        output: 1-D, ``(n,)``, of the sharded strategies.
    """
    _run(_FP16, state, grad, output)


def bf16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Run :func:`fp16_compress_hook` with bf16 on the wire.

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

# commhooks.attach runs these reductions on FSDP2 if it gets a function, or the name "reduce_scatter", which only FSDP1 has.
allreduce_hook.reduction = reduce_scatter_hook.reduction = _PLAIN  # type: ignore[attr-defined]
fp16_compress_hook.reduction = _FP16  # type: ignore[attr-defined]
bf16_compress_hook.reduction = _BF16  # type: ignore[attr-defined]


class Factors(Protocol):
    """The fields that the hooks read of a state: this package's, PyTorch's, or the user's."""

    process_group: dist.ProcessGroup | None
    gradient_predivide_factor: float
    gradient_postdivide_factor: float


def set_factors(flat: FlatSum, state: Factors) -> None:
    """Take the factors before and after the sum from a state. The first is a power of two, and so exact."""
    flat.premultiply = 1.0 / state.gradient_predivide_factor
    flat.divide = state.gradient_postdivide_factor


class _GroupRunner:
    """Scratch memory and reductions of the plain hooks for one process group. A reference to the group would leak it."""

    def __init__(self) -> None:
        self.runner = StatelessEngine()
        self.sums: dict[tuple[int, bool], tuple[FlatSum, Reduction]] = {}

    def run(self, reduction: Reduction, state: Factors, grad: torch.Tensor, output: torch.Tensor | None) -> None:
        key = (id(reduction), output is not None)
        if key not in self.sums:
            self.sums[key] = flat_version(reduction, scatter=output is not None)
        flat, whole = self.sums[key]
        set_factors(flat, state)
        flat.output = output
        self.runner.run(whole, flat_bucket("flat", grad), ProcessGroupTransport(state.process_group))
        flat.output = None


_RUNNERS = WeakIdKeyDictionary()  # process group -> _GroupRunner; PyTorch's states do not support weak references


def _run(reduction: Reduction, state: Factors, grad: torch.Tensor, output: torch.Tensor | None) -> None:
    group = state.process_group if state.process_group is not None else dist.group.WORLD
    runner = _RUNNERS.get(group)
    if runner is None:
        runner = _RUNNERS[group] = _GroupRunner()
    dtype: torch.dtype | None = getattr(state, "parameter_type", None)
    target = grad if output is None else output
    if dtype is not None and output is not None and output.dtype != grad.dtype:
        output.data = output.data.to(grad.dtype)
    runner.run(reduction, state, grad, output)
    if dtype is not None and target.dtype != dtype:
        wide = target.data
        target.data = wide.to(dtype)
        record_use(wide)  # it is freed now, and this stream still reads it
