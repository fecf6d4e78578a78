"""The modules beside this file, for the tests and for the processes they start."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("scenario")
