"""What the processes that these tests start are told."""

import os

import pytest

os.environ.setdefault("RUST_LOG", "error")  # before torchft is imported: it logs a line per quorum and process
pytest.register_assert_rewrite("ch_ft.testing.scenario")
