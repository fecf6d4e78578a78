"""The step of an FSDP2 model. Its engines run each bucket at once, and end together when FSDP ends a backward.

FSDP calls no hook last: the root's group may be ready before the first layer's, and the order depends on the graph. One
backward may also contain several passes of autograd. So the adapter calls :meth:`Steps.end` when FSDP ends a backward.
"""

from collections.abc import Callable

import torch

from ch_core import Engine, EngineGroup, Transport
from ch_fsdp.group_order import GroupOrder
from commhooks import NO_BACKWARD, Bucket, after_backward, backward_id, raise_after_backward


class Steps:
    """The engines of one handle, by axis.

    Args:
        engines: ``"shard"``, ``"replicate"`` or both, in the order in which they end.
        inspect: called at the end of each step. The ranks of all axes hear of an error that it returns.
        relay: the shard axis, if no engine ends a step there last. Errors between the replicas of one shard travel along
            it, so that every rank of the mesh raises.
        order: runs the reductions between replicas that wait for the end of the step.
        due: returns True if this backward is a step even without a call.
        before_gradient: :meth:`.OptimizerWatch.before_gradient`.

    Attributes:
        calls: number of calls of the hooks.
        before_gradient: called at the beginning of every hook. torch adds to ``.grad`` after each of them, also in a
            backward that runs no engine, and no hook of autograd sees it.
    """

    def __init__(
        self,
        engines: dict[str, Engine],
        inspect: Callable[[], BaseException | None] = lambda: None,
        relay: Transport | None = None,
        order: GroupOrder | None = None,
        due: Callable[[], bool] = lambda: False,
        before_gradient: Callable[[], None] = lambda: None,
    ) -> None:
        self.group = EngineGroup(engines, relay)
        self.calls = 0
        self.before_gradient = before_gradient
        self._inspect, self._order, self._due = inspect, order, due
        self._error: BaseException | None = None
        self._streams: set[torch.cuda.Stream] = set()  # on which buckets of this step were reduced
        self._ending = NO_BACKWARD  # the pass of autograd whose end is the end of the step

    def run(self, axis: str, bucket: Bucket) -> None:
        """Reduce a bucket over an axis now. The end of the backward raises errors of the reduction."""
        self.calls += 1
        if bucket.device.type == "cuda":
            self._streams.add(torch.cuda.current_stream(bucket.device))
        self.group.run(axis, bucket)

    def fail(self, error: BaseException) -> None:
        """Record an error of this rank. All ranks raise at the end of the backward, which FSDP could not end otherwise."""
        self._error = self._error or error

    def end(self) -> None:
        """End the step after the present pass of autograd.

        Parts of a model that the user calls one by one each end their own backward. In one pass of autograd that is one
        step.
        """
        task = backward_id()
        if task == NO_BACKWARD or task != self._ending:
            self._ending = task
            after_backward(self._end)

    def abandon(self, *, reset: bool = False) -> None:
        """Forget a step whose backward an exception interrupted.

        Its streams stay until the next step ends and waits for them. That wait is never wrong, and it puts kernels of the
        interrupted backward that still run before the status and the optimizer.

        Args:
            reset: also forget gradients that ``set_requires_all_reduce(False)`` kept of earlier backwards.
        """
        self._error = None
        if self._order is not None:
            self._order.forget(reset=reset)
        self.group.abandon()

    def _end(self) -> None:
        if self._error is None and not self.group.in_step and not self._due():
            return
        error, self._error = self._error or self._inspect(), None
        if self._order is not None:
            self._order.finish(self.group.engines["replicate"])
        # The status reads numbers of these streams. torch waits for them only in the last backward of a step.
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._streams.clear()
        error = self.group.finish(outside=error)
        if error is not None:
            raise_after_backward(error)
