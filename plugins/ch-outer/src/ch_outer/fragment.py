"""A part of the parameters: where they started, and the exchange that moves the start.

Over the rounds of one fragment, with ``p_i`` its parameters on rank i::

    delta_i = start - p_i                      the pseudo-gradient
    delta   = reduction(delta_1 ... delta_W)   under way while inner steps go on
    start   = outer optimizer (start, delta)   on arrival, the same on every rank
    p_i     = (1 - mix) * start + mix * p_i    or, carried: p_i + start - what p_i was when the exchange started

DiLoCo is arXiv:2311.08105, fragments, overlap and mix are those of Streaming DiLoCo, arXiv:2501.18512; to carry what the inner
steps did during the overlap is the delay-corrected merge of LOSCAR-SGD, arXiv:2605.20866.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ch_outer.joining import joined
from commhooks import Exchange, HookConfigError, Reducer, StateError

CARRY = "carry"  # on arrival, what this rank's inner steps did during the overlap is added to the new start


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of a parameter lies on this rank: itself, or its shard (FSDP2)."""
    found = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def start_of(param: torch.Tensor) -> torch.Tensor:
    """A copy in the precision of the outer step: at least fp32, or a small step would be lost in bf16."""
    mine = local(param)
    return mine.to(torch.promote_types(mine.dtype, torch.float32), copy=True)


class Fragment:
    """Some parameters, by name, and their rounds.

    Args:
        params: the parameters, in model order.
        starts: their starts, which the outer optimizer moves.
        reducer: averages tensors of the shapes of the starts.
        mix: part of a rank's own parameters that stays on arrival; or :data:`CARRY`.
        fixed: whether the ranks stay, so that one that is alone knows that nobody else receives the average.

    Attributes:
        since: inner steps done when the exchange under way was started; ``None`` if none is.

    Raises:
        HookConfigError: another ``mix``.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        starts: Mapping[str, torch.Tensor],
        reducer: Reducer,
        mix: float | str,
        *,
        fixed: bool = True,
    ) -> None:
        if mix != CARRY and (isinstance(mix, str) or not 0.0 <= mix <= 1.0):
            raise HookConfigError(f"mix={mix!r}: expected a part of a rank's own parameters, from 0 to 1, or {CARRY!r}")
        self.params, self.starts, self.reducer, self.mix = dict(params), dict(starts), reducer, mix
        self.since: int | None = None
        self._exchange: Exchange | None = None
        self._fixed = fixed
        # Where this rank was when the exchange started: for what is carried, and for a rank that is alone.
        self._left: dict[str, torch.Tensor] = {}
        # What parameters of 16 bits could not hold of where they were put. It is no move of this rank's: left out here, the next
        # pseudo-gradient would take it back, and a start that moves by less than they can hold would not move at all.
        self._rest: dict[str, torch.Tensor] = {}

    def begin(self, count: int, error: Exception | None = None) -> None:
        """Start the exchange of what the inner steps have moved since the start.

        Args:
            count: inner steps done.
            error: why this rank cannot contribute. All ranks raise when the exchange is received.
        """
        left: dict[str, torch.Tensor] = {}
        try:
            for name, start in self.starts.items() if error is None else ():
                held = self._held(name)
                if held.shape != start.shape:
                    raise HookConfigError(
                        f"the parameter {name!r} has shape {tuple(held.shape)} and had {tuple(start.shape)} when the "
                        "OuterOptimizer was made: make another OuterOptimizer on all ranks"
                    )
                torch.sub(start, held, out=self.reducer.tensors[name])
                if self.mix == CARRY or self._alone:
                    left[name] = held.clone()
        except Exception as own:  # raised here, it would leave the peers alone in their round
            error = own
        self._exchange = self.reducer.start(error=error)
        self._left, self.since = left, count

    def advance(self) -> None:
        """The next stage of the exchange under way."""
        if self._exchange is not None:
            self._exchange.advance()

    def receive(self) -> None:
        """Have the average of the exchange under way, if there is one; it is not used yet."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            try:
                exchange.wait()
            except BaseException:  # on the rank that failed it is the reduction's own error
                self.miss()
                raise

    def miss(self) -> None:
        """This round never was: the next one's pseudo-gradient holds what it would have moved."""
        self.since = None
        self._left.clear()

    def land(self, outer: Optimizer, *, healed: bool = False) -> None:
        """The exchange has come: move the start, and bring the parameters there.

        Args:
            outer: steps the start.
            healed: this rank has just taken over the start: what its parameters were is no part of it.
        """
        self.receive()
        self.since = None
        there = {name: self._exact_end(name) for name in self._left} if self._alone else {}
        for name, start in self.starts.items():
            start.grad = self.reducer.tensors[name]
        outer.step()
        for name, start in self.starts.items():
            start.grad = None
            if name in there:
                end, left = there[name]
                start.copy_(torch.where(start == end, left, start))
            self._arrive(name, 0.0 if healed else self.mix)
        self._left.clear()

    def _held(self, name: str) -> torch.Tensor:
        """Where this rank is."""
        mine = local(self.params[name])
        return mine + self._rest[name] if name in self._rest else mine

    def _put(self, name: str, there: torch.Tensor) -> None:
        mine = local(self.params[name])
        mine.copy_(there)
        self._rest.pop(name, None)  # of another dtype, if the model was converted
        if mine.dtype != there.dtype:
            self._rest[name] = there - mine

    def _arrive(self, name: str, mix: float | str) -> None:
        there, held = self.starts[name], self._held(name)
        if isinstance(mix, str):
            # What has not moved is at the start; what has is not rounded where the new start is what this rank had left.
            there = torch.where(held == self._left[name], there, held + (there - self._left[name]))
        elif mix:
            there = torch.lerp(held.to(there.dtype), there, 1.0 - mix)
        self._put(name, there)

    @property
    def _alone(self) -> bool:
        """Asked in every round: ranks come to a group, and leave it."""
        return self._fixed and self.reducer.world_size == 1

    def begin_at(self, starts: Mapping[str, torch.Tensor]) -> None:
        """Take over a start, and go on from there."""
        for name, start in self.starts.items():
            start.copy_(starts[name])
            self._put(name, start)

    def _exact_end(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the start comes to if the outer step takes all of this rank's pseudo-gradient, and where that is exactly.

        ``start - (start - p)`` is not ``p`` in floating point, if the two are far apart. A rank that is alone knows the
        average of all ranks' parameters without that rounding: it is what it holds. So rate 1 without momentum leaves
        the inner optimizer alone, to the bit. (Several ranks do not know it, and all have to come to the same bits.)
        """
        left, start = self._left[name].to(self.starts[name].dtype), self.starts[name]
        return start - (start - left), left

    @property
    def waiting(self) -> bool:
        """Whether the average has come, and is not used yet: a checkpoint wanted it."""
        return self.since is not None and self._exchange is None

    def drop(self) -> None:
        """Forget the exchange under way: its group is lost."""
        self.reducer.abandon()
        self._exchange = None
        self.miss()

    def join(self, given: Mapping[str, Any], *, behind: bool) -> None:
        """Go on from another member's start and shared state.

        Args:
            given: its :meth:`state_dict`.
            behind: whether this rank has missed what moved that start, or is new: it begins there, without residuals.
        """
        self.check(given)
        if behind:
            self.begin_at(given["start"])
        else:
            for name, start in self.starts.items():
                start.copy_(given["start"][name])
        own = self.reducer.state_dict()
        self.reducer.load_state_dict(joined(own, given["reducer"], behind=behind))

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Start, state of the reduction, and the average that has come but is not due yet."""
        self.receive()
        waiting = self.since is not None
        return {
            "start": {name: start.clone() for name, start in self.starts.items()},
            "reducer": self.reducer.state_dict(),
            "since": self.since,
            "mean": {name: self.reducer.tensors[name].clone() for name in self.starts} if waiting else {},
            "left": {name: tensor.clone() for name, tensor in self._left.items()} if waiting else {},
            "rest": {name: tensor.clone() for name, tensor in self._rest.items()},
        }

    def check(self, saved: Mapping[str, Any]) -> None:
        """Refuse a state of other parameters.

        Raises:
            StateError: naming one of them; or an exchange was under way, of which this one needs more than was saved.
        """
        if self.mix == CARRY and saved["mean"] and not saved["left"]:
            raise StateError(f"saved with an exchange under way and without mix={CARRY!r}: go on with the mix= it had")
        for key in ("start", "mean", "left", "rest"):
            own = saved["rest"].keys() & self.starts.keys() if key == "rest" else self.starts.keys()
            for name in saved[key].keys() ^ own if saved[key] else ():
                raise StateError(
                    f"the saved outer state and this model's fragments differ in {name!r}: give the same model and fragments="
                )
            for name, tensor in saved[key].items():
                if tensor.shape != self.starts[name].shape:
                    raise StateError(
                        f"the saved {key} of {name!r} has shape {tuple(tensor.shape)}, here it is "
                        f"{tuple(self.starts[name].shape)}: a state of shards fits the same sharding only"
                    )

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, which :meth:`check` has passed, and whose ``"reducer"`` the reducer has loaded."""
        self._exchange, self.since = None, saved["since"]
        for name, start in self.starts.items():
            start.copy_(saved["start"][name])
            if self.since is not None:
                self.reducer.tensors[name].copy_(saved["mean"][name])
        self._left = {name: tensor.to(self.starts[name].device, copy=True) for name, tensor in saved["left"].items()}
        self._rest = {name: tensor.to(self.starts[name].device, copy=True) for name, tensor in saved["rest"].items()}
