"""`attach` logs one line at the start, on rank 0 only."""

import logging
import re

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import commhooks
from ch_core import log
from ch_testing import spawn

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(120)]


def _attach(rank: int, world: int) -> list[str]:
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.INFO:
                found.append(record.getMessage())

    log.addHandler(Keep())
    log.setLevel(logging.INFO)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    handle = commhooks.attach(model, "bf16_compress")
    if rank == 0:
        assert found == [commhooks.start_line(handle, model)]
    handle.detach()
    handle = commhooks.attach(model, "powersgd(rank=1)")
    model(torch.ones(2, 64)).sum().backward()
    state = handle.state
    handle.detach()
    commhooks.attach(model, commhooks.create("powersgd(rank=1)"), state=state).detach()
    return found


def test_the_line_names_hook_model_bytes_and_state() -> None:
    first, second = spawn(_attach, 2)
    assert not second
    # 64 * 64 + 64 numbers of 4 bytes, of which each of two ranks sends half twice with plain averaging
    plain = "on DistributedDataParallel (Linear): each rank sends"
    assert first[0] == f"bf16_compress {plain} 8.3 kB per step instead of the 16.6 kB of plain averaging"
    assert first[1].startswith(f"powersgd(rank=1) {plain} ")
    assert first[1].endswith("; it has a state, and none was given, so residuals start at zero")
    assert first[2].endswith("; its state is the one after step 1")


def _on_nodes(rank: int, world: int) -> str:
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    return commhooks.start_line(commhooks.attach(model, "two_level(quant4, nodes=2)"), model)


def test_with_nodes_the_line_has_the_bytes_that_leave_a_node() -> None:
    """Inside a node two_level sends about as much as plain averaging."""
    line = spawn(_on_nodes, 4)[0]
    # Round a ring of four ranks, one rank of a node sends 4 160 numbers of 4 bytes twice, but for a quarter.
    found = re.search(
        r"each node sends (\S+) kB to other nodes per step instead of the 25.0 kB of plain averaging", line
    )
    assert found is not None and float(found[1]) < 4.0, line
