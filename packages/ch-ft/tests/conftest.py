"""What the processes that these tests start are told."""

import os
from collections.abc import Iterator

import pytest
from torch.nn.parallel import DistributedDataParallel

os.environ.setdefault("RUST_LOG", "error")  # before torchft is imported: it logs a line per quorum and process
pytest.register_assert_rewrite("ch_ft.testing.scenario")


@pytest.fixture(autouse=True)
def no_forward_is_left_running() -> Iterator[None]:
    """Members are threads in some tests, and torch keeps one variable for all: later tests would compile for that model."""
    before = DistributedDataParallel._active_ddp_module
    yield
    DistributedDataParallel._active_ddp_module = before
