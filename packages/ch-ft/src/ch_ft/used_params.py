"""Make DDP agree with all members on the parameters that a step used.

DDP averages a gradient only if some rank used the parameter. It asks by an all-reduce over its process group of a map
with one number per parameter. DDP's group reaches no other member, because members come and go. So each model sends the
map through its manager, together with the last bucket, and its group answers DDP with the result. Without it, a
parameter that some members leave unused would keep its gradient there and take the average elsewhere.
"""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ch_ddp import TensorFuture, future_for
from commhooks import after_backward

_IDLE = 2.0**-20  # below the mean of one member's 1 over any number of members


class UsedParams:
    """Records the parameters that this member used since its last averaged backward, as DDP does.

    Args:
        params: parameters that DDP averages, in model order.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter]) -> None:
        self._params = params
        self._used = bytearray(len(params))
        self._everywhere: TensorFuture | None = None
        hooks = [p.register_post_accumulate_grad_hook(partial(_mark, self._used, i)) for i, p in enumerate(params)]
        weakref.finalize(self, _remove, hooks).atexit = False

    def map(self, device: torch.device) -> torch.Tensor:
        """Return a fresh map, ``(params,)`` float32, because a manager averages floating point only.

        It has 1 for a parameter that this member used, :data:`_IDLE` for one that only has an old gradient, else 0.
        """
        values = torch.frombuffer(self._used, dtype=torch.uint8).float()
        if 0 in self._used:
            idle = [i for i, used in enumerate(self._used) if not used and self._params[i].grad is not None]
            values[idle] = _IDLE
        return values.to(device)

    def forget(self) -> None:
        """Drop the members' map: the step is lost, and DDP goes by this member's own."""
        self._everywhere = None

    def share(self, everywhere: torch.Tensor, participating: bool) -> None:
        """Take the map that all members share.

        Args:
            everywhere: ``(params,)``, mean or maximum of the participants' maps.
            participating: True if this member's own map is part of it. Otherwise the host reads the map.
        """
        if not participating:
            self._match_participants(everywhere)
        self._everywhere = future_for(everywhere)  # on CUDA, the stream that answers waits for this one
        self._everywhere.set_result(everywhere)

    def answer(self, asked: torch.Tensor) -> None:
        """Write the members' map into DDP's, ``(params,)`` int32, and begin the next record."""
        everywhere, self._everywhere = self._everywhere, None
        self._used[:] = bytes(len(self._used))
        if everywhere is not None:
            asked.copy_(everywhere.wait() > _IDLE)

    def _match_participants(self, everywhere: torch.Tensor) -> None:
        """End with the participants' gradients, also for a parameter that only this member used.

        If no participant used a parameter, the participants leave its gradient unchanged. If they have no gradient,
        this member clears its own. If they have an old gradient, this member keeps its own old gradient, which is
        equal. If its own is missing or changed by its backward, it takes the average of the participants' gradients.
        """
        values, missing, absent = everywhere.tolist(), [], []
        for i, (param, value) in enumerate(zip(self._params, values, strict=True)):
            if 0 < value <= _IDLE and (self._used[i] or param.grad is None):
                missing.append(i)
            elif value == 0:
                absent.append(param)
        everywhere[missing] = 1.0
        if absent:
            after_backward(partial(_clear, absent))


class GroupOfOne(dist.ProcessGroup):
    """Process group that DDP talks to. It holds one rank and connects to no peer.

    DDP compares shapes and broadcasts parameters at construction, and broadcasts buffers before each forward. Members
    change from step to step, so these calls must reach no other member. A healing member receives parameters and
    buffers through the manager instead. DDP averages no gradient over its group, because a hook is always registered.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # the signature for groups of Python
        self.used: UsedParams | None = None
        self._done = _Done()  # kept here: torch holds works of Python by weak references

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Answer DDP's question for used parameters, which ends a backward."""
        if self.used is not None:
            self.used.answer(tensors[0])
        return self._done

    def allgather(  # type: ignore[override]
        self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        output_tensors[0][0].copy_(input_tensors[0])
        return self._done

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        return self._done

    def getBackendName(self) -> str:
        return "commhooks-single-rank"


class _Done(dist.Work):
    """Finished collective."""

    def wait(self, timeout: Any = None) -> bool:
        return True


def _mark(used: bytearray, index: int, param: torch.Tensor) -> None:
    used[index] = 1


def _remove(hooks: list[torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _clear(params: Sequence[torch.nn.Parameter]) -> None:
    for param in params:
        param.grad = None
