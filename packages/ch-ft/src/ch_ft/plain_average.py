"""Plain averages over a manager, started as gradients appear and waited for at the end of the backward pass.

Only ``manager.allreduce(tensor)`` is used, so anything that offers it will do. One exception: fp16 is divided before
the sum, because the manager sums first and two gradients of 40 000 are infinite in fp16.
"""

from typing import cast

import torch
from torch.distributed import ReduceOp

from ch_ft.failfast import FailFast
from ch_ft.protocols import Membership, Reducer, Work


class Averaging:
    """The averages of one backward pass.

    Args:
        manager: where they happen; needs :class:`~ch_ft.protocols.Membership` for fp16 only.
        fail_fast: told when one fails.
    """

    def __init__(self, manager: Reducer, fail_fast: FailFast) -> None:
        self.manager = manager
        self.fail_fast = fail_fast
        self._under_way: list[Work] = []

    def start(self, tensor: torch.Tensor) -> None:
        """Begin to average ``tensor`` in place, in the order of the calls, the same on every member."""
        if tensor.dtype == torch.float16:
            tensor.mul_(1.0 / max(cast(Membership, self.manager).num_participants(), 1))
            self._under_way.append(self.manager.allreduce(tensor, reduce_op=ReduceOp.SUM))
        else:
            self._under_way.append(self.manager.allreduce(tensor))

    def finish(self) -> bool:
        """Wait for all and return True if none failed. After a failure the step will not be committed."""
        works, self._under_way = self._under_way, []
        failed = False
        while works and not failed:
            failed = works.pop(0).wait() is False or self.manager.errored() is not None
        if failed:
            works.clear()
            self.fail_fast(None)
        return not failed

    def participating(self) -> bool:
        """True if this member's gradients count; False as well if the manager cannot tell."""
        asks = getattr(self.manager, "is_participating", None)
        return asks is not None and bool(asks())

    def forget(self) -> None:
        """Drop what an interrupted backward pass left."""
        self._under_way.clear()
