"""A part of the parameters: where they started, and the exchange that moves the start.

Over the rounds of one fragment, with ``p_i`` its parameters on rank i::

    delta_i = start - p_i                      the pseudo-gradient
    delta   = reduction(delta_1 ... delta_W)   under way while inner steps go on
    start   = outer optimizer (start, delta)   on arrival, the same on every rank
    p_i     = (1 - mix) * start + mix * p_i

DiLoCo is arXiv:2311.08105, fragments, overlap and mix are those of Streaming DiLoCo, arXiv:2501.18512.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ch_outer.joining import joined
from commhooks import CommHooksError, Exchange, Reducer, StateError


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
        mix: part of a rank's own parameters that stays on arrival.
        fixed: whether the ranks stay, so that one that is alone knows that nobody else receives the average.

    Attributes:
        since: inner steps done when the exchange under way was started; ``None`` if none is.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        starts: Mapping[str, torch.Tensor],
        reducer: Reducer,
        mix: float,
        *,
        fixed: bool = True,
    ) -> None:
        self.params, self.starts, self.reducer, self.mix = dict(params), dict(starts), reducer, mix
        self.since: int | None = None
        self._exchange: Exchange | None = None
        self._fixed = fixed
        self._left: dict[str, torch.Tensor] = {}  # where a rank that is alone was when the exchange started

    def begin(self, count: int) -> None:
        """Start the exchange of what the inner steps have moved since the start."""
        for name, start in self.starts.items():
            torch.sub(start, local(self.params[name]), out=self.reducer.tensors[name])
        self._exchange = self.reducer.start()
        if self._fixed and self.reducer.world_size == 1:  # asked in every round: ranks come to a group, and leave it
            self._left = {name: local(self.params[name]).clone() for name in self.starts}
        self.since = count

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
        mix = 0.0 if healed else self.mix
        there = {name: self._exact_end(name) for name in self._left}
        for name, start in self.starts.items():
            start.grad = self.reducer.tensors[name]
        outer.step()
        for name, start in self.starts.items():
            start.grad = None
            if name in there:
                end, left = there[name]
                start.copy_(torch.where(start == end, left, start))
            mine = local(self.params[name])
            mine.lerp_(start.to(mine.dtype), 1.0 - mix) if mix else mine.copy_(start)
        self._left.clear()

    def begin_at(self, starts: Mapping[str, torch.Tensor]) -> None:
        """Take over a start, and go on from there."""
        for name, start in self.starts.items():
            start.copy_(starts[name])
            local(self.params[name]).copy_(start)

    def _exact_end(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the start comes to if the outer step takes all of this rank's pseudo-gradient, and where that is exactly.

        ``start - (start - p)`` is not ``p`` in floating point, if the two are far apart. A rank that is alone knows the
        average of all ranks' parameters without that rounding: it is what it holds. So rate 1 without momentum leaves
        the inner optimizer alone, to the bit. (Several ranks do not know it, and all have to come to the same bits.)
        """
        left, start = self._left[name].to(self.starts[name].dtype), self.starts[name]
        return start - (start - left), left

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
        }

    def check(self, saved: Mapping[str, Any]) -> None:
        """Refuse a state of other parameters.

        Raises:
            StateError: naming one of them.
        """
        for key in ("start", "mean", "left"):
            for name in saved[key].keys() ^ self.starts.keys() if saved[key] else ():
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


def load_reducers(fragments: Sequence[Fragment], states: Sequence[Mapping[str, Any]], world_change: str) -> None:
    """All or none: ranks that refuse one state, all alike, go on with what they had."""
    for fragment in fragments:
        fragment.receive()  # a reduction's state is open while its exchange is under way
    reducers = [fragment.reducer for fragment in fragments]
    before = [reducer.state_dict() for reducer in reducers]
    for index, reducer in enumerate(reducers):
        try:
            reducer.load_state_dict(states[index], world_change=world_change)
        except CommHooksError:
            for loaded, own in zip(reducers[:index], before, strict=False):
                loaded.load_state_dict(own)
            raise
