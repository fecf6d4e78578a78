"""Check that the installed torch has the private names that this package uses."""

import torch

from commhooks import HookNotSupportedError

TESTED = "2.10, 2.13, 2.14 and 2.15"
"""The versions of torch that :mod:`ch_fsdp.torch_internals` was written for."""


def missing(owner: str, names: str) -> HookNotSupportedError:
    """Return the error for a torch without ``names``."""
    return HookNotSupportedError(
        f"torch {torch.__version__}: {owner} has no {names}, which ch-fsdp needs. ch-fsdp works with torch {TESTED}. "
        "Install one of these, or report this error with the output of `python -m commhooks env`"
    )


def need(owner: object, *names: str) -> None:
    """Raise :class:`HookNotSupportedError` unless ``owner`` has all of ``names``."""
    absent = [name for name in names if not hasattr(owner, name)]
    if absent:
        raise missing(owner.__name__ if isinstance(owner, type) else type(owner).__name__, ", ".join(absent))
