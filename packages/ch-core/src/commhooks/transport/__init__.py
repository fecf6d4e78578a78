"""Where collectives really happen.

Private: what others may use of it is exported by :mod:`commhooks` and :mod:`commhooks.adapters`.
"""
