"""The functions and the reducer that :mod:`commhooks` exports. The package is internal."""
