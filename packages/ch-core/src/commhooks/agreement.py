"""Verify that ranks agree, before anything of variable size is communicated.

Ranks with different hooks, options or shapes send messages of different sizes, which on gloo aborts a process, or of
equal sizes, which is silent garbage. So each rank writes a fingerprint: fields, each a list of lines. First a digest of
every field is exchanged (:data:`DIGEST_BYTES` each). Where they differ, the first differing line is found by bisection
over digests, and that line alone is exchanged (:data:`LINE_BYTES`). Every message has a fixed size.

The messages go through the store of the process group: a rank that never comes disturbs no collective of the others,
and is named.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import groupby

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_process_group_store
from torch.utils.weak import WeakIdKeyDictionary

from commhooks.errors import CommHooksError, HookTimeoutError, RankMismatchError, TransportError

DIGEST_BYTES, LINE_BYTES = 16, 256
Fingerprint = Mapping[str, Sequence[str]]
"""What ranks are compared by, named fields of lines; the error names the field and the first line that differs."""

Exchange = Callable[[bytes], list[bytes]]
"""Gives every rank's message, in rank order; all have the same size."""

_ROUNDS = WeakIdKeyDictionary()  # process group -> number of agreements made over it


def agree(what: str, fields: Fingerprint, exchange: Exchange, *, says: str = "") -> None:
    """Compare the ranks' fingerprints.

    Args:
        what: for the error.
        fields: field name -> lines; every rank has the same field names.
        exchange: to every rank.
        says: what this rank calls what it has; told with the error where the ranks say different things.

    Raises:
        RankMismatchError: on every rank, naming the differing fields, their values and the ranks.

    Example:
        >>> agree("alone", {"hook": ["powersgd(rank=4)"]}, lambda message: [message])
    """
    names = sorted(fields)
    everyone = [_parts(row) for row in exchange(b"".join([_digest(names), *(_digest(fields[name]) for name in names)]))]
    if len({row[0] for row in everyone}) > 1:
        raise RankMismatchError(
            f"the ranks are in different calls, this one at {what}: every rank of the group has to make the same "
            "attach() and load_state_dict() calls, in the same order"
        )
    differing = [name for i, name in enumerate(names) if len({row[i + 1] for row in everyone}) > 1]
    if not differing:
        return
    lines = [f"  {name}: {_difference(fields[name], exchange)}" for name in differing]
    lines = [*([f"  expression: {said}"] if says and (said := _said(says, exchange)) else []), *lines]
    raise RankMismatchError(
        f"the ranks disagree on {what}, so nothing has been communicated or changed:\n"
        + "\n".join(lines)
        + "\nGive every rank the same hook, options, package versions and model, or states that were saved together; "
        "verify_ranks=False turns this check off"
    )


def agree_along(
    what: str, fields: Fingerprint, groups: Sequence[tuple[dist.ProcessGroup, Fingerprint]], timeout: float
) -> None:
    """Compare the fingerprints over all groups of this rank, one per axis of a mesh.

    A rank compares itself along each axis in turn and passes on what it has received, so a mismatch anywhere in the mesh
    raises on every rank.

    Args:
        what: for the error.
        fields: what must be the same on every rank: name -> lines.
        groups: the axes, each with further fields that must be the same along it only.
        timeout: seconds to wait for a rank that has not come.

    Raises:
        RankMismatchError: on every rank that can be reached over the axes.
    """
    received: RankMismatchError | None = None
    for group, more in (*groups, *groups[:-1]):
        if group.size() == 1:
            continue
        passed_on = {"received along another axis": str(received).splitlines() if received is not None else []}
        try:
            agree(what, {**fields, **more, **passed_on}, StoreExchange(group, timeout))
        except RankMismatchError as error:
            received = received or error
    if received is not None:
        raise received


def _difference(lines: Sequence[str], exchange: Exchange) -> str:
    """The first line in which ranks differ, with who has which: found by bisection over digests of prefixes."""
    longest = max(int(row) for row in exchange(str(len(lines)).encode().rjust(DIGEST_BYTES)))
    low, high = 0, longest  # the first differing line is in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        if len(set(exchange(_digest(lines[low:middle])))) > 1:
            high = middle
        else:
            low = middle
    return _by_rank(_lines(lines[low] if low < len(lines) else "(nothing)", exchange))


def _said(mine: str, exchange: Exchange) -> str:
    """What the ranks say, with who says what; nothing where all say the same."""
    ranks = _lines(mine, exchange)
    return _by_rank(ranks) if len(ranks) > 1 else ""


def _lines(mine: str, exchange: Exchange) -> dict[str, list[int]]:
    """Every rank's line, and whose it is."""
    ranks: dict[str, list[int]] = {}
    for rank, line in enumerate(exchange(mine.encode()[:LINE_BYTES].ljust(LINE_BYTES, b"\0"))):
        ranks.setdefault(line.rstrip(b"\0").decode(errors="replace"), []).append(rank)
    return ranks


def _by_rank(ranks: Mapping[str, list[int]]) -> str:
    return "; ".join(f"rank{'s' * (len(who) > 1)} {_ranges(who)} {line}" for line, who in ranks.items())


def _digest(lines: Sequence[str]) -> bytes:
    return hashlib.blake2b("\0".join([str(len(lines)), *lines]).encode(), digest_size=DIGEST_BYTES).digest()


def _parts(row: bytes) -> list[bytes]:
    return [row[i : i + DIGEST_BYTES] for i in range(0, len(row), DIGEST_BYTES)]


def _ranges(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) < 9 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)})"


class StoreExchange:
    """An :data:`Exchange` over the store of a process group. One object per agreement.

    Every rank writes its message, rank 0 collects and publishes them, neighbours that are the same as one, and all ranks read
    that. What is published first stands, be it rank 0's collection or a rank's verdict that rank 0 is absent; so all ranks
    that take part come to the same end. A rank that was absent passes over the agreements that ended without it, and
    meets the others in the next.

    Args:
        group: the ranks.
        timeout: seconds to wait for a rank that has not come.

    Raises:
        TransportError: the group has no store.
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
        """Of ranks without a process group, over a store that is used for nothing else.

        >>> import torch.distributed as dist
        >>> StoreExchange.over(dist.HashStore(), rank=0, world=1, timeout=1.0)(b"mine")
        [b'mine']
        """
        made = cls.__new__(cls)
        made._meet(store, rank, world, timeout)
        return made

    def _meet(self, store: Store, rank: int, world: int, timeout: float) -> None:
        self.rank, self.world, self._store, self._timeout = rank, world, store, timeout
        self._ends = time.monotonic() + timeout
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
        """The first verdict stands, and is returned."""
        return self._store.compare_set(f"{key}/all", "", answer).decode()

    def _collect(self, key: str, message: bytes) -> str:
        rows = [message.hex(), *(self._get(f"{key}/{rank}", 0.0) for rank in range(1, self.world))]
        absent = [rank for rank, row in enumerate(rows) if row is None]
        if absent:
            return "absent " + " ".join(map(str, absent))
        # All ranks read it: W rows would be W² in one server, and mostly W times the same.
        return "\n".join(f"{len([*same])} {row}" for row, same in groupby(rows))

    def _get(self, key: str, grace: float) -> str | None:
        """The value, or ``None`` if it is not there when the time is up."""
        left = max(0.001, self._ends + grace - time.monotonic())
        try:
            self._store.wait([key], timedelta(seconds=left))
        except dist.DistStoreError:
            return None
        except RuntimeError as error:
            if time.monotonic() >= self._ends:
                return None
            raise TransportError(f"the process group's store failed: {error}") from error
        return self._store.get(key).decode()

    def _absent(self, ranks: list[int]) -> CommHooksError:
        return HookTimeoutError(
            f"ranks {_ranges(ranks)} did not take part in the agreement within {self._timeout:g} s: every rank of the "
            "group has to make the same attach() and load_state_dict() calls, in the same order"
        )
