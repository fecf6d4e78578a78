"""A fragment of the parameters, its start, and the exchange that moves the start.

One round of a fragment, where ``p_i`` are its parameters on rank i::

    delta_i = start - p_i                      the pseudo-gradient
    delta   = reduction(delta_1 ... delta_W)   travels while inner steps continue
    start   = outer optimizer (start, delta)   on arrival, equal on all ranks
    p_i     = (1 - mix) * start + mix * p_i    or with mix="carry": p_i + start - (p_i at the start of the exchange)

DiLoCo is arXiv:2311.08105. Fragments, overlap and mix come from Streaming DiLoCo, arXiv:2501.18512. ``mix="carry"`` is the
delay-corrected merge of LOSCAR-SGD, arXiv:2605.20866.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ch_core import RankCheck, Weighing
from ch_outer.parameters import local
from ch_outer.schedule import CARRY
from commhooks import HookConfigError, PendingAverage, RankMismatchError, Reducer, StateError


def start_of(param: torch.Tensor) -> torch.Tensor:
    """Return a copy in the precision of the outer step. It is at least fp32, because bf16 would lose small steps."""
    mine = local(param)
    return mine.to(torch.promote_types(mine.dtype, torch.float32), copy=True)


def divide(params: Mapping[str, torch.Tensor], fragments: int) -> list[list[str]]:
    """Return the parameter names of each fragment.

    Args:
        params: parameters by name, in model order.
        fragments: number of consecutive fragments of about equal size.

    Raises:
        HookConfigError: there are more fragments than parameters.

    Example:
        >>> divide({"a": torch.zeros(4), "b": torch.zeros(2), "c": torch.zeros(2)}, 2)
        [['a'], ['b', 'c']]
    """
    if not 1 <= fragments <= len(params):
        raise HookConfigError(f"fragments={fragments}: expected 1 to {len(params)}, the number of parameters")
    total = sum(p.numel() for p in params.values())
    found: list[list[str]] = [[]]
    passed, remaining = 0, len(params)
    for name, param in params.items():
        full = passed + param.numel() / 2 > total * len(found) / fragments
        scarce = remaining <= fragments - len(found)  # each of the later fragments needs a parameter
        if found[-1] and len(found) < fragments and (full or scarce):
            found.append([])
        found[-1].append(name)
        passed += param.numel()
        remaining -= 1
    return found


class Fragment:
    """Some parameters and their rounds.

    Args:
        params: parameters by name, in model order.
        starts: their starts, which the outer optimizer moves.
        reducer: averages tensors of the shapes of the starts.
        mix: see :class:`.Schedule`.
        compared: further starts that are compared over all ranks with those of this fragment, by a digest of their bits in each
            round. They belong to parameters that are about to be exchanged. ``None`` compares nothing.

    Attributes:
        since: number of inner steps at the start of the exchange under way, or ``None``.
        settled: number of inner steps at the start of the last exchange, if it left the parameters at the start, or ``None``.
        landed: number of inner steps at the start of the last exchange that has arrived, or ``None`` if that is not known.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        starts: Mapping[str, torch.Tensor],
        reducer: Reducer,
        mix: float | str,
        compared: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.params, self.starts, self.reducer, self.mix = dict(params), dict(starts), reducer, mix
        self.since: int | None = None
        self.settled: int | None = None
        self.landed: int | None = None
        self._exchange: PendingAverage | None = None
        self._sent_from: dict[str, torch.Tensor] = {}  # this rank's parameters when the exchange started, if needed
        # Rounding of 16-bit parameters: exact place minus parameter. Without it, the next pseudo-gradient would contain the
        # rounding, and a start that moves by less than the parameter's precision would never move.
        self._rounding: dict[str, torch.Tensor] = {}
        self._moves = Weighing()  # of the inner steps since the last exchange, if rounds are weighted
        self.sent_weight: float | torch.Tensor | None = None  # of the exchange under way, or of the last one
        self._check = RankCheck(1, "raise")
        binding = reducer.handle.binding
        if compared is not None and binding is not None and binding.engine is not None:
            group = binding.group
            ranks = range(reducer.world_size) if group is None else dist.get_process_group_ranks(group)
            own = self.starts
            self._check.watch(lambda: {**own, **compared}.items(), lambda: ranks)
            binding.engine.rank_check = self._check

    # -- one round

    def weigh(self, n: float | torch.Tensor) -> None:
        """Add to this rank's weight in the next round."""
        self._moves.add(n)

    def weights(self) -> list[float | torch.Tensor]:
        """Return the weights of the last exchange and of the inner steps since its start, if rounds are weighted."""
        return [weight for weight in (self.sent_weight, self._moves.weight) if weight is not None]

    def begin(self, count: int, error: Exception | None = None) -> None:
        """Start the exchange of the pseudo-gradient.

        Args:
            count: inner steps done.
            error: a reason why this rank cannot contribute. All ranks raise when they receive the exchange.
        """
        sent_from: dict[str, torch.Tensor] = {}
        error = error or self.fill()
        if error is None and self.mix == CARRY:
            sent_from = {name: self._position(name).clone() for name in self.starts}
        self.sent_weight = self._moves.weight
        self._moves.clear()
        if self.sent_weight is not None:
            self.reducer.weigh(self.sent_weight)
        self._exchange = self.reducer.start(error=error)
        self._sent_from, self.since = sent_from, count

    def fill(self) -> Exception | None:
        """Write the pseudo-gradient into the reducer. Return an error, because raised here it would leave the peers waiting."""
        try:
            for name, start in self.starts.items():
                here = self._position(name)
                if here.shape != start.shape:
                    return HookConfigError(
                        f"the parameter {name!r} has shape {tuple(here.shape)} and had {tuple(start.shape)} when the "
                        "OuterOptimizer was made. Make another OuterOptimizer on all ranks"
                    )
                torch.sub(start, here, out=self.reducer.tensors[name])
        except Exception as error:  # of any type, for the reason above
            return error
        return None

    def apart(self) -> float:
        """Return the distance of this rank's parameters from the received mean, divided by the norm of the start."""
        device = next(iter(self.starts.values())).device
        squares = [torch.zeros((), dtype=torch.float64, device=device) for _ in range(2)]
        for name, start in self.starts.items():
            here = self._sent_from[name] if name in self._sent_from else self._position(name)
            squares[0] += (start - here - self.reducer.tensors[name]).square().sum()
            squares[1] += start.square().sum()
        distance, norm = torch.stack(squares).sqrt().tolist()
        return float(distance / norm) if norm else 0.0

    def advance(self) -> None:
        """Complete one stage of the exchange under way."""
        if self._exchange is not None:
            self._exchange.advance()

    def receive(self) -> None:
        """Wait for the average of the exchange under way. It stays unused in the reducer's memory."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            try:
                exchange.wait()
            except BaseException as error:  # any type, because the rank that failed raises its own error
                self.miss()
                drift, self._check.drift = self._check.drift, None
                if drift is None or not isinstance(error, RankMismatchError):
                    raise
                raise RankMismatchError(
                    f"the ranks have different starts of this round ({drift}). Load the same values and unfreeze the same "
                    "parameters on all ranks. A copy that a rank takes of its model inside a round, where ranks hold different "
                    "parameters, cannot be loaded again: put it back by copy_() instead of load_state_dict(), or copy the model "
                    "at the end of a round"
                ) from None

    def miss(self) -> None:
        """Drop this round. The next pseudo-gradient contains its moves, so the next weight contains its weight."""
        if self.since is not None and self.sent_weight is not None:
            self.weigh(self.sent_weight)
        self.since = None
        self._sent_from.clear()

    def land(self, outer: Optimizer, *, healed: bool = False) -> None:
        """Move the start by the average, and move the parameters to the start.

        Args:
            outer: steps the start.
            healed: True if this rank has just received the start of a peer, so that its own parameters do not count.
        """
        self.receive()
        since, self.since = self.since, None
        self.landed = since
        for name, start in self.starts.items():
            start.grad = self.reducer.tensors[name]
        outer.step()
        for start in self.starts.values():
            start.grad = None
        for name in self.starts:
            self._arrive(name, 0.0 if healed else self.mix)
        self._sent_from.clear()
        self.settled = since if self.mix in (0.0, CARRY) else None

    def _arrive(self, name: str, mix: float | str) -> None:
        target, here = self.starts[name], self._position(name)
        if isinstance(mix, str):
            # An element without a move takes the start itself. The sum would round it.
            sent = self._sent_from[name]
            target = torch.where(here == sent, target, here + (target - sent))
        elif mix:
            target = torch.lerp(here.to(target.dtype), target, 1.0 - mix)
        self._move_to(name, target)

    def _position(self, name: str) -> torch.Tensor:
        """Return the exact place of a parameter on this rank, which 16 bits may not hold."""
        mine = local(self.params[name])
        return mine + self._rounding[name] if name in self._rounding else mine

    def _move_to(self, name: str, target: torch.Tensor) -> None:
        mine = local(self.params[name])
        mine.copy_(target)
        self._rounding.pop(name, None)  # its dtype is outdated if the model was converted
        if mine.dtype != target.dtype:
            self._rounding[name] = target - mine

    @property
    def waiting(self) -> bool:
        """True if the average has arrived early, for a checkpoint, and is unused."""
        return self.since is not None and self._exchange is None

    def drop(self) -> None:
        """Forget the exchange under way after its group is lost."""
        self.reducer.abandon()
        self._exchange = self.settled = None
        self.miss()

    def renumber(self, ahead: int) -> None:
        """Count inner steps as a peer does whose start this rank has taken, and which is some steps ahead."""
        self.landed = None  # unknown for the peer's start
        if self.since is not None:
            self.since += ahead

    def begin_at(self, starts: Mapping[str, torch.Tensor]) -> None:
        """Set the start, and move the parameters there."""
        for name, start in self.starts.items():
            start.copy_(starts[name])
            self._move_to(name, start)
        self._forget_moves()

    def _forget_moves(self) -> None:
        """Count no inner steps so far, because the parameters are at the start."""
        if self._moves.weight is not None:
            self._moves.clear()
            self._moves.add(0.0)

    def load(self, loaded: Collection[int]) -> None:
        """Move the start to parameters of these identities, which the script has just loaded on all ranks.

        The load is no move of the round. An exchange under way has moves from another start, so it does not count.
        """
        for name, param in self.params.items():
            if id(param) in loaded:
                self.receive()
                self.miss()
                self.starts[name].copy_(local(param))
                self._rounding.pop(name, None)
        if all(id(param) in loaded for param in self.params.values()):
            self._forget_moves()

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the start, the state of the reduction, and an average that arrived before it is due."""
        self.receive()
        waiting = self.since is not None
        return {
            "start": {name: start.clone() for name, start in self.starts.items()},
            "reducer": self.reducer.state_dict(),
            "since": self.since,
            "settled": self.settled,
            "mean": {name: self.reducer.tensors[name].clone() for name in self.starts} if waiting else {},
            "left": {name: tensor.clone() for name, tensor in self._sent_from.items()} if waiting else {},
            "rest": {name: tensor.clone() for name, tensor in self._rounding.items()},
            "weight": None if self._moves.weight is None else float(self._moves.weight),
            "sent_weight": float(self.sent_weight) if waiting and self.sent_weight is not None else None,
        }

    def check(self, saved: Mapping[str, Any]) -> None:
        """Refuse a state of other parameters.

        Raises:
            StateError: names a parameter that differs.
        """
        for key in ("start", "mean", "left", "rest"):
            own = saved["rest"].keys() & self.starts.keys() if key == "rest" else self.starts.keys()
            for name in saved[key].keys() ^ own if saved[key] else ():
                raise StateError(
                    f"the saved outer state and this model's fragments differ in {name!r}. Use the same model and fragments="
                )
            for name, tensor in saved[key].items():
                if tensor.shape != self.starts[name].shape:
                    raise StateError(
                        f"the saved {key} of {name!r} has shape {tuple(tensor.shape)}, here it is "
                        f"{tuple(self.starts[name].shape)}. A state of shards fits only the same sharding"
                    )

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a state that :meth:`check` has accepted. Its ``"reducer"`` is already in the reducer."""
        self._exchange, self.since, self.settled = None, saved["since"], saved.get("settled")
        self._moves.clear()
        if saved.get("weight") is not None:
            self._moves.add(saved["weight"])
        self.sent_weight = saved.get("sent_weight")
        self.landed = self.settled  # steps of the loaded run, not of this process
        for name, start in self.starts.items():
            start.copy_(saved["start"][name])
            if self.since is not None:
                self.reducer.tensors[name].copy_(saved["mean"][name])
        device = {name: start.device for name, start in self.starts.items()}
        self._sent_from = {name: tensor.to(device[name], copy=True) for name, tensor in saved["left"].items()}
        self._rounding = {name: tensor.to(device[name], copy=True) for name, tensor in saved["rest"].items()}
