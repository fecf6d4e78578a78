"""The outer optimizer: inner steps on every rank alone, now and then a step of all on what those have moved."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ch_ddp import WrappedOptimizer
from ch_outer.fragment import Fragment, local, start_of
from ch_outer.joining import hand_over
from ch_outer.parts import buffers_of, divide, trained
from ch_outer.schedule import Schedule
from commhooks import CommHooksError, HookConfigError, Plain, Reducer, StateError
from commhooks.adapters import Transport, digest

OuterFactory = Callable[[Sequence[torch.Tensor]], Optimizer]
_KEYS = ("inner", "outer", "count", "landed", "fragments", "schedule")


def _nesterov(starts: Sequence[torch.Tensor]) -> Optimizer:
    return torch.optim.SGD(list(starts), lr=0.7, momentum=0.9, nesterov=True)


class OuterOptimizer(WrappedOptimizer):
    """Steps ``optim`` on this rank alone; every ``every`` steps what has moved goes through a reduction to all ranks.

    A real optimizer: closures, schedulers, ``GradScaler``, gradient clipping and hooks see the inner one's groups. Under a
    ``GradScaler`` every ``scaler.step(optimizer)`` counts, also one that it skips on this rank for an infinite gradient, so
    that ranks stay together.

    Every rank makes the same number of ``step()`` calls, which is when messages are sent. Parameters are equal on all ranks
    when this is made, or it raises.

    Args:
        optim: the inner optimizer, whatever it is.
        model: whose parameters are exchanged, all that require gradients, whoever steps them: several inner optimizers are
            stepped one after another, the one wrapped here last. Plain, in DDP, or by FSDP2 (then shards are exchanged with
            the same shards of other groups).
        every: inner steps between two exchanges of one parameter.
        exchange: what averages the pseudo-gradients: any reduction (expression, dict or object).
        outer: makes the outer optimizer of the starts; Nesterov SGD of rate 0.7 and momentum 0.9 if not given.
        fragments: how many parts of equal size take turns; or the parts, as lists of parameter names.
        overlap: inner steps that go on while an exchange is under way.
        mix: part of a rank's own parameters that stays when an exchange arrives: 0 takes the new start, 0.5 is Streaming
            DiLoCo's. What the inner steps did during the overlap is lost with 0.
        buffers: ``"average"``: floating-point buffers (BatchNorm's statistics) are averaged exactly after the last fragment
            of a round, so that all ranks hold one model; ``"local"``: they stay each rank's own. Integer ones always do.
        process_group: the ranks that exchange; with DDP or FSDP2 inside a group, those of equal place in every group.
        transport: instead of a process group, e.g. a simulated rank's.
        timeout: seconds that one collective may take; those of the process group if not given.
        verify_ranks: compare options, shapes and starts over the ranks first.

    Attributes:
        outer: the outer optimizer, of the starts in model order; its learning rate may be scheduled.
        count: inner steps done, skipped ones included.
        landed: exchanges that have moved a start.
        schedule: when what is exchanged.

    Raises:
        HookConfigError: an option is out of range, or the inner optimizer steps what is no parameter of the model.
        RankMismatchError: ranks differ in options or parameters.

    Example:
        >>> import torch
        >>> from commhooks import Plain
        >>> from commhooks.simulate import SimulatedGroup, SimulatedTransport
        >>> model = torch.nn.Linear(3, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> alone = SimulatedTransport(SimulatedGroup(1), 0)
        >>> optimizer = OuterOptimizer(inner, model, every=2, exchange=Plain(), transport=alone)
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        >>> for _ in range(4):
        ...     loss = model(torch.ones(1, 3)).sum()
        ...     loss.backward()
        ...     optimizer.step()
        ...     schedule.step()
        >>> optimizer.count, optimizer.stats()["rounds_done"]
        (4, 2.0)
    """

    _step_supports_amp_scaling = True  # a GradScaler then calls step() also when it skips, as the count has to go on

    def __init__(
        self,
        optim: Optimizer,
        model: torch.nn.Module,
        *,
        every: int,
        exchange: Any = "allreduce",
        outer: OuterFactory | None = None,
        fragments: int | Sequence[Sequence[str]] = 1,
        overlap: int = 0,
        mix: float = 0.0,
        buffers: str = "average",
        process_group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
        timeout: float | None = None,
        verify_ranks: bool = True,
    ) -> None:
        params = trained(model, optim)
        parts = divide(params, fragments)
        self.schedule = Schedule(every, len(parts), overlap)
        if not 0.0 <= mix <= 1.0:
            raise HookConfigError(f"mix={mix}: expected a part of a rank's own parameters, from 0 to 1")
        if buffers not in ("average", "local"):
            raise HookConfigError(f"buffers={buffers!r}: legal are 'average' and 'local'")
        super().__init__(optim)
        starts = {name: start_of(param) for name, param in params.items()}
        self.outer = (outer or _nesterov)(list(starts.values()))
        self.count, self.landed, self._model = 0, 0, model
        where: dict[str, Any] = {
            "process_group": process_group,
            "transport": transport,
            "timeout": timeout,
            "verify_ranks": verify_ranks,
        }
        self._device = next(iter(starts.values())).device
        facts = self._facts(starts, mix, buffers)
        self._fragments = []
        for names in parts:
            mine = {name: starts[name] for name in names}
            # One state and one handle per fragment: a round of each is one committed step, whatever the others do.
            reducer = Reducer(exchange, mine, facts=facts, **where)
            self._fragments.append(Fragment({name: params[name] for name in names}, mine, reducer, mix))
        averaged = buffers_of(model) if buffers == "average" else {}
        self._buffers = Reducer(Plain(), averaged, **where) if averaged else None

    def _facts(self, starts: Mapping[str, torch.Tensor], mix: float, buffers: str) -> dict[str, list[str]]:
        options = [{key: value for key, value in group.items() if key != "params"} for group in self.outer.param_groups]
        return {
            "outer step": [
                str(self.schedule),
                f"mix={mix}, buffers={buffers}",
                type(self.outer).__name__,
                *map(str, options),
            ],
            "parameters at the start": [f"{name}: {digest(start)}" for name, start in starts.items()],
        }

    # -- steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """An inner step, and what is due after it; returns what ``closure`` did.

        Raises:
            CommHooksError: an exchange failed, on all ranks alike. The inner step is done, start and parameters are as
                they were, and the next round exchanges what this one did not. After a TransportError or HookTimeoutError
                the process group is lost.
        """
        loss = self._inner(closure)
        self.count += 1
        with torch.no_grad():
            self._under_way()
            for index in self.schedule.due(self.count):
                self._fragments[index].begin(self.count)
                if not self.schedule.overlap:
                    self._land(index)
        return loss

    def _under_way(self) -> None:
        """Land what is due, advance the rest: in the order of their starts, the same on all ranks."""
        live = [(f.since, index) for index, f in enumerate(self._fragments) if f.since is not None]
        for since, index in sorted(live):
            passed = self.count - since
            if passed >= self.schedule.overlap:
                self._land(index)
                continue
            fragment = self._fragments[index]
            for _ in range(self.schedule.advances(fragment.reducer.stages, passed)):
                fragment.advance()

    def _land(self, index: int) -> None:
        self._fragments[index].land(self.outer)
        self.landed += 1
        if index == len(self._fragments) - 1 and self._buffers is not None:
            mean = self._buffers.average(found := buffers_of(self._model))
            for name, buffer in found.items():
                buffer.copy_(mean[name])

    def _inner(self, closure: Callable[[], Any] | None) -> Any:
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)  # both set by a GradScaler, around this call
        found: torch.Tensor | None = getattr(self, "found_inf", None)
        if found is None:
            return self.inner_step(closure)
        if getattr(self.optim, "_step_supports_amp_scaling", False):
            inner: Any = self.optim
            inner.grad_scale, inner.found_inf = scale, found
            try:
                return self.inner_step(closure)
            finally:
                del inner.grad_scale, inner.found_inf
        if found.item():
            return None
        if scale is not None:
            inverse = scale.double().reciprocal().float()  # in GradScaler's own arithmetic
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.mul_(inverse.to(param.grad.device))
        return self.inner_step(closure)

    # -- between steps

    @property
    def under_way(self) -> int:
        """Exchanges under way: 0 at a place where a pause, to evaluate say, gives no message more time."""
        return sum(fragment.since is not None for fragment in self._fragments)

    def finish(self) -> None:
        """At the end of training, on all ranks: land what is under way, and exchange what has moved since. Then every rank
        holds the start, and so the same parameters.
        """
        with torch.no_grad():
            live = [(f.since, index) for index, f in enumerate(self._fragments) if f.since is not None]
            for _, index in sorted(live):
                self._land(index)
            for index, fragment in enumerate(self._fragments):
                fragment.begin(self.count)
                self._land(index)
                for name, start in fragment.starts.items():
                    local(fragment.params[name]).copy_(start)

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """The starts in the place of the parameters, for evaluating or saving the one model that all ranks share.

        Example:
            >>> from commhooks import Plain
            >>> from commhooks.simulate import SimulatedGroup, SimulatedTransport
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> inner = torch.optim.SGD(model.parameters(), lr=1.0)
            >>> alone = SimulatedTransport(SimulatedGroup(1), 0)
            >>> optimizer = OuterOptimizer(inner, model, every=9, exchange=Plain(), transport=alone)
            >>> before = model.weight.item()
            >>> model(torch.ones(1, 1)).sum().backward()
            >>> optimizer.step()
            >>> with optimizer.global_parameters():
            ...     same = model.weight.item() == before
            >>> same, model.weight.item() == before
            (True, False)
        """
        own = [(local(p), local(p).clone()) for f in self._fragments for p in f.params.values()]
        starts = [start for f in self._fragments for start in f.starts.values()]
        with torch.no_grad():
            for (mine, _), start in zip(own, starts, strict=True):
                mine.copy_(start)
        try:
            yield
        finally:
            with torch.no_grad():
                for mine, before in own:
                    mine.copy_(before)

    def move(self, process_group: dist.ProcessGroup) -> None:
        """Go on over another group of ranks: those that are left when one was lost, and newcomers.

        Every rank of the new group makes this call, a newcomer after it has made an optimizer over a group of its own (the
        options are the same everywhere). What is under way is dropped. The rank with most exchanges behind it gives start,
        outer optimizer and counts to all, and what the reductions share. Who is behind it (an exchange may have come on one
        rank and failed on another), or new, begins at the start; the others keep what they have moved, and their residuals.

        Raises:
            RankMismatchError: the optimizers do not belong together.
        """
        with torch.no_grad():
            for fragment in self._fragments:
                fragment.drop()
                fragment.reducer.move(process_group)
            if self._buffers is not None:
                self._buffers.move(process_group)
        handed = hand_over(self.state_dict(), (self.landed, self.count), process_group, self._device)
        behind = self.landed < handed["landed"] or self.count == 0
        self.outer.load_state_dict(handed["outer"])
        self.count, self.landed = handed["count"], handed["landed"]
        with torch.no_grad():
            for fragment, given in zip(self._fragments, handed["fragments"], strict=True):
                fragment.join(given, behind=behind)

    def stats(self) -> dict[str, float]:
        """The exchanges' figures added up (see :meth:`commhooks.CommHook.stats`), and ``rounds_done``: whole rounds."""
        reducers = [f.reducer for f in self._fragments] + ([self._buffers] if self._buffers is not None else [])
        rows = [reducer.stats() for reducer in reducers]
        return {key: sum(row[key] for row in rows) for key in rows[0]} | {
            "rounds_done": float(self.landed // len(self._fragments))
        }

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything that goes on to the bit from here on this rank: at any step, on all ranks at the same.

        Exchanges under way are waited for, and what they bring is saved with the step at which it is due. Not the model:
        save that beside it. ``torch.load(weights_only=True)`` reads it.
        """
        return {
            "inner": self.optim.state_dict(),
            "outer": self.outer.state_dict(),
            "count": self.count,
            "landed": self.landed,
            "fragments": [fragment.state_dict() for fragment in self._fragments],
            "schedule": str(self.schedule),
        }

    def load_state_dict(self, state_dict: dict[str, Any], *, world_change: str = "error") -> None:
        """Go on from :meth:`state_dict`, on every rank; the model's own state is loaded beside it. One that is refused
        changes nothing.

        Args:
            state_dict: this rank's.
            world_change: for another number of ranks: see :meth:`commhooks.CommHook.load_state_dict`.

        Raises:
            StateError: it is not such a state, or of another model, schedule or sharding.
        """
        missing = [key for key in _KEYS if key not in state_dict]
        if missing:
            raise StateError(
                f"this is not the state of an OuterOptimizer: {', '.join(missing)} missing. To begin with an inner optimizer's "
                "own state, load that into the inner optimizer"
            )
        if state_dict["schedule"] != str(self.schedule):
            raise StateError(
                f"the state was saved with {state_dict['schedule']}, this is {self.schedule}: give the same every=, "
                "fragments= and overlap="
            )
        parts = list(zip(self._fragments, state_dict["fragments"], strict=True))
        for fragment, saved in parts:
            fragment.check(saved)
        self._load_reducers([saved["reducer"] for _, saved in parts], world_change)
        with torch.no_grad():
            for fragment, saved in parts:
                fragment.load_state_dict(saved)
        self.optim.load_state_dict(state_dict["inner"])
        self.outer.load_state_dict(state_dict["outer"])
        self.count, self.landed = state_dict["count"], state_dict["landed"]

    def _load_reducers(self, states: Sequence[Mapping[str, Any]], world_change: str) -> None:
        """All or none: ranks that refuse one state, all alike, go on with what they had."""
        for fragment in self._fragments:
            fragment.receive()  # a reduction's state is open while its exchange is under way
        reducers = [fragment.reducer for fragment in self._fragments]
        before = [reducer.state_dict() for reducer in reducers]
        for index, reducer in enumerate(reducers):
            try:
                reducer.load_state_dict(states[index], world_change=world_change)
            except CommHooksError:
                for loaded, own in zip(reducers[:index], before, strict=False):
                    loaded.load_state_dict(own)
                raise

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an OuterOptimizer holds a process group and cannot be pickled or copied: save its state_dict()"
        )
