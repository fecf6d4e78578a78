"""Post-local SGD (Lin et al. 2020, arXiv:1808.07217): average gradients first, parameters later.

For ``start_localSGD_iter`` steps gradients are averaged over all ranks. After that they are averaged within a
subgroup (fast links) or not at all, and a model averager brings the parameters together every so many steps.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState as PyTorchs

from ch_ddp.adapter.futures import future_for
from ch_ddp.hook_function import as_hook
from ch_ddp.local_sgd.subgroups import part_of, ranks_per_machine, ready
from commhooks import GradBucket, HookConfigError, Plain, StateError


class PostLocalSGDState(PyTorchs):
    """What :func:`post_localSGD_hook` needs to know; made before or after the process group.

    One of PyTorch's of this name too: Lightning's ``DDPStrategy`` averages the model only if its state is one.

    Args:
        process_group: ranks that average gradients at first; ``None`` is the model's group where the hook is attached
            by ``commhooks.attach``, the default group otherwise.
        subgroup: ranks that average them later; ``None`` makes groups of ``subgroup_size`` consecutive ranks.
        start_localSGD_iter: synchronised backward passes before the switch.
        post_local_gradient_allreduce: ``False`` leaves each rank its own gradient after the switch; no subgroup is
            made then.
        subgroup_size: by default the ranks of one machine: ``LOCAL_WORLD_SIZE``, as torchrun sets it, or those with one
            host name.

    Attributes:
        iter: synchronised backward passes so far.

    Raises:
        HookConfigError: ``start_localSGD_iter`` is negative, or the subgroup's size does not divide the group; the
            latter as soon as there is a process group.

    The subgroup is made here, or where the hook is attached, or else at the first backward pass: never at the switch.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
        *,
        subgroup_size: int | None = None,
    ) -> None:
        if isinstance(start_localSGD_iter, bool) or not isinstance(start_localSGD_iter, int) or start_localSGD_iter < 0:
            raise HookConfigError(f"start_localSGD_iter={start_localSGD_iter!r}: expected a whole number, 0 or more")
        super().__init__(  # type: ignore[no-untyped-call]
            process_group, subgroup, start_localSGD_iter, post_local_gradient_allreduce
        )
        self.subgroup_size = subgroup_size
        self._hooks()
        if ready() and process_group is not None:
            self.use_group(process_group)

    def use_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Take ``group`` as the process group if none was given, and make the subgroup if there is to be one."""
        if self.process_group is None:
            self.process_group = group if group is not None else dist.group.WORLD
        if self.subgroup is None and self.post_local_gradient_allreduce:
            self.subgroup = part_of(self.process_group, self._size(), "PostLocalSGDState(subgroup_size=...)")

    @property
    def local(self) -> bool:
        """Whether the switch has been made."""
        return bool(self.iter >= self.start_localSGD_iter)

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What this step does with a bucket."""
        if self.process_group is None or (self.subgroup is None and self.post_local_gradient_allreduce):
            self.use_group()
        result: torch.futures.Future[torch.Tensor]
        if not self.local:
            result = self._global(self.process_group, bucket)
        elif self.post_local_gradient_allreduce:
            result = self._local(self.subgroup, bucket)
        else:
            result = future_for(bucket.buffer())
            result.set_result(bucket.buffer())
        if bucket.is_last():
            self.iter += 1
        return result

    def state_dict(self) -> dict[str, Any]:
        """Plain values: what was configured, and how far it is."""
        names = ("iter", "start_localSGD_iter", "post_local_gradient_allreduce")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`.

        Raises:
            StateError: it lacks a value, or was made with another configuration.
        """
        mine = self.state_dict()
        wrong = [name for name in mine if name not in state or (name != "iter" and state[name] != mine[name])]
        if wrong:
            given = {name: state.get(name) for name in wrong}
            raise StateError(f"this is not the state of an equal PostLocalSGDState: {given} where this one has {mine}")
        self.iter = int(state["iter"])

    def __getstate__(self) -> dict[str, Any]:
        kept = self.state_dict() | {"subgroup_size": self.subgroup_size}
        return kept | {"process_group": None, "subgroup": None}

    def __setstate__(self, values: dict[str, Any]) -> None:
        for name, value in values.items():  # PyTorch's are slots
            setattr(self, name, value)
        self._hooks()

    def _hooks(self) -> None:
        self._global = as_hook(Plain(), "post_local_sgd, all ranks")
        self._local = as_hook(Plain(), "post_local_sgd, subgroup")

    def _size(self) -> int:
        return self.subgroup_size or int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or ranks_per_machine(self.process_group)


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average over all ranks until ``state.start_localSGD_iter``, then over the subgroup, or not at all.

    Use it with :class:`~ch_ddp.PostLocalSGDOptimizer`, or average the parameters yourself: after the switch the ranks'
    models drift apart. Gradients are then this rank's own, so a ``GradScaler`` may skip a step on one rank only, and
    the averagers' counts would differ: use bf16, which needs no scaler.
    """
    return state.reduce(bucket)


def make_state(
    process_group: dist.ProcessGroup | None,
    *,
    start_iter: int = 1000,
    gradient_allreduce: bool = True,
    subgroup_size: int = 0,
) -> PostLocalSGDState:
    """The state of ``post_local_sgd(...)``, by the short names of expressions; size 0 is the default size."""
    return PostLocalSGDState(process_group, None, start_iter, gradient_allreduce, subgroup_size=subgroup_size or None)
