"""Who provides which hook, and how an expression becomes one. Nothing here imports torch before a hook is built.

Private: what others may use of it is exported by :mod:`commhooks`.
"""
