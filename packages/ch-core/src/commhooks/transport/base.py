"""What the engine asks of a transport: raw collectives on flat tensors, and nothing else."""

from typing import Protocol

import torch


class Work(Protocol):
    """A collective under way. One that has ``is_completed()`` too is asked for a short time before it is waited for."""

    def wait(self, timeout: float | None) -> None:
        """Return when it is done.

        Raises:
            HookTimeoutError: not done after ``timeout`` seconds.
            TransportError: it failed (a peer was lost, sizes did not match).
        """


class Transport(Protocol):
    """Raw collectives of one group of ranks, on contiguous tensors, all asynchronous. ``op`` is ``"sum"`` or ``"max"``: a
    mean is made by the engine, which divides before any cast.

    Attributes:
        rank: this rank in the group.
        world_size: ranks in the group.
        free: whether the ranks are free to carry out an all-reduce on a CPU as is best, because all of them run this
            engine. Not where a peer without a hook has to match the messages.
        elastic: whether rank and world size change from step to step (a manager's members come and go).
    """

    rank: int
    world_size: int
    free: bool
    elastic: bool

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Work: ...

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work: ...

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Work: ...

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str) -> Work: ...

    def abort(self) -> None:
        """Give up: nothing more will be started, pending work may never end."""
