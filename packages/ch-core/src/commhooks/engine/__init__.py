"""The engine is the only code that starts collectives. Start with :mod:`commhooks.engine.engine`.

The package is internal. :mod:`commhooks` and :mod:`commhooks.adapters` export its public parts.
"""
