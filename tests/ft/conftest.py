"""The modules beside this file, for the tests and for the processes they start."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("RUST_LOG", "error")  # before torchft is imported: it logs a line per quorum and process
sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("scenario")
