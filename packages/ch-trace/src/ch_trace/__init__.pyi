"""The public names of this package, and the modules that define them.

Type checkers read this file. `lazy` reads it, too, and imports a name when it is first used.
"""

from ch_trace.chrome import merge as merge
from ch_trace.page import TraceFile as TraceFile
from ch_trace.page import html_page as html_page
from ch_trace.recorder import Recorder as Recorder
from ch_trace.recorder import record as record
from ch_trace.session import Trace as Trace
from ch_trace.session import Traced as Traced
from ch_trace.summary import Summary as Summary
from ch_trace.summary import summarize as summarize
from ch_trace.writers import Writer as Writer
from ch_trace.writers import csv_file as csv_file
from ch_trace.writers import tensorboard as tensorboard
