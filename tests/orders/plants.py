"""Defects that are put back into the library. Late runs must find each of them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from ch_core import SimulatedTransport
from ch_core.transport.base import SeveralWorks
from ch_core.transport.process_group import ProcessGroupTransport


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


@contextmanager
def decodes_too_early() -> Iterator[None]:
    """Decode packed numbers that are gathered before they have arrived, as of ``quant4``."""
    with ExitStack() as patches:
        for transport in (ProcessGroupTransport, SimulatedTransport):
            patches.enter_context(mock.patch.object(transport, "all_gather", _hasty(transport.all_gather)))
        yield


def _hasty(real: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather(self: object, output: torch.Tensor, input: torch.Tensor) -> Any:
        work = real(self, output, input)
        return _Hasty(work) if output.dtype == torch.uint8 else work

    return all_gather


PLANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "the last half decides": last_half_decides,
    "decodes too early": decodes_too_early,
}
