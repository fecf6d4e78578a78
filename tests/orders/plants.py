"""Defects that are put back into the library. Late runs must find each of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch

from commhooks.transport.process_group import ProcessGroupTransport, SeveralWorks


def last_half_decides() -> AbstractContextManager[Any]:
    """Complete a message that two works carry with the second one, as if it stood for both."""
    return mock.patch.object(SeveralWorks, "future", lambda self: self._works[-1].future())


class _Hasty:
    """A work that nobody waits for."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout: float | None) -> None:
        """Return too early."""

    def future(self) -> Any:
        return self._work.future()


def decodes_too_early() -> AbstractContextManager[Any]:
    """Decode packed numbers that are gathered before they have arrived, as of ``quant4``."""
    real = ProcessGroupTransport.all_gather

    def hasty(self: ProcessGroupTransport, output: torch.Tensor, input: torch.Tensor) -> Any:
        work = real(self, output, input)
        return _Hasty(work) if output.dtype == torch.uint8 else work

    return mock.patch.object(ProcessGroupTransport, "all_gather", hasty)


PLANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "the last half decides": last_half_decides,
    "decodes too early": decodes_too_early,
}
