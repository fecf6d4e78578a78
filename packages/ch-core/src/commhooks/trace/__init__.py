"""Traces of all ranks: computation, messages and waits of a hook on one time line.

:class:`Trace` starts one. The file is in the Trace Event Format, which https://ui.perfetto.dev and
``chrome://tracing`` open.
"""

from commhooks._lazy import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
