"""FSDP1's units: their hook slot, flat gradient and the end of a backward."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from ch_fsdp.torch_internals.required import missing, need
from commhooks.adapters import NO_BACKWARD, backward_id

try:
    from torch.distributed.fsdp import _traversal_utils as traversal
except ImportError as error:
    raise missing("torch.distributed.fsdp", str(error)) from error

need(ShardingStrategy, "_HYBRID_SHARD_ZERO2")
need(traversal, "_get_fsdp_states")

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class Unit:
    """One FSDP1 unit: the parameters that one wrapped module reduces together.

    Attributes:
        name: fully qualified name of its module, ``"root"`` for the model itself.
    """

    def __init__(self, name: str, state: Any) -> None:
        need(state, "_comm_hook", "_comm_hook_state", "process_group", "sharding_strategy", "_handle")
        self.name = name
        self._state = state

    @property
    def group(self) -> dist.ProcessGroup:
        """The group over which the unit is sharded, or replicated under ``NO_SHARD``."""
        return self._state.process_group  # type: ignore[no-any-return]

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks with the same shard under hybrid sharding, else ``None``."""
        return self._state._inter_node_pg if self._state.sharding_strategy in HYBRID else None

    @property
    def sharded(self) -> bool:
        return self._state.sharding_strategy is not ShardingStrategy.NO_SHARD

    @property
    def hook(self) -> Any:
        return self._state._comm_hook

    @property
    def hook_state(self) -> Any:
        """The state that the user or this package registered with the hook."""
        return self._state._comm_hook_state

    def register(self, state: object, hook: object) -> None:
        """Register a hook for this unit. ``register_comm_hook`` refuses hybrid sharding and acts on all units."""
        self._state._comm_hook_state = state
        self._state._comm_hook = hook

    def numel(self) -> int:
        """Return the number of elements of the hook's gradient, padded."""
        handle = self._state._handle
        if handle is None:
            return 0
        numel = int(math.prod(handle.flat_param._unpadded_unsharded_size))
        world = self.group.size() if self.sharded else 1
        return -(-numel // world) * world

    def dtype(self) -> torch.dtype:
        handle = self._state._handle
        return handle._reduce_dtype or torch.float32 if handle is not None else torch.float32


class UnitBackwardEnd:
    """Calls the adapter when FSDP1 ends a backward.

    torch calls ``next_iter`` of the outermost unit's execution order there. It is the only function that belongs to one
    model.

    Args:
        model: the outermost unit.
        ended: called after all units were reduced.
        forget: called before a forward, to drop a step that an exception interrupted.
    """

    def __init__(self, model: FullyShardedDataParallel, ended: Callable[[], None], forget: Callable[[], None]) -> None:
        need(model, "_exec_order_data")
        self._model, self._ended, self._forget = model, ended, forget
        self._listen()
        self._forward = model.register_forward_pre_hook(self._before_forward)

    def close(self) -> None:
        self._forward.remove()

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if backward_id() == NO_BACKWARD:
            self._listen()
            self._forget()

    def _listen(self) -> None:
        """Become the only listener of the outermost unit, whose execution order torch may have replaced."""
        data: Any = self._model._exec_order_data
        if not hasattr(data, "_commhooks_listener"):
            original = data.next_iter

            @functools.wraps(original)
            def then() -> None:
                original()
                data._commhooks_listener._ended()

            data.next_iter = then
        data._commhooks_listener = self


def is_inner(model: FullyShardedDataParallel) -> bool:
    """Return True if ``model`` is known to be inside of another FSDP1 unit. torch decides it in the first forward."""
    return model._is_root is False


def units(model: FullyShardedDataParallel) -> Iterator[Unit]:
    """Yield every FSDP1 unit of the model that has parameters, in module order."""
    names = {id(module): name for name, module in model.named_modules()}
    for state in traversal._get_fsdp_states(model):
        if state._handle is not None:
            yield Unit(names.get(id(state)) or "root", state)
