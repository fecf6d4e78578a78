"""A group whose number of ranks changes, like torchft's ManagedProcessGroup, raises an error. It never divides by the
old number.
"""

import pytest
import torch
import torch.distributed as dist

from ch_core import TransportError
from ch_core.transport.process_group import ProcessGroupTransport


class Shrinking(ProcessGroupTransport):
    """A process group that had one more rank when the hook was attached."""

    def __init__(self) -> None:
        super().__init__()
        self.world_size += 1


def test_another_number_of_ranks_than_at_attach_is_an_error_of_every_collective() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.ones(2)
        ProcessGroupTransport().all_reduce(x, "sum").wait(5.0)
        moved = Shrinking()
        for start in (
            lambda: moved.all_reduce(x, "sum"),
            lambda: moved.all_gather(x, x.clone()),
            lambda: moved.all_to_all(x, x.clone()),
        ):
            with pytest.raises(TransportError, match=r"had 2 ranks when the hook was attached and has 1 now.*manager"):
                start()
    finally:
        dist.destroy_process_group()
