"""The process group of a simulated manager, as far as :class:`ch_ft.protocols.MemberGroup` goes."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

Post = tuple[Any, ...]
"""What a member brings to a collective."""


class Member(Protocol):
    """Whose group it is."""

    def members(self) -> int: ...

    def bring(self, key: tuple[object, ...], post: Post, hold: Callable[[list[Post]], None], /) -> Any:
        """With the others' posts of the same key, in the order of the members, ``hold`` carries it out."""


class SimulatedMembers:
    """All-gather and all-to-all of one quorum's members.

    Args:
        member: takes part in a collective, and returns its work.
    """

    def __init__(self, member: Member) -> None:
        self._member = member

    def size(self) -> int:
        return self._member.members()

    def allgather(
        self, output_tensors: list[list[torch.Tensor]], input_tensors: list[torch.Tensor], opts: Any, /
    ) -> Any:
        (outputs,), (mine,) = output_tensors, input_tensors
        return self._member.bring(("all_gather", mine.numel(), str(mine.dtype)), (outputs, mine), _gather)

    def alltoall_base(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any, /
    ) -> Any:
        received = output.split(output_sizes or output.numel() // self.size())
        sent = input.split(input_sizes or input.numel() // self.size())
        return self._member.bring(("all_to_all", str(input.dtype)), (received, sent), _exchange)


def _gather(posts: list[Post]) -> None:
    for outputs, _ in posts:
        for output, (_, mine) in zip(outputs, posts, strict=True):
            output.copy_(mine.view(output.shape))


def _exchange(posts: list[Post]) -> None:
    for member, (received, _) in enumerate(posts):
        for part, (_, sent) in zip(received, posts, strict=True):
            if part.numel() != sent[member].numel():
                raise RuntimeError(f"{sent[member].numel()} elements sent, {part.numel()} expected: gloo would abort")
            part.copy_(sent[member])
