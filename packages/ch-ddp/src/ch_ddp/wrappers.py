"""Wrappers that send 16 bits.

Around a reduction, or a hook made from one, a wrapper casts the messages. Algebra and state keep their precision. Around
a foreign hook it casts the bucket before the hook runs, and casts the result back.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch

from ch_ddp.reductions import Accumulate
from ch_wrappers import WireCast
from commhooks import GradBucket, HookConfigError, Reduction, composed

Dtype = Literal["bf16", "fp16"]
Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


def fp16_compress_wrapper(hook: Hook | Reduction, *, accumulate: Accumulate = "wire") -> Any:
    """Return ``hook`` with fp16 on the wire.

    Args:
        hook: reduction, hook made from a reduction, or any ``(state, bucket) -> Future``.
        accumulate: ``"wire"`` sums in 16 bits, ``"fp32"`` in fp32 (reductions only).

    Returns:
        A reduction for a reduction, a hook for a hook. The average has the bucket's dtype. The result pickles if
        ``hook`` does, and may be wrapped again.

    Raises:
        HookConfigError: the hook sends nothing that could be cast, or does not support the option.

    Example:
        >>> from ch_ddp import allreduce_hook, fp16_compress_wrapper
        >>> fp16_compress_wrapper(allreduce_hook)
        <hook fp16_wrapper(allreduce)>
    """
    return _wrap(hook, "fp16", accumulate)


def bf16_compress_wrapper(hook: Hook | Reduction, *, accumulate: Accumulate = "wire") -> Any:
    """Return ``hook`` with bf16 on the wire. Arguments are those of :func:`fp16_compress_wrapper`."""
    return _wrap(hook, "bf16", accumulate)


def _wrap(hook: Hook | Reduction, dtype: Dtype, accumulate: Accumulate) -> Any:
    carried = hook if isinstance(hook, Reduction) else getattr(hook, "reduction", None)
    if isinstance(carried, Reduction) or callable(carried):
        make = partial(_cast, dtype=dtype, accumulate=accumulate)  # a lambda would not pickle
        return composed(f"{dtype}_wrapper", [hook], make)
    if not callable(hook):
        raise HookConfigError(f"{dtype}_wrapper got a {type(hook).__name__}. Give a reduction or a hook function")
    if accumulate != "wire":
        raise HookConfigError(
            f"{dtype}_wrapper cannot apply accumulate={accumulate!r} to a foreign hook, because it does not see the hook's "
            "collectives. Leave the option out"
        )
    return CastBucket(hook, dtype)


def _cast(parts: list[Reduction], dtype: Dtype, accumulate: Accumulate) -> WireCast:
    return WireCast(parts[0], dtype, accumulate=accumulate)


class CastBucket:
    """Foreign hook that receives the bucket in 16 bits. Its result is cast back into the original buffer."""

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
