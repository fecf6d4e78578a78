"""Collectives over a ``torch.distributed`` process group."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commhooks.errors import HookTimeoutError, TransportError
from commhooks.transport.base import Transport, Work
from commhooks.transport.lost import give_up, refuse_lost

# torch 2.13 renames the flat collectives and warns of the old names at every call.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


class ProcessGroupWork:
    """``torch.distributed`` work with a deadline and typed errors; keeps its tensors alive until it is done."""

    __slots__ = ("_keep", "_what", "_work")

    def __init__(self, work: dist.Work, what: str, *keep: torch.Tensor) -> None:
        self._work, self._what, self._keep = work, what, keep

    def wait(self, timeout: float | None) -> None:
        on_cpu = not self._keep[0].is_cuda
        begun = time.monotonic()
        try:
            # On CUDA a timeout would make the host wait for the kernel; the stream waits instead.
            if timeout is not None and on_cpu:
                self._work.wait(timedelta(seconds=timeout))
            else:
                self._work.wait()
        except RuntimeError as error:
            waited = time.monotonic() - begun
            if timeout is not None and waited >= 0.95 * timeout:
                raise HookTimeoutError(
                    f"{self._what} was not done after {waited:.1f} s (deadline {timeout:g} s): a rank is frozen, or "
                    "does not take part in the same collectives. Raise attach(timeout=...) if ranks are merely slow"
                ) from error
            raise TransportError(f"{self._what} failed: {error}") from error

    def future(self) -> Any:
        return self._work.get_future()

    def is_completed(self) -> bool:
        return self._work.is_completed()


class ProcessGroupTransport:
    """Collectives over a ``torch.distributed`` process group.

    Args:
        group: the group; ``None`` is the default group.
        free: see :class:`Transport`; granted where gloo carries a CPU's tensors. Another backend may lack some
            collectives, or be there to see those it is asked for.

    Raises:
        TransportError: there is no process group.
    """

    elastic = False
    _OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX} if dist.is_available() else {}

    def __init__(self, group: dist.ProcessGroup | None = None, *, free: bool = False) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise TransportError(
                "no process group: call torch.distributed.init_process_group(...) first, "
                "or run over simulated ranks with commhooks.simulate"
            )
        self.group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self.free = free and _by_gloo(self.group)

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work:
        return self._start("all-reduce", dist.all_reduce, tensor, op=self._OPS[op])

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        return self._start("all-gather", _ALL_GATHER, output, input)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        return self._start("all-to-all", dist.all_to_all_single, output, input)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str) -> Work:
        return self._start("reduce-scatter", _REDUCE_SCATTER, output, input, op=self._OPS[op])

    def abort(self) -> None:
        """The group belongs to the caller, who destroys it; until then nothing is started over it any more."""
        give_up(self.group)

    def _start(self, what: str, collective: Callable[..., dist.Work], *tensors: torch.Tensor, **kwargs: object) -> Work:
        refuse_lost(self.group)
        if (
            self.group is not None and self.group.size() != self.world_size
        ):  # or means are taken over those who were here
            raise TransportError(
                f"the process group had {self.world_size} ranks when the hook was attached and has {self.group.size()} now. "
                "Where members come and go, give torchft's Manager to ch_ft.DistributedDataParallel, and no group of it"
            )
        try:
            work = collective(*tensors, group=self.group, async_op=True, **kwargs)
        except RuntimeError as error:
            raise TransportError(f"{what} could not be started: {error}") from error
        return ProcessGroupWork(work, what, *tensors)


def _by_gloo(group: dist.ProcessGroup | None) -> bool:
    try:
        return "cpu:gloo" in dist.get_backend_config(group)
    except (KeyError, TypeError, ValueError):  # a group that was not made by torch.distributed
        return False


def uses_group(transport: Transport, group: object) -> bool:
    """Whether a transport goes over this process group; ``None`` is the default group of the moment."""
    wanted = group if group is not None else dist.group.WORLD
    return isinstance(transport, ProcessGroupTransport) and transport.group is wanted
