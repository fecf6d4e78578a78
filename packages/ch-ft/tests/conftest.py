"""Environment of the processes that these tests start."""

import os

import pytest

os.environ.setdefault("RUST_LOG", "error")  # before the import of torchft, which logs a line per quorum and process
pytest.register_assert_rewrite("ch_testing.torchft.scenario")
