"""Run all cases and print a table: ``python -m tests.orders``."""

import sys

from .run import main

if __name__ == "__main__":
    sys.exit(main())
