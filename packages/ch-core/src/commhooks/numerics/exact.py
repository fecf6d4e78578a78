"""Products in the precision of what is multiplied."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
    backends: Any = torch.backends
    backend = backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul
    before = backend.fp32_precision
    if before in ("ieee", "none"):
        yield
        return
    backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        backend.fp32_precision = before
