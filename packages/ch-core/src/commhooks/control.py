"""A private channel beside a foreign hook's own collectives, on which ranks tell one another that a step failed.

Never the hook's own group: a collective there would be matched with one that a failed rank never started, which on
gloo aborts the process. A failing rank puts a key into the group's store at once, which releases peers that wait for
the missing collective; and at the end of every step all ranks exchange one fixed-size message over a gloo group of
their own.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store

from commhooks.errors import HookTimeoutError
from commhooks.transport import ProcessGroupTransport

TEXT_BYTES = 256


class Control:
    """The control channel of one attached foreign hook. Making it is a collective of the group.

    Args:
        group: the ranks.
        timeout: seconds to wait for the slowest rank at the end of a step.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        ranks = dist.get_process_group_ranks(group)
        self.timeout = timeout
        self.private = dist.new_group(
            ranks, backend="gloo", timeout=timedelta(seconds=2 * timeout), use_local_synchronization=True
        )
        assert isinstance(self.private, dist.ProcessGroup)  # noqa: S101 - this rank is one of them
        self.transport = ProcessGroupTransport(self.private)
        self._store = PrefixStore("commhooks", _get_process_group_store(self.private))

    def alarm(self, text: str) -> None:
        """Release the peers: this rank will not finish the step."""
        try:
            self._store.set("alarm", f"rank {self.transport.rank}: {text}"[:TEXT_BYTES])
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
        world = self.transport.world_size
        head = torch.tensor(list(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8)
        mine = torch.cat([digest.cpu().view(torch.uint8), head])
        everyone = torch.empty(world * mine.numel(), dtype=torch.uint8)
        try:
            self.transport.all_gather(everyone, mine).wait(self.timeout)
        except HookTimeoutError as error:
            raise HookTimeoutError(f"a rank did not end the step: {error}") from error
        rows = everyone.view(world, -1)
        texts = {r: bytes(rows[r, 16:].tolist()).rstrip(b"\0").decode(errors="replace") for r in range(world)}
        return {r: t for r, t in texts.items() if t}, rows[:, :16].contiguous().view(torch.int64)

    def close(self) -> None:
        """Give the private group back."""
        if dist.is_initialized():
            dist.destroy_process_group(self.private)
