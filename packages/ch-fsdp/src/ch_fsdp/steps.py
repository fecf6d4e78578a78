"""The step of an FSDP model: engines that run each bucket at once, and end together once per backward.

FSDP has no last call: the root's group fires before the first layer's, and which one is last depends on the graph.
So the first call of a backward queues one callback for its end, twice over, so that it comes after FSDP's own.
"""

from collections.abc import Callable

import torch
from commhooks.bucket import Bucket
from commhooks.ddp import OUTSIDE, raise_after_backward
from commhooks.engine import Counters, Engine, Verdict
from commhooks.errors import RemoteHookError
from commhooks.transport import Transport

_QUEUE: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


class Steps:
    """The engines of one handle, by axis.

    Args:
        engines: ``"shard"``, ``"replicate"`` or both, in the order in which they end.
        inspect: called at the end of each backward; gives an error of this rank to be made known to the others.
        relay: the shard axis, if nothing of ours ends a step there last: what went wrong between the replicas of
            one shard is passed on along it, so that every rank of the mesh raises.
    """

    def __init__(
        self,
        engines: dict[str, Engine],
        inspect: Callable[[], BaseException | None] = lambda: None,
        relay: Transport | None = None,
    ) -> None:
        self.engines = engines
        self._relay = relay if relay is not None and relay.world_size > 1 else None
        self._told: Verdict | None = None
        self.calls = 0
        self._inspect = inspect
        self._task = OUTSIDE
        self._kept: BaseException | None = None
        self._device = torch.device("cpu")

    def run(self, axis: str, bucket: Bucket) -> None:
        """Reduce a bucket over an axis, now. Errors of the reduction are raised when the backward has ended."""
        self.calls += 1
        self._device = bucket.device
        self.touch()
        with torch.no_grad():
            self.engines[axis].run(bucket)

    def keep(self, error: BaseException) -> None:
        """An error that must not stop the backward half way: raised, on every rank, when it has ended."""
        self.touch()
        self._kept = self._kept or error

    def touch(self) -> None:
        """See to it that the present backward's end is noticed."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        for engine in self.engines.values():
            if engine.in_step:  # an earlier backward raised before its end
                engine.abandon()
        self._task, self._kept = task, None
        _QUEUE(lambda: _QUEUE(self._end))

    def check(self) -> None:
        """Raise the loss of a transport."""
        for engine in self.engines.values():
            if engine.failure is not None:
                raise engine.failure

    def stats(self) -> dict[str, float]:
        """The figures of all axes together, and traffic by axis."""
        counters = {axis: engine.counters for axis, engine in self.engines.items()}
        total = _together(list(counters.values()))
        for axis, one in counters.items():
            total[f"{axis}_payload_bytes"] = one.traffic.payload_bytes
            total[f"{axis}_wire_bytes"] = one.traffic.wire_bytes
            total[f"{axis}_rounds"] = float(one.traffic.rounds)
        return total

    def _end(self) -> None:
        self._task = OUTSIDE
        error, self._kept = self._kept or self._inspect(), None
        for engine in self.engines.values():
            if engine.in_step or error is not None:
                error = engine.finish(outside=error) or error
        error = self._pass_on(error)
        if error is not None:
            raise_after_backward(error)

    def _pass_on(self, error: BaseException | None) -> BaseException | None:
        """One flag over the shard axis. On CUDA it is read at the end of the next step, like the engines' own."""
        if self._relay is None:
            return error
        status = torch.tensor([float(error is not None), 0.0], device=self._device)
        self._relay.all_reduce(status, "sum").wait(None)
        before, self._told = self._told, Verdict(status)
        heard = before if status.is_cuda else self._told
        if heard is None or heard.good():
            return error
        for engine in self.engines.values():
            engine.rollback()
        return error or RemoteHookError(
            "the hook failed between the replicas of another shard, so this step's gradients are not valid on any rank; "
            "that rank's error says why"
        )


def _together(counters: list[Counters]) -> dict[str, float]:
    """Steps are common to the axes; bytes, rounds and seconds add up."""
    rows = [one.as_dict() for one in counters]
    return {key: (max if key.endswith("steps") else sum)(row[key] for row in rows) for key in rows[0]}
