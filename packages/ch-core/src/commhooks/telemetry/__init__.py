"""Figures of every so manyth step, to TensorBoard, a CSV file, or a callable of your own (W&B, MLflow).

Off unless :func:`record` is called. It takes part in no collective and never waits for a device, so it may run on one
rank alone; :mod:`commhooks.engine.sampling` says what is measured.
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
