"""Compares ranks before any message whose size depends on hook, options or shapes.

Ranks with different hooks, options or shapes send messages of different sizes, which abort a process on gloo, or
messages of equal size, which silently give wrong numbers. So each rank describes itself by fields, each a list of
lines. Ranks first exchange a hash of every field (:data:`HASH_BYTES` each). If hashes differ, a bisection over hashes
finds the first line that differs, and ranks exchange that line (:data:`LINE_BYTES`). Every message has a fixed size.

The messages go through the store of the process group. A missing rank therefore disturbs no collective of the other
ranks, and the error names it.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import groupby

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_process_group_store
from torch.utils.weak import WeakIdKeyDictionary

from ch_core.errors import CommHooksError, HookTimeoutError, RankMismatchError, TransportError
from ch_core.logs import log

HASH_BYTES, LINE_BYTES = 16, 256
Fingerprint = Mapping[str, Sequence[str]]
"""Fields by name, each a list of lines that must be equal on all ranks. Errors name the field and the first line."""

Gather = Callable[[bytes], list[bytes]]
"""Sends a message of a fixed size, and returns the messages of all ranks in rank order."""

FOLLOWS = ("collectives", "pieces")
"""Fields that differ because the hooks differ. The error then omits them."""

TELL_AFTER = 20.0  # seconds of silence

_ROUNDS = WeakIdKeyDictionary()  # process group -> number of agreements made over it


def agree(subject: str, fields: Fingerprint, gather: Gather, *, expression: str = "") -> None:
    """Compare the fingerprints of the ranks.

    Args:
        subject: of the comparison, for the error.
        fields: lines by field name. Every rank has the same field names.
        gather: over the ranks.
        expression: of this rank, for people. The error shows it if ranks have different ones.

    Raises:
        RankMismatchError: on every rank, naming the differing fields, their values and the ranks.

    Example:
        >>> agree("alone", {"hook": ["powersgd(rank=4)"]}, lambda message: [message])
    """
    names = sorted(fields)
    everyone = [_parts(row) for row in gather(b"".join([_hash(names), *(_hash(fields[name]) for name in names)]))]
    if len({row[0] for row in everyone}) > 1:
        raise RankMismatchError(
            f"ranks are executing different calls (this rank: {subject}). Every rank of the group has to make the "
            "same attach(), load_state_dict() and move() calls, in the same order"
        )
    differing = [name for i, name in enumerate(names) if len({row[i + 1] for row in everyone}) > 1]
    if not differing:
        return
    expressions = _lines(expression, gather) if expression else {}
    if "hook" in differing:
        differing = [name for name in differing if name not in FOLLOWS]
    lines = [f"  {name}: {_difference(fields[name], gather)}" for name in differing]
    if len(expressions) > 1:
        lines = [f"  expression: {_by_rank(expressions)}", *lines]
    raise RankMismatchError(
        f"the ranks disagree on {subject}, so nothing has been communicated or changed:\n"
        + "\n".join(lines)
        + "\nGive every rank the same hook, options, package versions and model, or states that were saved together; "
        "verify_ranks=False turns this check off"
    )


def agree_along(
    subject: str, fields: Fingerprint, groups: Sequence[tuple[dist.ProcessGroup, Fingerprint]], timeout: float
) -> None:
    """Compare the fingerprints over all groups of this rank, one for each axis of a mesh.

    A rank compares itself along each axis in turn, and forwards an error from another axis. A mismatch anywhere in the
    mesh therefore raises on every rank.

    Args:
        subject: of the comparison, for the error.
        fields: lines that must be equal on every rank, by name.
        groups: axes, each with further fields that must be equal along this axis only.
        timeout: seconds to wait for a missing rank.

    Raises:
        RankMismatchError: on every rank that the axes reach.
    """
    received: RankMismatchError | None = None
    for group, more in (*groups, *groups[:-1]):
        if group.size() == 1:
            continue
        forwarded = {"received along another axis": str(received).splitlines() if received is not None else []}
        try:
            agree(subject, {**fields, **more, **forwarded}, StoreExchange(group, timeout))
        except RankMismatchError as error:
            received = received or error
    if received is not None:
        raise received


def _difference(lines: Sequence[str], gather: Gather) -> str:
    """Return the first line in which ranks differ, by rank, found by bisection over hashes of prefixes."""
    longest = max(int(row) for row in gather(str(len(lines)).encode().rjust(HASH_BYTES)))
    low, high = 0, longest  # the first differing line is in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        if len(set(gather(_hash(lines[low:middle])))) > 1:
            high = middle
        else:
            low = middle
    return _by_rank(_lines(lines[low] if low < len(lines) else "(nothing)", gather))


def _lines(mine: str, gather: Gather) -> dict[str, list[int]]:
    """Return the ranks of each different line."""
    ranks: dict[str, list[int]] = {}
    for rank, line in enumerate(every_line(mine, gather)):
        ranks.setdefault(line, []).append(rank)
    return ranks


def every_line(mine: str, gather: Gather) -> list[str]:
    """Return the line of each rank, cut to :data:`LINE_BYTES`, in rank order."""
    rows = gather(mine.encode()[:LINE_BYTES].ljust(LINE_BYTES, b"\0"))
    return [row.rstrip(b"\0").decode(errors="replace") for row in rows]


def _by_rank(ranks: Mapping[str, list[int]]) -> str:
    return "; ".join(f"rank{'s' * (len(some) > 1)} {_ranges(some)} {line}" for line, some in ranks.items())


def _hash(lines: Sequence[str]) -> bytes:
    return hashlib.blake2b("\0".join([str(len(lines)), *lines]).encode(), digest_size=HASH_BYTES).digest()


def _parts(row: bytes) -> list[bytes]:
    return [row[i : i + HASH_BYTES] for i in range(0, len(row), HASH_BYTES)]


def _ranges(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) < 9 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)})"


class StoreExchange:
    """A :data:`Gather` over the store of a process group. Make one object for each agreement.

    Every rank writes its message. Rank 0 collects and publishes them, with runs of equal messages written once, and all
    ranks read the result. The first published result stands: the collection of rank 0, or the decision of another rank
    that rank 0 is absent. So all participating ranks reach the same end. An absent rank skips the agreements that ended
    without it, and takes part in the next.

    Args:
        group: of the ranks.
        timeout: seconds to wait for a missing rank.

    Raises:
        TransportError: the group has no store.
        HookTimeoutError: from the call, if a rank is absent.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        try:
            store = _get_process_group_store(group)
        except KeyError as error:
            raise TransportError("this process group has no store to agree over; pass verify_ranks=False") from error
        number = _ROUNDS.get(group, 0)
        while store.check([f"commhooks/agreement/{number}/0/all"]):
            number += 1
        _ROUNDS[group] = number + 1
        made = PrefixStore(f"commhooks/agreement/{number}", store)
        self._meet(made, dist.get_rank(group), dist.get_world_size(group), timeout)

    @classmethod
    def over(cls, store: Store, rank: int, world: int, timeout: float) -> "StoreExchange":
        """Return an exchange of ranks without a process group, over a store that nothing else uses.

        >>> import torch.distributed as dist
        >>> StoreExchange.over(dist.HashStore(), rank=0, world=1, timeout=1.0)(b"mine")
        [b'mine']
        """
        made = cls.__new__(cls)
        made._meet(store, rank, world, timeout)
        return made

    def _meet(self, store: Store, rank: int, world: int, timeout: float) -> None:
        self.rank, self.world, self._store, self._timeout = rank, world, store, timeout
        self._ends, self._told = time.monotonic() + timeout, False
        self._sent = 0

    def __call__(self, message: bytes) -> list[bytes]:
        key, self._sent = str(self._sent), self._sent + 1
        if self.rank == 0:
            answer = self._publish(key, self._collect(key, message))
        else:
            self._store.set(f"{key}/{self.rank}", message.hex())
            answer = self._get(f"{key}/all", 2.0) or self._publish(key, "absent 0")
        if answer.startswith("absent"):
            raise self._absent([int(rank) for rank in answer.split()[1:]])
        runs = (line.split(" ") for line in answer.split("\n"))
        return [bytes.fromhex(row) for count, row in runs for _ in range(int(count))]

    def _publish(self, key: str, answer: str) -> str:
        """Publish an answer unless there is one, and return the published answer."""
        return self._store.compare_set(f"{key}/all", "", answer).decode()

    def _collect(self, key: str, message: bytes) -> str:
        rows = [message.hex(), *(self._get(f"{key}/{rank}", 0.0) for rank in range(1, self.world))]
        absent = [rank for rank, row in enumerate(rows) if row is None]
        if absent:
            return "absent " + " ".join(map(str, absent))
        # Every rank reads this. W separate rows would make the server send W² rows, mostly equal ones.
        return "\n".join(f"{len([*same])} {row}" for row, same in groupby(rows))

    def _get(self, key: str, grace: float) -> str | None:
        """Return the value, or None if it does not arrive in time."""
        ends = self._ends + grace
        while True:
            until = ends if self._told else min(ends, time.monotonic() + TELL_AFTER)
            try:
                self._store.wait([key], timedelta(seconds=max(0.001, until - time.monotonic())))
                return self._store.get(key).decode()
            except dist.DistStoreError:
                pass
            except RuntimeError as error:
                if time.monotonic() < min(until, self._ends):
                    raise TransportError(f"the process group's store failed: {error}") from error
            if until == ends:
                return None
            self._tell(key.rpartition("/")[2])

    def _tell(self, source: str) -> None:
        """Name the awaited rank once. A rank that never makes this call would otherwise cost minutes of silence."""
        self._told = True
        log.warning(
            "rank %d waits in attach(), load_state_dict() or move() for rank %s. Every rank must make this call (limit %g s)",
            self.rank,
            "0, which collects the answers of all ranks" if source == "all" else source,
            self._timeout,
        )

    def _absent(self, ranks: list[int]) -> CommHooksError:
        return HookTimeoutError(
            f"ranks {_ranges(ranks)} did not take part in the agreement within {self._timeout:g} s. Every rank of the "
            "group has to make the same attach(), load_state_dict() and move() calls, in the same order"
        )
