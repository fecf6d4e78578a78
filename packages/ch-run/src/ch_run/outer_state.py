"""The state of an outer optimizer that `commhooks run --outer --state` writes.

A checkpoint of the script holds the start of the round, so all steps of one round have equal parameters in it. The state of the
script's optimizers tells these steps apart. The first rank's state is often loaded by all ranks, so a snapshot fits if any of
its ranks had the state that this rank has loaded.

A distributed checkpoint of a sharded model takes each tensor of the optimizers from any replica. Only their numbers of steps are
equal on all replicas, so these alone tell the steps of a sharded model apart.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ch_core import StoreExchange, checksum, group_timeout, log
from ch_run.outer_protocol import Outer
from ch_run.saved_states import SAVED, Snapshot
from ch_run.shared_checkpoint import like, local
from commhooks import StateError

DIGITS = 16  # of one checksum; a fingerprint joins the checksums of the parameters and of the optimizers


class OuterKept:
    """State of an outer optimizer, of the inner ones, and of this rank's own parameters and buffers.

    Options of the script's optimizers, such as the learning rate, stay as the script has loaded them.

    Args:
        expr: expression of the outer optimizer.
        outer: the outer optimizer.
        model: its model.
        optims: the script's optimizers. The last one is the inner optimizer.
        group: the ranks that exchange.
    """

    def __init__(
        self,
        expr: str,
        outer: Outer,
        model: torch.nn.Module,
        optims: Sequence[torch.optim.Optimizer],
        group: dist.ProcessGroup,
    ) -> None:
        self.expr, self._outer, self._optims, self._model = expr, outer, list(optims), model
        self._sharded = any(hasattr(param, "to_local") for param in model.parameters())
        everyone: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
        self.group = everyone if self._sharded else group  # with shards, all ranks write
        self.params = [p for one in optims[-1].param_groups for p in one["params"]]

    # -- choice of a snapshot

    def fingerprint(self) -> str:
        shared = [value.to(live.dtype) for live, value in self._outer.shared()]
        return checksum(*shared) + checksum(*self._inner_tensors())

    def found(self) -> str:
        """Return the fingerprint of the values that the script has loaded. It can only be asked before the first step."""
        return checksum(*(local(live) for live, _ in self._outer.shared())) + checksum(*self._inner_tensors())

    def _inner_tensors(self) -> list[torch.Tensor]:
        found = _tensors_of(self._optims)
        return [one for one in found if one.dim() == 0] if self._sharded else found

    def fits(self, one: Snapshot, rank: int, world: int, own: str) -> bool:
        """Compare the parameters, which are equal on all ranks, or this rank's shards."""
        if self._sharded:
            return one.world == world and one.checksums[rank][:DIGITS] == own[:DIGITS]
        return {of_rank[:DIGITS] for of_rank in one.checksums.values()} == {own[:DIGITS]}

    def best(self, fitting: Sequence[Snapshot], own: str) -> list[Snapshot]:
        """Return the snapshots that hold the loaded state of the optimizers. If there are several, prefer marked ones.

        Plain SGD has no state. Its steps in one round are told apart only by the times at which the script saved.
        """
        same = [one for one in fitting if own[DIGITS:] in {of_rank[DIGITS:] for of_rank in one.checksums.values()}]
        found = same or list(fitting)
        marked = [one for one in found if (one.folder / SAVED).exists()]
        if len(marked) > 1:
            log.warning(
                "--state: the script's checkpoints after the steps %s hold equal parameters and optimizers, so the latest of "
                "them is taken as resumed",
                ", ".join(str(one.step) for one in marked),
            )
        return marked or found

    # -- the state

    def progress(self) -> float:
        """Return the number of inner steps. A backward changes nothing that this state holds."""
        return float(self._outer.count)

    def state_dict(self) -> dict[str, Any]:
        state = self._outer.state_dict()
        inner = [_without_options(one) for one in (*(one.state_dict() for one in self._optims[:-1]), state["inner"])]
        return {"outer": {**state, "inner": inner[-1]}, "others": inner[:-1], "own": [t.clone() for t in self._own()]}

    def load(self, one: Snapshot, rank: int, world: int) -> None:
        """Load a snapshot. On another number of ranks all begin at the start, without residuals and without moves."""
        state, problem = None, ""
        try:
            state = one.read(rank if one.world == world else 0)
            shapes = [tuple(t.shape) for t in state["own"]]
            if shapes != [tuple(t.shape) for t in self._own()]:
                problem = f"its tensors have the shapes {shapes[:6]} ..."
        except Exception as error:  # a file may be damaged in any way
            problem = f"{type(error).__name__}: {error}"
        exchange = StoreExchange(self.group, group_timeout(self.group))
        bad = [of for of, row in enumerate(exchange(b"1" if problem else b"0")) if row == b"1"]
        if bad:
            raise StateError(
                f"--state: the files of the ranks {bad} in {one.folder} do not fit or cannot be read ({problem or 'not here'}). "
                "Remove this folder, and resume the script from another checkpoint"
            )
        assert state is not None  # noqa: S101 - otherwise a problem
        for optim, saved in zip(self._optims[:-1], state["others"], strict=True):
            optim.load_state_dict(_with_options(saved, optim))
        outer = {**state["outer"], "inner": _with_options(state["outer"]["inner"], self._optims[-1])}
        self._outer.load_state_dict(outer, world_change="error" if one.world == world else "reset")
        if one.world == world:
            with torch.no_grad():
                for own, saved in zip(self._own(), state["own"], strict=True):
                    own.copy_(saved)

    def _own(self) -> list[torch.Tensor]:
        """Return this rank's parameters and buffers."""
        return [local(t) for t in (*self._model.parameters(), *self._model.buffers())]


def _tensors_of(optims: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return the state of optimizers as tensors, in the order of their parameters."""
    found: list[torch.Tensor] = []
    for optim in optims:
        for index, row in sorted(optim.state_dict()["state"].items()):
            for key in sorted(row):
                value = row[key]
                if isinstance(value, int | float):
                    value = torch.tensor(float(value), dtype=torch.float64, device="cpu")
                if isinstance(value, torch.Tensor):
                    found += [torch.tensor(index, dtype=torch.int64, device="cpu"), value]
    return found


def _without_options(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state without its options. A shard becomes a pair of `SHARD` and this rank's part."""
    rows = {index: {key: _plain(value) for key, value in row.items()} for index, row in state["state"].items()}
    return {"state": rows, "param_groups": [{"params": list(g["params"])} for g in state["param_groups"]]}


def _with_options(state: dict[str, Any], optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a saved state with the options of an optimizer, and its shards cut like the parameters."""
    own = optim.state_dict()["param_groups"]
    groups = [{**here, "params": there["params"]} for here, there in zip(own, state["param_groups"], strict=True)]
    params = [param for group in optim.param_groups for param in group["params"]]
    names = [name for group in groups for name in group["params"]]
    of_name = dict(zip(names, params, strict=True))
    rows = {i: {k: _sharded(v, of_name.get(i)) for k, v in row.items()} for i, row in state["state"].items()}
    return {"state": rows, "param_groups": groups}


SHARD = "shard"


def _plain(value: Any) -> Any:
    return (SHARD, local(value)) if isinstance(value, torch.Tensor) and hasattr(value, "to_local") else value


def _sharded(value: Any, param: torch.Tensor | None) -> Any:
    if not (isinstance(value, tuple) and value[0] == SHARD and param is not None):
        return value
    return like(torch.empty_like(param, dtype=value[1].dtype), value[1])
