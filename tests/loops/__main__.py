"""Run every loop in every way and print a table: ``python -m tests.loops``."""

import sys

from tests.loops.run import main

if __name__ == "__main__":
    sys.exit(main())
