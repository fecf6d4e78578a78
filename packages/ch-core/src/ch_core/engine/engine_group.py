"""Several engines of one model, one for each axis of a mesh of ranks. They end their steps together."""

import torch

from ch_core.bucket import Bucket
from ch_core.device import is_asynchronous
from ch_core.engine.engine import Engine
from ch_core.engine.messages import Messenger
from ch_core.engine.outcome import ENCODE, StepOutcome
from ch_core.engine.stats import Counters
from ch_core.transport.base import Transport


class EngineGroup:
    """The engines of one model, by axis of a mesh.

    Args:
        engines: axis -> engine, in the order in which they end.
        relay: another axis of the mesh, along which errors of the engines are passed on at the end of every step. Then all
            ranks of the mesh raise. Without it the ranks of other columns would continue.

    Attributes:
        engines: as given.
    """

    def __init__(self, engines: dict[str, Engine], relay: Transport | None = None) -> None:
        self.engines = engines
        self._relay: Messenger | None = None
        if relay is not None and relay.world_size > 1:
            timeout = next(iter(engines.values())).messenger.timeout
            self._relay = Messenger(relay, Counters(), timeout)
        self._relayed: StepOutcome | None = None  # of the last step
        self._raised = False  # True if this rank has raised the error of that step

    @property
    def in_step(self) -> bool:
        """True if an engine has a running step."""
        return any(engine.in_step for engine in self.engines.values())

    def run(self, axis: str, bucket: Bucket) -> None:
        """Reduce a bucket over an axis at once. :meth:`finish` returns errors of the reduction."""
        with torch.no_grad():
            self.engines[axis].run(bucket)

    def finish(self, *, outside: BaseException | None = None) -> BaseException | None:
        """End the step on every axis and return the error to raise.

        Args:
            outside: error of this rank outside the reductions. The peers learn of it.
        """
        error = outside
        for engine in self.engines.values():
            if engine.in_step or error is not None:
                error = engine.finish(outside=error) or error
        if self._relay is None:
            return error
        try:
            return self._pass_on(error, self._relay)
        except Exception:  # a late rank would match this status with a later one, and write into its scratch
            self._relay.drop()
            self._relay.transport.abort()
            raise

    def abandon(self) -> None:
        """Drop a step that never finishes."""
        for engine in self.engines.values():
            if engine.in_step:
                engine.abandon()

    def check(self) -> None:
        """Raise the error of a lost transport."""
        for engine in self.engines.values():
            if engine.failure is not None:
                raise engine.failure

    def stats(self) -> dict[str, float]:
        """Return the figures of all axes, and traffic by axis. Steps are common to the axes; other figures add up.

        Of the skews of two axes the larger one counts.
        """
        counters = {axis: engine.counters for axis, engine in self.engines.items()}
        rows = [one.as_dict() for one in counters.values()]
        total = {
            key: (max if key.endswith("steps") or key.startswith("weight") else sum)(row.get(key, 0.0) for row in rows)
            for row in rows
            for key in row
        }
        for axis, one in counters.items():
            total[f"{axis}_payload_bytes"] = one.traffic.payload_bytes
            total[f"{axis}_wire_bytes"] = one.traffic.wire_bytes
            total[f"{axis}_rounds"] = float(one.traffic.rounds)
        if self._relay is not None:
            total["wire_bytes"] += self._relay.counters.traffic.wire_bytes
        return total

    def _pass_on(self, error: BaseException | None, relay: Messenger) -> BaseException | None:
        """Send one more status along the relay. On a GPU the next step reads it, like the status of the engines."""
        devices = [engine.messenger.device for engine in self.engines.values()]
        device = next((one for one in devices if one.type != "cpu"), devices[0])
        outcome = StepOutcome("the hook", relay.transport)
        if error is not None:
            outcome.fail(error, ENCODE)
        outcome.send(None, device, relay.post)
        outcome.decide(relay.timeout)
        late = is_asynchronous(device)
        pending, self._relayed = (self._relayed if late else outcome), outcome
        raised, self._raised = self._raised, error is not None
        relayed = pending.take_error(relay.carry_out) if pending is not None else None
        if relayed is None or (late and raised):
            return error
        for engine in self.engines.values():
            engine.rollback()
        return error or relayed
