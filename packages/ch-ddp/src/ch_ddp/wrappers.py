"""The 16-bit wrappers.

Around one of our reductions or hooks, a wrapper changes what travels: collectives are cast, the algebra and the state
stay in their own precision. Around a foreign hook it casts the bucket before the hook and its result back after it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch

from ch_ddp.hook_function import BareHook
from ch_ddp.reductions import Accumulate, Rounding
from commhooks import GradBucket, HookConfigError, Reduction, WireCast, composed

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
    carried = hook if isinstance(hook, Reduction) else getattr(hook, "reduction", None)
    if isinstance(carried, Reduction) or callable(carried):
        make = partial(_cast, dtype=dtype, accumulate=accumulate, rounding=rounding)  # no lambda: hooks are pickled
        return composed(f"{dtype}_wrapper", [hook], make)
    if not callable(hook):
        raise HookConfigError(f"{dtype}_wrapper wraps a reduction or a hook function, got {type(hook).__name__}")
    if (accumulate, rounding) != ("wire", "nearest"):
        raise HookConfigError(
            f"{dtype}_wrapper casts a foreign hook's bucket and sees no collective: accumulate={accumulate!r}, "
            f"rounding={rounding!r} cannot be applied; leave them out"
        )
    return CastBucket(hook, dtype)


def _cast(parts: list[Reduction], dtype: Dtype, accumulate: Accumulate, rounding: Rounding) -> WireCast:
    return WireCast(parts[0], dtype, accumulate=accumulate, rounding=rounding)


class CastBucket:
    """A foreign hook that is given the bucket in 16 bits; its result is cast back into the original buffer."""

    def __init__(self, hook: Hook, dtype: Dtype) -> None:
        self.hook, self.dtype = hook, dtype
        self.__name__ = self.__qualname__ = f"{dtype}_wrapper({getattr(hook, '__name__', type(hook).__name__)})"

    def __call__(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        original = bucket.buffer()
        bucket.set_buffer(original.to(WireCast.DTYPES[self.dtype]))
        return self.hook(state, bucket).then(lambda done: self._cast_back(done, original))

    @staticmethod
    def _cast_back(done: torch.futures.Future[Any], original: torch.Tensor) -> torch.Tensor:
        value = done.value()
        return original.copy_(value[0] if isinstance(value, list | tuple) else value)

    def __repr__(self) -> str:
        return f"<hook {self.__name__}>"


__all__ = ["BareHook", "CastBucket", "bf16_compress_wrapper", "fp16_compress_wrapper"]
