"""An engine without state, steps or status, for PyTorch's FSDP hooks."""

from ch_core.bucket import Bucket
from ch_core.engine.messages import Messenger
from ch_core.engine.schedule import CpuTuning
from ch_core.engine.stats import Counters
from ch_core.reduction import Reduction, StepContext
from ch_core.requests import as_tuple
from ch_core.scratch import Scratch
from ch_core.transport.base import Transport


class StatelessEngine:
    """Runs one bucket at a time. An exception is raised at once.

    It has scratch memory but no transport. Cached for a process group, it does not keep the group alive.
    """

    def __init__(self) -> None:
        self._scratch = Scratch()

    def run(self, reduction: Reduction, bucket: Bucket, transport: Transport) -> None:
        """Leave the average in the bucket, or in the tensors where the reduction puts it."""
        # PyTorch's functions add in the transport's order, so their messages are those that the reduction asked for.
        messenger = Messenger(transport, Counters(), tuning=CpuTuning.off(), name=reduction.name)
        messenger.scratch = self._scratch
        ctx = StepContext(transport.rank, transport.world_size, scratch=self._scratch)
        try:
            for requests in reduction.start(bucket, ctx):
                messenger.carry_out(*as_tuple(requests))
        except BaseException:
            messenger.drop()
            self._scratch = messenger.scratch
            raise
