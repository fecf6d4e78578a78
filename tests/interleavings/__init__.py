"""Search all interleavings of real engines. ``python -m tests.interleavings`` prints the size of the search."""
