"""Products in the precision of what is multiplied."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from commhooks.device import product_settings


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Products of fp32 in fp32 on this kind of device, whatever the user allows elsewhere (TF32, bf16).

    For a method that keeps what it did not send: in TF32 what is decoded and what is kept back would each be off by a
    thousandth of itself, and what is lost between them would never be sent. The user's choice is back when the block ends.

    Args:
        device: where the products are made; ``"cuda"``, or any other for the CPU's.

    Example:
        >>> import torch
        >>> allowed = torch.backends.mkldnn.matmul
        >>> allowed.fp32_precision = "bf16"
        >>> with exact_products(torch.device("cpu")):
        ...     print(allowed.fp32_precision)
        ieee
        >>> allowed.fp32_precision
        'bf16'
        >>> allowed.fp32_precision = "none"
    """
    settings = product_settings(device)
    backend = settings[0]
    if backend.fp32_precision in ("ieee", "none"):
        yield
        return
    both = [(each, each.fp32_precision) for each in settings]
    older = _older_setting()
    if older is not None:
        # Set by `backend.fp32_precision` alone it would contradict the newer one, and torch refuses CUDA products then.
        torch.set_float32_matmul_precision("highest")
    else:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for each, before in both:
            if each.fp32_precision != before:
                each.fp32_precision = before


def _older_setting() -> str | None:
    """What the older of torch's two settings, ``set_float32_matmul_precision`` or ``allow_tf32``, says; ``None`` where it
    was not used.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # only the newer one was set: torch calls that a mix
        return None
