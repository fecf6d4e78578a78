"""The public names of this package, and the modules that define them.

Type checkers read this file. `lazy` reads it, too, and imports a name when it is first used.
"""

from ch_ddp.adapter.driver import DDPDriver as DDPDriver
from ch_ddp.adapter.driver import TensorFuture as TensorFuture
from ch_ddp.adapter.finalization import Finalizer as Finalizer
from ch_ddp.adapter.finalization import raise_finalized as raise_finalized
from ch_ddp.adapter.futures import behind_backward as behind_backward
from ch_ddp.adapter.futures import future_for as future_for
from ch_ddp.adapter.layout import averaged_params as averaged_params
from ch_ddp.adapter.layout import model_layouts as model_layouts
from ch_ddp.adapter.slot import acquire_slot as acquire_slot
