"""Records figures of some steps to TensorBoard, a CSV file, or any callable (W&B, MLflow).

:func:`record` starts it. It takes part in no collective and never waits for a device, so one rank may run it alone. See
:class:`commhooks.engine.stats.Sampler` for the figures.
"""

from commhooks._lazy import lazy

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
