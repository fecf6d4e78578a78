"""A reduction where there is no step: a plain function of a gradient, called by who knows whom."""

from commhooks.bucket import Bucket
from commhooks.engine.stage import Stage
from commhooks.reduction import Reduction, StepContext
from commhooks.requests import as_tuple
from commhooks.scratch import Scratch
from commhooks.transport.base import Transport


class Immediate:
    """Runs one bucket at a time from its first stage to its end. No state, no status: what raises, raises at once.

    Holds scratch memory, but no transport: kept for a process group, it does not keep the group alive.
    """

    def __init__(self) -> None:
        self._scratch = Scratch()

    def run(self, reduction: Reduction, bucket: Bucket, transport: Transport) -> None:
        """Leave the average in the bucket, or where the reduction puts it."""
        ctx = StepContext(transport.rank, transport.world_size, scratch=self._scratch)
        for requests in reduction.start(bucket, ctx):
            Stage(transport, self._scratch, reduction.name).start(as_tuple(requests)).wait(None)
