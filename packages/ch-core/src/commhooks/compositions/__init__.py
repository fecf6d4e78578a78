"""Reductions made of other reductions.

Private: what others may use of it is exported by :mod:`commhooks`.
"""
