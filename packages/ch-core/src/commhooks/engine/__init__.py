"""The engine: the only place that starts collectives. See :mod:`commhooks.engine.engine`.

Private: what others may use of it is exported by :mod:`commhooks` and :mod:`commhooks.adapters`.
"""
