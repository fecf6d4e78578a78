"""Environment of the processes that these tests start."""

import os
from collections.abc import Iterator

import pytest
from torch.nn.parallel import DistributedDataParallel

os.environ.setdefault("RUST_LOG", "error")  # before the import of torchft, which logs a line per quorum and process
pytest.register_assert_rewrite("ch_testing.torchft.scenario")


@pytest.fixture(autouse=True)
def no_forward_is_left_running() -> Iterator[None]:
    """Members are threads in some tests, and torch has one variable for all. Later tests would compile for a wrong
    model.
    """
    before = DistributedDataParallel._active_ddp_module
    yield
    DistributedDataParallel._active_ddp_module = before
