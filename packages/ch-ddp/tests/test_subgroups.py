"""Ranks learn without NumPy how many of them share a machine. Torch does not install NumPy."""

import socket

import pytest
import torch
import torch.distributed as dist

from ch_ddp.local_sgd.subgroups import ranks_per_machine
from ch_testing import spawn
from commhooks import HookConfigError

pytestmark = pytest.mark.timeout(120)


def no_numpy(*_: object, **__: object) -> None:
    raise RuntimeError("Numpy is not available")


def body(rank: int, world: int) -> tuple[int, int, str]:
    torch.Tensor.numpy = no_numpy  # a tensor does this if NumPy is not installed
    here = ranks_per_machine(None)
    part = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
    two = ranks_per_machine(part) if part is not None else 0
    own = socket.gethostname
    socket.gethostname = lambda: "a" if rank < 2 else "b"
    try:
        ranks_per_machine(None)
    except HookConfigError as error:
        told = str(error)
    finally:
        socket.gethostname = own
    return here, two, told


@pytest.mark.full
@pytest.mark.gloo
def test_ranks_of_a_machine() -> None:
    found = spawn(body, 3, timeout=90)
    assert [(here, two) for here, two, _ in found] == [(3, 2), (3, 2), (3, 0)]
    assert all("[('a', 2), ('b', 1)]" in told for _, _, told in found)
