"""Ranges for torch's profiler, free of charge while none is running."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_OFF: AbstractContextManager[Any] = nullcontext()
_on_this_thread = getattr(torch.autograd, "_profiler_enabled", lambda: True)


def profiled(reduction: str, what: str, stage: int) -> AbstractContextManager[Any]:
    """The range ``commhooks::REDUCTION::WHATn``. A ``record_function`` that nobody records costs more than starting a
    collective.
    """
    on_any_thread = getattr(torch.autograd.profiler, "_is_profiler_enabled", False)
    on = on_any_thread or _on_this_thread()
    return torch.profiler.record_function(f"commhooks::{reduction}::{what}{stage}") if on else _OFF
