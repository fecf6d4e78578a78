"""Search the quick set or the full set and print its size: ``python -m tests.interleavings [quick | full]``."""

import logging
import sys

from .matrix import full, quick, search

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    chosen = full() if sys.argv[1:] == ["full"] else quick()
    for name, scenarios in chosen.items():
        print(f"{name}: {search(scenarios)}", flush=True)
