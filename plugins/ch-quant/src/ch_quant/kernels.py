"""What does the arithmetic of a chunk: torch's operations, or Triton's kernels. The bytes on the wire are the same."""

from types import ModuleType
from typing import Literal

import torch

from ch_quant.codec import Codec, Workspace
from commhooks import HookConfigError, StepContext

Kernel = Literal["torch", "triton"]


def check_kernel(kernel: Kernel, codec: Codec, device: torch.device | None = None) -> None:
    """Refuse a kernel that cannot run.

    Args:
        kernel: ``"torch"`` or ``"triton"``.
        codec: the format.
        device: of the numbers, where that is known.

    Raises:
        HookConfigError: Triton is not installed, has no kernel for the format, or cannot reach the device.
    """
    if kernel not in ("torch", "triton"):
        raise HookConfigError(f"kernel={kernel!r}: expected 'torch' or 'triton'")
    if kernel == "triton":
        found = _triton()
        found.check_codec(codec)
        if device is not None and device.type != "meta":
            found.check_device(device)


def workspace(kernel: Kernel, codec: Codec, ctx: StepContext, device: torch.device, rows: int) -> Workspace:
    """Memory and arithmetic for chunks of up to ``rows`` blocks; raises what :func:`check_kernel` raises."""
    check_kernel(kernel, codec, device)
    if kernel == "torch" or device.type == "meta":  # a dry run computes nothing
        return Workspace(codec, ctx, device, rows)
    made: Workspace = _triton().TritonWorkspace(codec, ctx, device, rows)
    return made


def _triton() -> ModuleType:
    try:
        from ch_quant import triton_codec
    except ImportError as error:
        raise HookConfigError(
            f"kernel='triton' needs Triton, which cannot be imported here ({error}): pip install 'ch-quant[triton]', or "
            "leave kernel out: torch's operations send the same bytes"
        ) from error
    return triton_codec
