"""Transports carry the collectives of an engine.

The package is internal. :mod:`ch_core` exports its public parts.
"""
