"""The functions of :mod:`commhooks`.

Private: what others may use of it is exported by :mod:`commhooks`.
"""
