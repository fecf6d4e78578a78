"""A search of all interleavings of real engines: ``python -m tests.interleavings`` prints its size."""
