"""Reductions made of other reductions. :mod:`commhooks` exports the public ones."""
