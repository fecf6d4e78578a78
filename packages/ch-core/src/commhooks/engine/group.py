"""Several engines of one handle: each over a group of ranks of its own, all of them ending their steps together."""

import torch

from commhooks.bucket import Bucket
from commhooks.engine.counters import Counters
from commhooks.engine.engine import Engine
from commhooks.engine.outcome import StepOutcome, told_late
from commhooks.engine.sender import Sender
from commhooks.engine.status import ENCODE
from commhooks.transport.base import Transport


class EngineGroup:
    """The engines of one handle, by axis of a mesh of ranks.

    Args:
        engines: axis -> engine, in the order in which they end.
        relay: an axis along which none of them ends last. What went wrong on the others is passed on along it at the end
            of every step, so that every rank of the mesh raises; without it the ranks of one column would go on alone.

    Attributes:
        engines: as given.
    """

    def __init__(self, engines: dict[str, Engine], relay: Transport | None = None) -> None:
        self.engines = engines
        self._relay: Sender | None = None
        if relay is not None and relay.world_size > 1:
            timeout = next(iter(engines.values())).sender.timeout
            self._relay = Sender(relay, Counters(), timeout)
        self._relayed: StepOutcome | None = None  # of the last step
        self._raised = False  # whether this rank has raised what that is about

    @property
    def in_step(self) -> bool:
        """Whether something of a step has come that has not ended."""
        return any(engine.in_step for engine in self.engines.values())

    def run(self, axis: str, bucket: Bucket) -> None:
        """Reduce a bucket over an axis, now. Errors of the reduction are kept for :meth:`finish`."""
        with torch.no_grad():
            self.engines[axis].run(bucket)

    def finish(self, *, outside: BaseException | None = None) -> BaseException | None:
        """End the step on every axis; returns the error to raise.

        Args:
            outside: an error of this rank that happened outside the reductions, to be made known to the others.
        """
        error = outside
        for engine in self.engines.values():
            if engine.in_step or error is not None:
                error = engine.finish(outside=error) or error
        return error if self._relay is None else self._pass_on(error, self._relay)

    def abandon(self) -> None:
        """Forget a step that will never finish."""
        for engine in self.engines.values():
            if engine.in_step:
                engine.abandon()

    def check(self) -> None:
        """Raise the loss of a transport."""
        for engine in self.engines.values():
            if engine.failure is not None:
                raise engine.failure

    def stats(self) -> dict[str, float]:
        """The figures of all axes together, and traffic by axis. Steps are common to them; all else adds up."""
        counters = {axis: engine.counters for axis, engine in self.engines.items()}
        rows = [one.as_dict() for one in counters.values()]
        total = {key: (max if key.endswith("steps") else sum)(row[key] for row in rows) for key in rows[0]}
        for axis, one in counters.items():
            total[f"{axis}_payload_bytes"] = one.traffic.payload_bytes
            total[f"{axis}_wire_bytes"] = one.traffic.wire_bytes
            total[f"{axis}_rounds"] = float(one.traffic.rounds)
        if self._relay is not None:
            total["wire_bytes"] += self._relay.counters.traffic.wire_bytes
        return total

    def _pass_on(self, error: BaseException | None, relay: Sender) -> BaseException | None:
        """One more status, along the relay. On CUDA it is read at the end of the next step, like the engines'."""
        devices = [engine.sender.device for engine in self.engines.values()]
        device = next((one for one in devices if one.type != "cpu"), devices[0])
        outcome = StepOutcome("the hook", relay.transport)
        if error is not None:
            outcome.fail(error, ENCODE)
        outcome.send(None, device, relay.post)
        outcome.decide(relay.timeout)
        late = told_late(device)
        pending, self._relayed = (self._relayed if late else outcome), outcome
        raised, self._raised = self._raised, error is not None
        told = pending.take_error(relay.carry_out) if pending is not None else None
        if told is None or (late and raised):
            return error
        for engine in self.engines.values():
            engine.rollback()
        return error or told
