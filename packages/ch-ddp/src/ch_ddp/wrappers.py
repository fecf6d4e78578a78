"""The 16-bit wrappers.

Around one of our reductions or hooks, a wrapper changes what travels: collectives are cast, the algebra and the state
stay in their own precision. Around a foreign hook it casts the bucket before the hook and its result back after it.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch

from ch_ddp.reductions import Accumulate, Rounding
from commhooks.ddp import BareHook, as_hook
from commhooks.errors import HookConfigError
from commhooks.reduction import Reduction
from commhooks.typing import GradBucket
from commhooks.wire import NAMES, WireCast

Dtype = Literal["bf16", "fp16"]
Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


def fp16_compress_wrapper(
    hook: Hook | Reduction, *, accumulate: Accumulate = "wire", rounding: Rounding = "nearest"
) -> Any:
    """``hook`` with fp16 on the wire.

    Args:
        hook: a reduction, one of our hooks, or any ``(state, bucket) -> Future``.
        accumulate: ``"wire"``, or ``"fp32"`` to sum in fp32 (our reductions only).
        rounding: ``"nearest"`` or ``"stochastic"`` (our reductions only).

    Returns:
        A reduction for a reduction, a hook for a hook. The result has the bucket's own dtype; it can be pickled if
        ``hook`` can, and wrapped again.

    Raises:
        HookConfigError: the hook sends nothing that could be cast, or cannot take the options.

    Example:
        >>> from ch_ddp import allreduce_hook, fp16_compress_wrapper
        >>> fp16_compress_wrapper(allreduce_hook)
        <hook fp16_wrapper(allreduce)>
    """
    return _wrap(hook, "fp16", accumulate, rounding)


def bf16_compress_wrapper(
    hook: Hook | Reduction, *, accumulate: Accumulate = "wire", rounding: Rounding = "nearest"
) -> Any:
    """``hook`` with bf16 on the wire; see :func:`fp16_compress_wrapper`."""
    return _wrap(hook, "bf16", accumulate, rounding)


def _wrap(hook: Hook | Reduction, dtype: Dtype, accumulate: Accumulate, rounding: Rounding) -> Any:
    if isinstance(hook, Reduction):
        return WireCast(hook, dtype, accumulate=accumulate, rounding=rounding)
    carried = getattr(hook, "reduction", None)
    if isinstance(carried, Reduction):
        return as_hook(WireCast(carried, dtype, accumulate=accumulate, rounding=rounding))
    if callable(carried):
        factory = _CastFactory(carried, dtype, accumulate, rounding)
        return as_hook(factory, f"{dtype}_wrapper({getattr(hook, '__name__', 'hook')})")
    if not callable(hook):
        raise HookConfigError(f"{dtype}_wrapper wraps a reduction or a hook function, got {type(hook).__name__}")
    if (accumulate, rounding) != ("wire", "nearest"):
        raise HookConfigError(
            f"{dtype}_wrapper casts a foreign hook's bucket and sees no collective: accumulate={accumulate!r}, "
            f"rounding={rounding!r} cannot be applied; leave them out"
        )
    return CastBucket(hook, dtype)


class _CastFactory:
    """Makes the wrapped reduction from a hook's state."""

    def __init__(self, make: Callable[[Any], Reduction], dtype: Dtype, accumulate: Accumulate, rounding: Rounding):
        self.make, self.dtype, self.accumulate, self.rounding = make, dtype, accumulate, rounding

    def __call__(self, state: Any) -> WireCast:
        return WireCast(self.make(state), self.dtype, accumulate=self.accumulate, rounding=self.rounding)


class CastBucket:
    """A foreign hook that is given the bucket in 16 bits; its result is cast back into the original buffer."""

    def __init__(self, hook: Hook, dtype: Dtype) -> None:
        self.hook, self.dtype = hook, dtype
        self.__name__ = self.__qualname__ = f"{dtype}_wrapper({getattr(hook, '__name__', type(hook).__name__)})"

    def __call__(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        original = bucket.buffer()
        bucket.set_buffer(original.to(NAMES[self.dtype]))
        return self.hook(state, bucket).then(lambda done: self._cast_back(done, original))

    @staticmethod
    def _cast_back(done: torch.futures.Future[Any], original: torch.Tensor) -> torch.Tensor:
        value = done.value()
        return original.copy_(value[0] if isinstance(value, list | tuple) else value)

    def __repr__(self) -> str:
        return f"<hook {self.__name__}>"


__all__ = ["BareHook", "CastBucket", "bf16_compress_wrapper", "fp16_compress_wrapper"]
