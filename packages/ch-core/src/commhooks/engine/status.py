"""The status message: what ranks tell one another at the end of every step, and what follows from it.

One all-reduced vector of ``W + 1`` fp32 numbers per step::

    element r   = code of rank r + 4 * clock of rank r      (0 from every other rank)
    element W   = number of ranks that saw something reduced that was not finite, or NaN

The code says where rank r's reduction raised, 0 if nowhere. The clock counts the steps that rank r has behind it;
ranks whose clocks differ would soon ask for different collectives. Clock 0 is "does not count": a rank that has
run out of input. Both fit exactly: 4 * 2**18 is below 2**24. Texts follow only after a failure, in messages of a
fixed size. All ranks see the same vector and therefore decide alike.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from commhooks.engine.host_copy import HostCopy
from commhooks.errors import CommHooksError, RankMismatchError, RemoteHookError
from commhooks.requests import AllGather, AllReduce, Request

ENCODE, BETWEEN, DECODE = 1, 2, 3
WHERE = {ENCODE: "before its first collective", BETWEEN: "between collectives", DECODE: "after its last collective"}
TEXT_BYTES = 512
_CODES, _CLOCKS = 4, 2**18 - 1

Exchange = Callable[[Request], None]
"""Carries out one request over all ranks and returns when it is done."""


class StepJudge(Protocol):
    """Who uses the gradients: an optimizer, a manager. Asked whether the steps since :meth:`begin` were used.

    Several steps may wait for one answer: their gradients add up, and are used together or not at all.
    """

    def begin(self) -> None:
        """A step begins, and those before it have been answered for."""

    def end(self) -> None:
        """A step has ended; its gradients may be used from now on."""

    def used(self) -> bool | None:
        """Whether the steps since :meth:`begin` were used; ``None`` while that is open."""

    def doubt(self) -> CommHooksError | None:
        """Why it can never be told, if so; :meth:`used` is ``False`` then. Raised on all ranks."""

    def clock(self) -> int:
        """Steps used so far, equal on all ranks."""

    def follow(self, clock: int) -> None:
        """This rank took no part in what the others have used; their clock says so."""


class Status:
    """This rank's part of the message, and after :meth:`received` everybody's.

    Args:
        rank, world: position in the group.
        code: where this rank's reduction raised, 0 if nowhere.
        clock: steps behind this rank; ``None`` if it does not count.
        sums: of what was reduced, see :func:`finiteness`.
        device: where the collectives of the step happened.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        code: int,
        clock: int | None,
        sums: Sequence[torch.Tensor | float],
        device: torch.device,
    ) -> None:
        self.rank, self.world = rank, world
        mine = code + _CODES * (0 if clock is None else 1 + clock % _CLOCKS)
        self.vector = torch.zeros(world + 1, dtype=torch.float32, device=device)
        self.vector[rank] = mine
        unread = [s.to(device) for s in sums if isinstance(s, torch.Tensor)]
        if unread:  # 0, or NaN
            torch.sum(torch.stack(unread).mul_(0.0), 0, dtype=torch.float32, out=self.vector[world])
        if not math.isfinite(sum(s for s in sums if isinstance(s, float))):
            self.vector[world] = 1
        self._copy: HostCopy | None = None
        self._values: list[float] | None = None
        self._failed: dict[int, int] = {}
        self._clocks: dict[int, int] = {}

    def message(self) -> AllReduce:
        """What makes it common to all ranks."""
        return AllReduce(self.vector, "sum")

    def received(self) -> None:
        """The message, if there was one, has come. On CUDA it is read only when needed."""
        self._copy = HostCopy(self.vector)

    def _read(self) -> list[float]:
        if self._values is None:
            self._values = (self._copy or HostCopy(self.vector)).values()
            mine = list(enumerate(int(value) for value in self._values[: self.world]))
            self._failed = {rank: value % _CODES for rank, value in mine if value % _CODES}
            self._clocks = {rank: value // _CODES - 1 for rank, value in mine if value >= _CODES}
        return self._values

    @property
    def failed(self) -> dict[int, int]:
        """Rank -> code of those whose reduction raised."""
        self._read()
        return self._failed

    @property
    def clocks(self) -> dict[int, int]:
        """Rank -> steps behind it, of those that count."""
        self._read()
        return self._clocks

    def neutral(self) -> torch.Tensor:
        """``(1,)``, where the message is: a number that changes nothing that it is added to, or NaN if a rank's reduction raised.
        Nobody waits for it.
        """
        failed = self.vector[: self.world].remainder(_CODES).sum(0, keepdim=True) > 0
        return torch.where(failed, math.nan, -0.0)

    def incomplete(self) -> bool:
        """Whether a rank did not count: it had run out of input."""
        return len(self.clocks) < self.world

    def good(self) -> bool:
        """No rank failed, all are at the same step, and everything reduced was finite."""
        bad = self._read()[self.world]
        return not self._failed and len(set(self._clocks.values())) <= 1 and bad == 0 and math.isfinite(bad)

    def error(self, name: str, own: BaseException | None, carry_out: Exchange | None) -> BaseException | None:
        """The error that this rank raises for the step, ``None`` if it was good or only not finite.

        Args:
            name: of the reduction.
            own: what was raised on this rank.
            carry_out: for the texts, which are exchanged only if some rank failed; ``None`` goes without.
        """
        failed = self.failed
        if failed:
            texts = self._texts(own, carry_out) if self.world > 1 and carry_out is not None else {}
            if own is not None:
                return own
            lines = "; ".join(f"rank {r} {WHERE[code]}: {texts.get(r, 'see its log')}" for r, code in failed.items())
            return RemoteHookError(
                f"{name} raised on another rank, so this step's gradients are not valid on any rank. {lines}"
            )
        if own is not None:  # over a manager nobody hears what a healing member says; it knows its own error
            return own
        clocks = self.clocks
        return out_of_step(name, clocks) if len(set(clocks.values())) > 1 else None

    def _texts(self, own: BaseException | None, carry_out: Exchange) -> dict[int, str]:
        mine = b"" if own is None else described(own).encode(errors="replace")[:TEXT_BYTES]
        device = self.vector.device
        text = torch.tensor(list(mine.ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8, device=device)
        everyone = torch.empty(self.world * TEXT_BYTES, dtype=torch.uint8, device=device)
        carry_out(AllGather(text, everyone))
        rows = everyone.view(self.world, TEXT_BYTES).cpu()
        return {r: bytes(rows[r].tolist()).rstrip(b"\0").decode(errors="replace") for r in range(self.world)}


def described(error: BaseException) -> str:
    """Return type and text of an exception. Its ``__str__`` may raise, and peers wait for the text."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose text could not be formatted"


def out_of_step(name: str, clocks: dict[int, int]) -> CommHooksError:
    """The error of ranks that have different numbers of steps behind them."""
    lines = ", ".join(f"rank {rank}: {clock}" for rank, clock in clocks.items())
    return RankMismatchError(
        f"{name}: the ranks are not at the same step ({lines}), so gradients of different steps were averaged. The numbers "
        "count committed steps and, with optimizer=, scaler= or a manager, its steps too. A rank skipped an optimizer "
        "step, ran one under no_sync(), rolled back, or resumed alone. Load the same checkpoint on all ranks, or attach anew"
    )


def finiteness(tensor: torch.Tensor) -> torch.Tensor | float:
    """A number that is finite if all of the tensor's are; 0-d on a CUDA device, where nobody waits for it."""
    if tensor.device.type != "cpu":  # in a wider type, where a sum does not overflow
        return tensor.sum(dtype=torch.float32 if tensor.dtype.itemsize < 4 else torch.float64)
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    total = tensor.sum().item()
    if math.isfinite(total) or not tensor.numel():
        return 0.0
    low, high = tensor.aminmax()  # the sum may have overflowed where no number has
    return (low - low + high - high).item()
