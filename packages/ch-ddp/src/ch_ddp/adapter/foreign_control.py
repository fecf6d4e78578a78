"""A private channel beside a foreign hook's own collectives, on which ranks tell one another that a step failed.

Never the hook's own group: a collective there would be matched with one that a failed rank never started, which on
gloo aborts the process. A failing rank puts a key into the group's store at once, which releases peers that wait for
the missing collective; and at the end of every step all ranks exchange one fixed-size message over a gloo group of
their own.
"""

import os
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store

from commhooks import HookTimeoutError, TransportError
from commhooks.adapters import TUNED, ProcessGroupWork, StoreExchange

TEXT_BYTES = 256


class Control:
    """The control channel of one attached foreign hook. Making it is a collective of the group.

    Its connections are not a group of ``torch.distributed``: the name of such a group, under which ranks find one another,
    follows from how many groups a rank has and had, and these numbers may differ.

    Args:
        group: the ranks.
        timeout: seconds to wait for the slowest rank, here and at the end of a step.

    Raises:
        HookTimeoutError: a rank did not come.
        TransportError: the ranks could not be connected.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.timeout, self.rank, self.world_size = timeout, dist.get_rank(group), dist.get_world_size(group)
        # Rank 0's number names the channel: none before had it, whatever else each rank has made and destroyed.
        number = StoreExchange(group, timeout)(os.urandom(8))[0].hex()
        self._store = PrefixStore(f"commhooks/control/{number}", _get_process_group_store(group))
        try:
            private = dist.ProcessGroupGloo(
                PrefixStore("gloo", self._store), self.rank, self.world_size, timedelta(seconds=timeout)
            )
        except RuntimeError as error:
            raise TransportError(
                f"the ranks could not be connected for telling one another of failures: {error}. Is every rank's host "
                "reachable under its name (GLOO_SOCKET_IFNAME)?"
            ) from error
        self._private: list[Any] = [private]
        self.close = weakref.finalize(self, self._private.clear)  # also at exit: gloo is not to outlive the interpreter

    def alarm(self, text: str) -> None:
        """Release the peers: this rank will not finish the step."""
        try:
            self._store.set("alarm", f"rank {self.rank}: {text}"[:TEXT_BYTES])
        except RuntimeError:  # the store is gone with its host; peers have their deadline
            return

    def alarmed(self) -> str | None:
        """What another rank has put into :meth:`alarm`, if any has."""
        try:
            return self._store.get("alarm").decode(errors="replace") if self._store.check(["alarm"]) else None
        except RuntimeError:
            return None

    def exchange(self, text: str, digest: torch.Tensor) -> tuple[dict[int, str], torch.Tensor]:
        """Exchange what each rank has to say of the step.

        Args:
            text: what went wrong here; empty if nothing did.
            digest: ``(2,)`` int64, of the reduced gradients, or zeros.

        Returns:
            rank -> text of those that have one, and all digests, ``(W, 2)``.

        Raises:
            HookTimeoutError, TransportError: a rank did not answer.
        """
        world = self.world_size
        head = torch.tensor(list(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8, device="cpu")
        mine = torch.cat([digest.cpu().view(torch.uint8), head])
        everyone = torch.empty(world * mine.numel(), dtype=torch.uint8, device="cpu")
        try:
            work = self._private[0].allgather(list(everyone.view(world, -1).unbind()), mine)
            exchange = ProcessGroupWork(work, "the exchange at the end of a step", everyone, mine)
            TUNED.wait(exchange, everyone, self.timeout)
        except HookTimeoutError as error:
            raise HookTimeoutError(f"a rank did not end the step: {error}") from error
        rows = everyone.view(world, -1)
        texts = {r: bytes(rows[r, 16:].tolist()).rstrip(b"\0").decode(errors="replace") for r in range(world)}
        return {r: t for r, t in texts.items() if t}, rows[:, :16].contiguous().view(torch.int64)
