"""Global settings that a user may have changed: torch's default dtype and default device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

AMBIENTS = ("", "float64", "bfloat16", "meta")


@contextmanager
def ambient(name: str) -> Iterator[None]:
    """Set a default dtype, or the default device ``meta``, for the calling thread's step. An empty name sets nothing."""
    if not name:
        yield
    elif name == "meta":
        with torch.device("meta"):
            yield
    else:
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, name))
        try:
            yield
        finally:
            torch.set_default_dtype(before)
