"""FSDP2's replicate axis: any reduction, on the shards, between ranks that hold the same shard.

torch calls ``hook(shard)`` after its reduce-scatter, and what the hook leaves there becomes the gradient. The hook sees
a flat tensor; its parameters' names and shapes come from ``private``. A shard is called by its parameter's name and its
coordinate, ``"blocks.0.up.weight[0/2]"``, and so is its state.
"""

import torch
import torch.distributed as dist

from ch_fsdp.private import ParamGroup
from ch_fsdp.steps import Steps
from commhooks.bucket import Bucket
from commhooks.errors import AttachError, HookNotSupportedError, HookResultError


class ReplicateHook:
    """The function given to ``set_all_reduce_hook``; stays when the handle is detached, and then averages plainly."""

    def __init__(self, group: ParamGroup, index: int) -> None:
        self.group, self.index = group, index
        self.steps: Steps | None = None
        self.holder: str | None = None
        self.called = False
        group.hook = self

    @property
    def in_place(self) -> bool:
        return self.group.hook is self

    def point(self, steps: Steps, holder: str | None) -> None:
        """Run another reduction from now on."""
        self.steps, self.holder, self.called = steps, holder, False

    def remove(self) -> None:
        """Leave the slot empty."""
        if self.in_place:
            self.group.hook = None

    def __call__(self, shard: torch.Tensor) -> None:
        """Reduce ``shard`` (flat, padded shards of the group's trainable parameters) in place."""
        assert self.steps is not None  # noqa: S101 - pointed when made
        self.called = True
        refusal = self._refusal(shard)
        if refusal is not None:
            self.steps.keep(refusal)
            return
        if shard.is_cuda:  # nothing else holds it across layers on the stream it is reduced in
            shard.record_stream(torch.cuda.current_stream(shard.device))
        self.steps.run("replicate", Bucket(self.group.shards(shard.dtype), shard, self.index))

    def _refusal(self, shard: torch.Tensor) -> Exception | None:
        if not self.group.all_reduces:
            return HookNotSupportedError(
                f"{self.group.name}: set_requires_all_reduce(False) leaves partial sums that no hook sees again; "
                "accumulate with set_requires_gradient_sync(False) instead"
            )
        expected = self.group.shards(shard.dtype).numel
        if expected != shard.numel():
            return HookResultError(
                f"{self.group.name}: FSDP2 gave {shard.numel()} elements, its trainable parameters have {expected} on "
                "this rank: some had no gradient. Call set_reduce_scatter_unused_params(True), or upgrade torch"
            )
        return None


def check_free(group: ParamGroup) -> None:
    """Raise :class:`AttachError` if a handle is attached to the group, or a foreign hook is in its slot."""
    hook = group.hook
    if isinstance(hook, ReplicateHook):
        if hook.holder is not None:
            raise AttachError(f"{group.name} has {hook.holder} attached on its replicate axis: detach() it first")
    elif hook is not None:
        raise AttachError(
            f"{group.name} has an all-reduce hook of its own ({getattr(hook, '__qualname__', hook)}; "
            "set_all_reduce_hook acts on one module only, not on those below it). Leave it out and attach to the "
            "whole model"
        )


def hooks_of(groups: list[ParamGroup]) -> list[ReplicateHook]:
    """Every group's hook, put in place where there is none."""
    return [
        group.hook if isinstance(group.hook, ReplicateHook) else ReplicateHook(group, index)
        for index, group in enumerate(groups)
    ]


@torch.no_grad()
def broadcast(model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Give every replica the parameters and buffers of the group's first rank, as DDP does when it wraps a model."""
    on_card = dist.get_backend(group) == "nccl"
    for tensor in (*model.parameters(), *model.buffers()):
        local = getattr(tensor, "_local_tensor", tensor).detach()
        if local.numel() == 0:
            continue
        sent = local.contiguous() if not on_card or local.is_cuda else local.cuda()
        dist.broadcast(sent, group=group, group_src=0)
        if sent is not local:
            local.copy_(sent)
