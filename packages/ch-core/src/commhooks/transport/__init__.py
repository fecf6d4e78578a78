"""Transports carry the collectives of an engine.

The package is internal. :mod:`commhooks` and :mod:`commhooks.adapters` export its public parts.
"""
