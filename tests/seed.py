"""The seed of every sample: ``COMMHOOKS_SEED``. Each process of a test run needs the same one."""

import os

SEED = os.environ.get("COMMHOOKS_SEED", "1")
