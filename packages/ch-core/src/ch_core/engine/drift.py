"""The drift alarm: compares the numbers that must be equal on all ranks, every few steps.

The ranks gather two integers each: a digest of all parameters and of the state that a reduction shares, and their number. If
digests differ, the ranks search the first difference by bisection. All ranks see the same rows, so all make the same gathers.

A step that is due sends its digest with its first bucket. Parameters do not change between forward and optimizer. On a CPU
the ranks compare at the end of the step. On a GPU they compare when the next step begins, so that the host does not wait.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ch_core.device import HostCopy, is_asynchronous
from ch_core.digest import digests, folded
from ch_core.engine.messages import Batch, Messenger
from ch_core.errors import HookConfigError, RankMismatchError
from ch_core.logs import log
from ch_core.reduction import Reduction
from ch_core.requests import AllGather
from ch_core.state import HookState

Named = Iterable[tuple[str, torch.Tensor]]
Gather = Callable[[torch.Tensor], torch.Tensor]
"""Returns every rank's int64 tensor of shape (2,) as rows of (world_size, 2) on the CPU."""

_ABSENT = -1  # number of tensors that a rank sends if it compares nothing


@dataclass(frozen=True, slots=True)
class Drift:
    """The first number in which ranks differ.

    Attributes:
        step: number of the step since attach, from 0.
        name: parameter, or parameter and field of the state.
        groups: ranks that agree with one another, the largest group first.
    """

    step: int
    name: str
    groups: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        first, *others = self.groups
        if len(first) > len(others[0]):
            odd = [rank for group in others for rank in group]
            differ = f"{_ranks(odd)} differ{'s' * (len(odd) == 1)} from {_ranks(first)}"
        else:
            differ = " and ".join(map(_ranks, self.groups)) + " differ from each other"
        return f"step {self.step}: {self.name} is not equal on all ranks, and it is the first that is not. {differ}"


class RankCheck:
    """Compares parameters and shared state across the ranks of one engine.

    Args:
        every: steps between two comparisons. The first step compares, too.
        on_drift: ``"warn"`` to log each difference, ``"raise"`` to raise it from ``backward()`` on all ranks.

    Attributes:
        checks: number of comparisons so far.
        drift: last difference, or ``None``.
        note: reason why nothing is compared; empty if something is.

    Raises:
        HookConfigError: a value is not legal.
    """

    def __init__(self, every: int, on_drift: str = "warn") -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise HookConfigError(f"check_ranks_every={every!r}: expected a number of steps, 1 or more, or None")
        if on_drift not in ("warn", "raise"):
            raise HookConfigError(f"on_drift={on_drift!r}: expected 'warn' or 'raise'")
        self.every, self.on_drift = every, on_drift
        self.checks = 0
        self.drift: Drift | None = None
        self.note = "no adapter watches it"
        self._tensors: Callable[[], Named] = tuple
        self._ranks: Callable[[], Sequence[int]] = tuple
        self._step = 0  # number of the next step
        self._due = 0  # number of the step whose digests were sent last
        self._names: list[str] = []
        self._rows: torch.Tensor | None = None  # (tensors,) digests of that step
        self._sent: tuple[Batch, torch.Tensor] | None = None
        self._received: HostCopy | None = None
        self._error: RankMismatchError | None = None

    def watch(self, tensors: Callable[[], Named], ranks: Callable[[], Sequence[int]]) -> None:
        """Compare these tensors.

        Args:
            tensors: returns them by name, in an order that is equal on all ranks.
            ranks: returns the global rank of each rank of the group, for texts.
        """
        self._tensors, self._ranks, self.note = tensors, ranks, ""

    def leave(self, note: str) -> None:
        """Compare nothing, for this reason."""
        self.note = note

    def restart(self) -> None:
        """Count steps from 0, because the group of ranks has changed."""
        self._step = 0
        self.abandon()

    def take_error(self) -> RankMismatchError | None:
        """Return the last difference once, as the error to raise on all ranks."""
        error, self._error = self._error, None
        return error

    # -- of an engine

    def begin(
        self, messenger: Messenger, reduction: Reduction, state: HookState, device: torch.device, *, participating: bool
    ) -> BaseException | None:
        """Begin a step: send this rank's digest if the step is due.

        Args:
            messenger: sends the message, which all ranks send at this place.
            reduction: decides which parameters stay equal, and which fields of the state are shared.
            state: its state.
            device: device of the step's messages.
            participating: False if this rank has run out of input. Its optimizer does not step, so it compares nothing.

        Returns:
            The exception of this rank's digest. It must fail the step on all ranks.
        """
        messenger.device = device
        self._settle(messenger.gather)
        if not self._counts():
            return None
        error: BaseException | None = None
        self._names, self._rows = [], None
        try:
            if participating:
                self._digest([*_kept_equal(self._tensors(), reduction), *_shared(state, reduction)], device)
        except BaseException as raised:  # peers wait for this rank's message
            error, self._rows = raised, None
        received = torch.empty(messenger.transport.world_size * 2, dtype=torch.int64, device=device)
        self._sent = messenger.post(AllGather(self._message(device), received)), received
        return error

    def finish(self, messenger: Messenger) -> None:
        """End a step: receive the digests of all ranks. On a CPU, compare them."""
        if self._sent is None:
            return
        (batch, received), self._sent = self._sent, None
        batch.wait(messenger.timeout)
        self._received = HostCopy(received)
        if not is_asynchronous(received.device):
            self._settle(messenger.gather)

    def abandon(self) -> None:
        """Drop the comparison of a step that never finishes."""
        self._sent = self._received = self._rows = None

    # -- without an engine

    def prepare(self, *, apart: str = "") -> bool:
        """Begin a step without an engine. Return True if it is due. :meth:`compare` then follows on all ranks.

        Args:
            apart: reason why the ranks' parameters differ now, such as local SGD; empty if they must be equal.
        """
        self.note = apart
        if not self._counts() or apart:
            return False
        self._digest(list(self._tensors()), torch.device("cpu"))
        return True

    def compare(self, gather: Gather) -> None:
        """Compare the digests of :meth:`prepare`."""
        self._compare(gather(self._message(torch.device("cpu"))), gather)

    # -- the comparison

    def _counts(self) -> bool:
        """Count a step. Return True if it is due."""
        step, self._step = self._step, self._step + 1
        if step % self.every:
            return False
        self._due = step
        return True

    def _digest(self, named: list[tuple[str, torch.Tensor]], device: torch.device) -> None:
        self._names = [name for name, _ in named]
        found = [one.to(device) for one in digests([tensor for _, tensor in named])]
        self._rows = torch.stack(found) if found else torch.empty(0, dtype=torch.int64, device=device)

    def _message(self, device: torch.device, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Return the digest of some tensors and their number, shape (2,)."""
        if self._rows is None:
            return torch.tensor([0, _ABSENT], dtype=torch.int64, device=device)
        rows = self._rows[first:last]
        return torch.stack([folded(rows), torch.full_like(rows.new_empty(()), rows.numel())])

    def _settle(self, gather: Gather) -> None:
        if self._received is not None:
            received, self._received = self._received, None
            self._compare(received.tensor().view(-1, 2), gather)

    def _compare(self, rows: torch.Tensor, gather: Gather) -> None:
        self.checks += 1
        counts = [count for _, count in rows.tolist()]
        if len(_groups(rows)) > 1:
            low, high = 0, max(counts)  # the first difference is in [low, high)
            while high - low > 1:
                middle = (low + high) // 2
                if len(_groups(gather(self._message(rows.device, 0, middle)))) > 1:
                    high = middle
                else:
                    low = middle
            groups = _groups(gather(self._message(rows.device, low, low + 1)))
            self._alarm(self._names[low] if low < len(self._names) else f"tensor {low}", groups)
        self._rows = None

    def _alarm(self, name: str, groups: Mapping[tuple[int, int], list[int]]) -> None:
        names = self._ranks()
        found = [tuple(names[rank] for rank in ranks) for ranks in sorted(groups.values(), key=len, reverse=True)]
        self.drift = Drift(self._due, name, tuple(found))
        if self.on_drift == "raise":
            self._error = RankMismatchError(
                f"{self.drift}. Load one checkpoint on all ranks. Look for code that changes parameters on one rank, for an "
                "optimizer that is not deterministic, and for faulty memory. on_drift='warn' continues"
            )
        else:
            log.warning("%s", self.drift)


def _groups(rows: torch.Tensor) -> dict[tuple[int, int], list[int]]:
    """Return the ranks of each different row. Ranks that compare nothing are left out."""
    found: dict[tuple[int, int], list[int]] = {}
    for rank, (digest, count) in enumerate(rows.tolist()):
        if count != _ABSENT:
            found.setdefault((digest, count), []).append(rank)
    return found


def _kept_equal(named: Named, reduction: Reduction) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in named if reduction.keeps_equal(name)]


def _shared(state: HookState, reduction: Reduction) -> list[tuple[str, torch.Tensor]]:
    shared = reduction.shared_fields
    found = []
    for name, field in sorted(state.versions.committed):
        if field in shared and reduction.keeps_equal(name):
            found.append((f"{name} ({field} of the hook's state)", state.versions.committed[name, field].tensor))
    return found


def _ranks(ranks: Collection[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8])) + (f" and {len(ranks) - 8} others" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
