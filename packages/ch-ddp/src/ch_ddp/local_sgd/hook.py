"""Post-local SGD (Lin et al. 2020, arXiv:1808.07217): average gradients first, parameters later.

For ``start_localSGD_iter`` steps ranks average gradients over all ranks. After that they average within a subgroup (fast
links) or not at all, and a model averager averages the parameters every few steps.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState as PyTorchs

from ch_ddp.adapter.futures import future_for
from ch_ddp.hook_function import as_hook
from ch_ddp.local_sgd.subgroups import has_default_group, part_of, ranks_per_machine
from commhooks import GradBucket, HookConfigError, Plain, StateError


class PostLocalSGDState(PyTorchs):
    """State of :func:`post_localSGD_hook`. It can be created before or after the process group.

    It is also an instance of PyTorch's class, because Lightning's ``DDPStrategy`` averages the model only then.

    Args:
        process_group: ranks that average gradients at first; ``None`` is the model's group if ``commhooks.attach`` attaches
            the hook, and the default group otherwise.
        subgroup: ranks that average them later; ``None`` makes groups of ``subgroup_size`` consecutive ranks.
        start_localSGD_iter: synchronised backward passes before the switch.
        post_local_gradient_allreduce: ``False`` leaves each rank its own gradient after the switch, without a
            subgroup.
        subgroup_size: ranks per subgroup. Default: the ranks of one machine, from torchrun's ``LOCAL_WORLD_SIZE`` or by
            host name.

    Attributes:
        iter: synchronised backward passes so far.

    Raises:
        HookConfigError: ``start_localSGD_iter`` is negative, or the subgroup's size does not divide the group. It raises
            the latter as soon as a process group exists.

    The constructor, ``attach`` or the first backward creates the subgroup, never the switch.
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
        if has_default_group() and process_group is not None:
            self.use_group(process_group)

    def use_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Use ``group`` as the process group if there is none yet, and create the subgroup if needed."""
        if self.process_group is None:
            self.process_group = group if group is not None else dist.group.WORLD
        if self.subgroup is None and self.post_local_gradient_allreduce:
            self.subgroup = part_of(self.process_group, self._size(), "PostLocalSGDState(subgroup_size=...)")

    @property
    def local(self) -> bool:
        """True after the switch."""
        return bool(self.iter >= self.start_localSGD_iter)

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Reduce a bucket by the rule of this step."""
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
        """Return the configuration and the step count as plain values."""
        names = ("iter", "start_localSGD_iter", "post_local_gradient_allreduce")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`.

        Raises:
            StateError: a value is missing, or the configuration differs.
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
        for name, value in values.items():  # PyTorch's class has slots
            setattr(self, name, value)
        self._hooks()

    def _hooks(self) -> None:
        self._global = as_hook(Plain(), "post_local_sgd, all ranks")
        self._local = as_hook(Plain(), "post_local_sgd, subgroup")

    def _size(self) -> int:
        return self.subgroup_size or int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or ranks_per_machine(self.process_group)


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average over all ranks until ``state.start_localSGD_iter``, then over the subgroup, or not at all.

    Use it with :class:`~ch_ddp.PostLocalSGDOptimizer`, or average the parameters yourself, because the ranks' models drift
    apart after the switch. Do not use a ``GradScaler``. Gradients differ between ranks, so it could skip a step on one rank
    only, and the averagers' counts would differ. bf16 needs no scaler.
    """
    return state.reduce(bucket)


def make_state(
    process_group: dist.ProcessGroup | None,
    *,
    start_iter: int = 1000,
    gradient_allreduce: bool = True,
    subgroup_size: int = 0,
) -> PostLocalSGDState:
    """Return the state of ``post_local_sgd(...)`` for the option names of expressions. Size 0 is the default size."""
    return PostLocalSGDState(process_group, None, start_iter, gradient_allreduce, subgroup_size=subgroup_size or None)
