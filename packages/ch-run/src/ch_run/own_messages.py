"""Refuses optimizers that send messages themselves in `commhooks run --outer`: they would cross the slow link in every step.

Public Muon and distributed Shampoo let each rank step some of the parameters, and gather all of them. Under an outer optimizer
each rank has gradients of its own, so these parameters would move by the gradients of one rank.
"""

from typing import Any

import torch
import torch.distributed as dist

from commhooks import HookNotSupportedError


class OwnMessages:
    """Counts the messages of an optimizer's first step with gradients, and raises after it if there are any.

    A step with a closure proves nothing, because the closure may send messages.

    Args:
        optim: the optimizer.
        name: its model, for people.
        group: the ranks that exchange. Messages among the ranks of one replica are legal.
    """

    def __init__(self, optim: torch.optim.Optimizer, name: str, group: dist.ProcessGroup) -> None:
        self._name, self._ranks = name, set(dist.get_process_group_ranks(group))
        self._before: list[int] = []  # messages before each step that runs; step() may call that of its base class
        self._watches = True  # the hooks stay, because torch is in their list when they run
        optim.register_step_pre_hook(torch.compiler.disable(self._begins))
        optim.register_step_post_hook(torch.compiler.disable(self._ended))

    def _begins(self, optim: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self._watches:
            self._before.append(self._sent())

    def _ended(self, optim: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        before = self._before.pop() if self._before else None
        if before is None or self._before or len(args) > 1 or kwargs.get("closure"):
            return
        if self._sent() != before:
            raise own_messages(self._name, type(optim).__name__)
        self._watches = all(p.grad is None for group in optim.param_groups for p in group["params"])

    def _sent(self) -> int:
        """Return the number of messages so far among ranks that exchange."""
        groups = dist.distributed_c10d._world.pg_group_ranks  # torch has no public list of all groups
        crossing: list[Any] = [group for group, ranks in groups.items() if len(self._ranks & ranks.keys()) > 1]
        return sum(group._get_sequence_number_for_group() for group in crossing)


def own_messages(name: str, kind: str) -> HookNotSupportedError:
    """Return the error for an optimizer whose step sends messages."""
    return HookNotSupportedError(
        f"--outer cannot train {name} with {kind}, whose step sends its own messages. Use an optimizer that steps all parameters "
        "on each rank"
    )
