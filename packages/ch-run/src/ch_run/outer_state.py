"""The state of an outer optimizer that `commhooks run --outer --state` writes at the end of a round.

All ranks hold one model then, which is in the script's checkpoint. The states of the optimizers differ between ranks.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ch_core import StoreExchange, checksum, group_timeout
from ch_run.outer_protocol import Outer
from ch_run.saved_states import Kept, Snapshot
from commhooks import StateError


class OuterKept(Kept):
    """State of an outer optimizer and of the inner ones.

    Options of the script's optimizers, such as the learning rate, stay as the script has loaded them.

    Args:
        expr: expression of the outer optimizer.
        outer: the outer optimizer.
        model: its model.
        optims: the script's optimizers. The last one is the inner optimizer.
        group: the ranks that exchange.

    Raises:
        StateError: ranks never hold one model before the end of the run.
    """

    remedy = "With --outer, save after a step that ends a round: a multiple of every=, plus overlap="

    def __init__(
        self,
        expr: str,
        outer: Outer,
        model: torch.nn.Module,
        optims: Sequence[torch.optim.Optimizer],
        group: dist.ProcessGroup,
    ) -> None:
        if outer.next_common() is None:
            raise StateError(
                f"--state: with {expr} the ranks hold different models until the last step, so no checkpoint of one rank can be "
                "resumed. Use one fragment and mix=0.0 (mix=carry without overlap), or save state_dict() of a ch_outer optimizer "
                "on each rank in the script"
            )
        self._outer, self._optims, self._model = outer, list(optims), list(model.parameters())
        self._module = weakref.ref(model)
        sharded = any(hasattr(param, "to_local") for param in self._model)  # all ranks write then
        stepped = [p for one in optims[-1].param_groups for p in one["params"]]
        super().__init__(expr, stepped, None if sharded else group)

    def fingerprint(self) -> str:
        return checksum(*self._model)

    def whole(self) -> bool:
        return self._outer.common

    def progress(self) -> float:
        """Return the number of inner steps. A backward changes nothing that this state holds."""
        return float(self._outer.count)

    def model(self) -> torch.nn.Module | None:
        return self._module()

    def state_dict(self) -> dict[str, Any]:
        return {"outer": {**self._outer.state_dict(), "inner": {}}, "inner": [_rows(one) for one in self._optims]}

    def load(self, one: Snapshot, rank: int, world: int) -> None:
        """Load a snapshot. On another number of ranks all begin without residuals."""
        state, problem = None, ""
        try:
            state = one.read(rank if one.world == world else 0)
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
        inner = [_with_options(rows, one) for rows, one in zip(state["inner"], self._optims, strict=True)]
        for optim, saved in zip(self._optims[:-1], inner, strict=False):
            optim.load_state_dict(saved)
        outer = {**state["outer"], "inner": inner[-1]}
        self._outer.load_state_dict(outer, world_change="error" if one.world == world else "reset")


SHARD = "shard"  # a shard is saved as a pair of this word and the rank's part


def _rows(optim: torch.optim.Optimizer) -> dict[Any, dict[str, Any]]:
    """Return an optimizer's state by parameter, without its options."""
    return {i: {key: _plain(value) for key, value in row.items()} for i, row in optim.state_dict()["state"].items()}


def _with_options(rows: dict[Any, dict[str, Any]], optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Return saved rows with the options of an optimizer, and their shards cut like its parameters."""
    params = [param for group in optim.param_groups for param in group["params"]]
    state = {i: {key: _sharded(value, params[i]) for key, value in row.items()} for i, row in rows.items()}
    return {"state": state, "param_groups": optim.state_dict()["param_groups"]}


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not hasattr(value, "to_local"):
        return value
    return SHARD, value.to_local().detach()


def _sharded(value: Any, param: torch.Tensor) -> Any:
    if not (isinstance(value, tuple) and value[0] == SHARD):
        return value
    sharded: Any = torch.empty_like(param, dtype=value[1].dtype)
    sharded.to_local().detach().copy_(value[1])
    return sharded
