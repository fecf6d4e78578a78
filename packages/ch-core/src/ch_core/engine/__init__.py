"""The engine is the only code that starts collectives. Start with :mod:`ch_core.engine.engine`.

The package is internal. :mod:`ch_core` exports its public parts.
"""
