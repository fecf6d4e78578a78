"""Records figures of some steps to TensorBoard, a CSV file, or any callable (W&B, MLflow).

:func:`record` starts it. It takes part in no collective and never waits for a device, so one rank may run it alone. See
:class:`commhooks.engine.stats.Sampler` for the figures.
"""

from typing import TYPE_CHECKING

from commhooks._lazy import lazy

if TYPE_CHECKING:
    from commhooks.telemetry.recorder import Recorder, record
    from commhooks.telemetry.writers import csv_file, tensorboard

__all__ = ["Recorder", "csv_file", "record", "tensorboard"]

__getattr__, __dir__ = lazy(
    "commhooks", {"telemetry.recorder": "Recorder record", "telemetry.writers": "csv_file tensorboard"}
)
