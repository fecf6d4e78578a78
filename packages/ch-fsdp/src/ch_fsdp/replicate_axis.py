"""FSDP2's replicate axis: any reduction, on the shards, between ranks that hold the same shard.

torch calls ``hook(shard)`` after its reduce-scatter, and what the hook leaves there becomes the gradient. The hook sees
a flat tensor; its parameters' names and shapes come from ``torch_internals``. A shard is called by its parameter's name and its
coordinate, ``"blocks.0.up.weight[0/2]"``, and so is its state.
"""

import torch
import torch.distributed as dist

from ch_fsdp.private_ends import BackwardEnds
from ch_fsdp.step_boundary import Steps
from ch_fsdp.torch_internals import ParamGroup
from commhooks import AttachError, HookNotSupportedError, HookResultError, SlotTakenError


class ReplicateHook:
    """The function given to ``set_all_reduce_hook``; stays when the handle is detached, and then averages plainly.

    Args:
        group: whose slot it is put into.
        index: of the group among those of the handle, over which steps end together.
    """

    def __init__(self, group: ParamGroup, index: int, steps: Steps, ends: BackwardEnds, holder: str) -> None:
        self.group, self.index = group, index
        self.point(steps, ends, holder)
        self._before: object = group.hook  # None, or the plain averaging of an earlier handle, over groups of its own
        if isinstance(self._before, ReplicateHook):
            self._before.steps.part_with(self._before.index)
        group.hook = self

    @property
    def in_place(self) -> bool:
        return self.group.hook is self

    def point(self, steps: Steps, ends: BackwardEnds, holder: str | None) -> None:
        """Run another reduction from now on, whose steps end as ``ends`` says."""
        self.steps, self.ends, self.holder, self.called = steps, ends, holder, False

    def stay(self) -> None:
        """The ranks have agreed: what was in the slot before is never put back."""
        before, self._before = self._before, None
        if isinstance(before, ReplicateHook) and before.steps.deserted:
            before.ends.close()  # only now: other groups share it

    def put_back(self) -> None:
        """Leave the slot as it was."""
        if isinstance(self._before, ReplicateHook):
            self._before.steps.part_with(self._before.index, back=True)
        if self.in_place:
            self.group.hook = self._before

    def __call__(self, shard: torch.Tensor) -> None:
        """Reduce ``shard`` (flat, padded shards of the group's trainable parameters) in place."""
        self.called = True
        refusal = self._refusal(shard)
        if refusal is not None:
            self.steps.keep(refusal)
            return
        if shard.is_cuda:  # nothing else holds it across layers on the stream it is reduced in
            shard.record_stream(torch.cuda.current_stream(shard.device))
        self.steps.take(self.index, shard, at_end=self.ends.by_hand or self.ends.shared)

    def _refusal(self, shard: torch.Tensor) -> Exception | None:
        if not self.group.all_reduces and self.steps.group.engines["replicate"].transport.elastic:
            return HookNotSupportedError(  # what is kept back would outlive an attempt that is voted down
                f"{self.group.name}: set_requires_all_reduce(False) cannot be had with manager=, where a step may be dropped; "
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
    """Raise :class:`~commhooks.SlotTakenError` if a handle is attached to the group, or a foreign hook is in its slot."""
    hook = group.hook
    if isinstance(hook, ReplicateHook):
        if hook.holder is not None:
            raise SlotTakenError(f"{group.name} has {hook.holder} attached on its replicate axis: detach() it first")
        if hook.steps.keeps_back:
            raise kept_back(group.name, "attaching")
    elif hook is not None:
        raise SlotTakenError(
            f"{group.name} has an all-reduce hook of its own ({getattr(hook, '__qualname__', hook)}; "
            "set_all_reduce_hook acts on one module only, not on those below it). Leave it out and attach to the "
            "whole model"
        )


def kept_back(who: str, before: str) -> AttachError:
    """The error of gradients that nobody would ever reduce between the replicas."""
    return AttachError(
        f"{who} holds gradients that set_requires_all_reduce(False) has kept back: run a backward with "
        f"set_requires_all_reduce(True) before {before}"
    )


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
