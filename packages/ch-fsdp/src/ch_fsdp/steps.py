"""The step of an FSDP model: engines that run each bucket at once, and end together once per backward.

FSDP has no last call: the root's group fires before the first layer's, and which one is last depends on the graph.
So the first call of a backward queues one callback for its end, twice over, so that it comes after FSDP's own.
"""

from collections.abc import Callable

import torch

from commhooks.after import OUTSIDE, after_backward, graph_task, raise_after_backward
from commhooks.bucket import Bucket
from commhooks.counters import Counters
from commhooks.engine import Engine
from commhooks.requests import Request
from commhooks.scratch import Scratch
from commhooks.status import ENCODE, Status
from commhooks.transport import Stage, Transport


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
        self._told: Status | None = None
        self._raised = False  # whether this rank has raised what the pending status is about
        self.calls = 0
        self._inspect = inspect
        self._task = OUTSIDE
        self._kept: BaseException | None = None
        self._device = torch.device("cpu")
        self._scratch = Scratch()
        self._timeout = next(iter(engines.values())).timeout

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
        task = graph_task()
        if task == self._task:
            return
        for engine in self.engines.values():
            if engine.in_step:  # an earlier backward raised before its end
                engine.abandon()
        self._task, self._kept = task, None
        after_backward(self._end)

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
        """One status message over the shard axis. On CUDA it is read at the end of the next step, like the engines'."""
        relay = self._relay
        if relay is None:
            return error
        status = Status(relay.rank, relay.world_size, ENCODE if error is not None else 0, None, [], self._device)
        self._carry_out(status.message())
        status.heard()
        late = self._device.type == "cuda"
        pending, self._told = (self._told if late else status), status
        raised, self._raised = self._raised, error is not None
        if pending is None:
            return error
        heard = pending.error("the hook", None if late else error, self._carry_out)
        if heard is None or (late and raised):
            return error
        for engine in self.engines.values():
            engine.rollback()
        return error or heard

    def _carry_out(self, request: Request) -> None:
        assert self._relay is not None  # noqa: S101 - asked only if there is one
        Stage(self._relay, self._scratch, "relay").start((request,)).wait(self._timeout)


def _together(counters: list[Counters]) -> dict[str, float]:
    """Steps are common to the axes; bytes, rounds and seconds add up."""
    rows = [one.as_dict() for one in counters]
    return {key: (max if key.endswith("steps") else sum)(row[key] for row in rows) for key in rows[0]}
