"""The public names of this package, and the modules that define them.

Type checkers read this file. `lazy` reads it, too, and imports a name when it is first used.
"""

from commhooks.telemetry.recorder import Recorder as Recorder
from commhooks.telemetry.recorder import record as record
from commhooks.telemetry.writers import Writer as Writer
from commhooks.telemetry.writers import csv_file as csv_file
from commhooks.telemetry.writers import tensorboard as tensorboard
