"""Everything this package reads or sets of FSDP1 that torch keeps private.

FSDP1 registers no hook under hybrid sharding, and tells a hook neither the unit nor the end of a backward.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from ch_fsdp.torch_internals import missing, need
from commhooks.adapters import NO_BACKWARD, backward_id

try:
    from torch.distributed.fsdp import _traversal_utils as traversal
except ImportError as error:
    raise missing("torch.distributed.fsdp", str(error)) from error

need(ShardingStrategy, "_HYBRID_SHARD_ZERO2")
need(traversal, "_get_fsdp_states")

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class Unit:
    """One FSDP1 unit: what one wrapped module reduces together.

    Attributes:
        name: fully qualified name of its module; ``"root"`` for the model itself.
    """

    def __init__(self, name: str, state: Any) -> None:
        need(state, "_comm_hook", "_comm_hook_state", "process_group", "sharding_strategy", "_handle")
        self.name = name
        self._state = state

    @property
    def group(self) -> dist.ProcessGroup:
        """The group over which the unit is sharded (or, with ``NO_SHARD``, replicated)."""
        return self._state.process_group  # type: ignore[no-any-return]

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """Under hybrid sharding, the group of ranks that hold the same shard."""
        return self._state._inter_node_pg if self._state.sharding_strategy in HYBRID else None

    @property
    def sharded(self) -> bool:
        return self._state.sharding_strategy is not ShardingStrategy.NO_SHARD

    @property
    def hook(self) -> Any:
        return self._state._comm_hook

    @property
    def registered(self) -> Any:
        """The state that the hook was registered with."""
        return self._state._comm_hook_state

    def register(self, state: object, hook: object) -> None:
        """Put a hook in place; unlike ``register_comm_hook``, per unit and under hybrid sharding too."""
        self._state._comm_hook_state = state
        self._state._comm_hook = hook

    def numel(self) -> int:
        """Elements of the gradient that the hook is given, padded."""
        handle = self._state._handle
        if handle is None:
            return 0
        numel = int(math.prod(handle.flat_param._unpadded_unsharded_size))
        world = self.group.size() if self.sharded else 1
        return -(-numel // world) * world

    def dtype(self) -> torch.dtype:
        handle = self._state._handle
        return handle._reduce_dtype or torch.float32 if handle is not None else torch.float32


class UnitEnds:
    """Hears when FSDP1 itself ends a backward: of all its functions at that place, this is one of an object.

    Args:
        model: the outermost unit.
        ended: called when all units have been reduced.
        forget: called before a forward: what has begun by then was cut short by an exception.
    """

    def __init__(self, model: FullyShardedDataParallel, ended: Callable[[], None], forget: Callable[[], None]) -> None:
        need(model, "_exec_order_data")
        self._model, self._ended, self._forget = model, ended, forget
        self._follow()
        self._forward = model.register_forward_pre_hook(self._before_forward)

    def close(self) -> None:
        self._forward.remove()

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if backward_id() == NO_BACKWARD:
            self._follow()
            self._forget()

    def _follow(self) -> None:
        """Listen to what the outermost unit has by now; no other listener is heard any more."""
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
    """Whether this is known not to be the outermost FSDP1 wrapper: torch decides it at the first forward."""
    return model._is_root is False


def units(model: FullyShardedDataParallel) -> Iterator[Unit]:
    """Every FSDP1 unit of the model that has parameters, in module order."""
    names = {id(module): name for name, module in model.named_modules()}
    for state in traversal._get_fsdp_states(model):
        if state._handle is not None:
            yield Unit(names.get(id(state)) or "root", state)
