"""Finds hooks by name and builds them from expressions. Only :mod:`~commhooks.registry.build` imports torch.

The package is internal. :mod:`commhooks` exports its public names.
"""
