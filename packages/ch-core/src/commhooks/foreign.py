"""Hooks that are not ours: any ``(state, bucket) -> Future[Tensor]`` callable, called through the trampoline.

Its collectives are its own, so they cannot be counted, ordered or finished for it. What can be done is to check
every result: torch reads a wrong one through raw storage, and dies of ``None``.
"""

from collections.abc import Callable
from typing import Any

import torch

from commhooks.errors import HookResultError
from commhooks.typing import GradBucket

TensorFuture = torch.futures.Future[torch.Tensor]


class ForeignDriver:
    """Calls a foreign hook and checks what it gives back.

    Args:
        hook: the callable: a function, a partial, an object; its second parameter may have any name.
        state: given to it as first argument.
        name: for errors.
        timeout: seconds after which a future that was never completed is an error.
    """

    def __init__(self, hook: Callable[[Any, Any], Any], state: object, name: str, timeout: float) -> None:
        self.hook, self.state, self.name, self.timeout = hook, state, name, timeout
        self.calls = 0
        self.error: BaseException | None = None

    def __call__(self, bucket: GradBucket) -> TensorFuture:
        self.calls += 1
        buffer = bucket.buffer()
        result = self.hook(self.state, bucket)
        if not isinstance(result, torch._C.Future):
            raise HookResultError(
                f"{self.name} returned {type(result).__name__} for bucket {bucket.index()}; a DDP hook returns a "
                "torch.futures.Future that holds the reduced buffer"
            )
        return result.then(lambda done: self._checked(done, buffer, bucket.index()))

    def check(self) -> None:
        """Raise the error of the last failure with its own type."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _checked(self, done: TensorFuture, buffer: torch.Tensor, index: int) -> torch.Tensor:
        try:
            value = done.value()
            return checked(value, buffer, self.name, index)
        except BaseException as error:
            self.error = error
            raise


def checked(value: object, buffer: torch.Tensor, name: str, index: int) -> torch.Tensor:
    """``value`` as a tensor that DDP may read as bucket ``index``.

    Raises:
        HookResultError: it is no tensor, or has another size, device, layout or kind of number.
    """
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise HookResultError(f"{name}: the future of bucket {index} holds {type(value).__name__}, not a tensor")
    wrong = []
    if value.numel() != buffer.numel():
        wrong.append(f"{value.numel()} elements instead of {buffer.numel()}")
    if value.device != buffer.device:
        wrong.append(f"device {value.device} instead of {buffer.device}")
    if value.is_floating_point() != buffer.is_floating_point() or value.is_complex() != buffer.is_complex():
        wrong.append(f"dtype {value.dtype} instead of {buffer.dtype}")
    if wrong:
        raise HookResultError(f"{name}: the result of bucket {index} has {', '.join(wrong)}")
    if value.is_sparse or buffer.is_sparse:
        return value
    return value.to(buffer.dtype).contiguous()
