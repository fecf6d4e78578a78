"""FSDP2's replicate axis: any reduction, on the shards, between ranks with the same shard.

torch calls ``hook(shard)`` after its reduce-scatter and adds the shard to the parameters' gradients afterwards. The hook
sees a flat tensor without names. A shard's name is its parameter's name and coordinate, ``"blocks.0.up.weight[0/2]"``, and
the state uses it as key. :class:`.GroupOrder` decides when each group is reduced.
"""

from collections.abc import Collection, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ch_core import Engine, record_use, transport_over
from ch_fsdp.axis import Axis, SlotObject, state_of, weighted_sums
from ch_fsdp.group_order import GroupOrder
from ch_fsdp.layouts import shards_layout
from ch_fsdp.steps import Steps
from ch_fsdp.torch_internals.backward_end import BackwardEnd
from ch_fsdp.torch_internals.hsdp_mesh import disable_all_reduce, enable_all_reduce
from ch_fsdp.torch_internals.param_groups import ParamGroup, managed_tensors
from commhooks import (
    AttachError,
    AttachOptions,
    BucketLayout,
    CommHook,
    HookNotSupportedError,
    HookResultError,
    SlotTakenError,
    manager_adapter,
    plain_engine,
)


class ReplicateAxis(Axis):
    """The reduction of shards between replicas, or between the groups of a manager.

    Args:
        model: the model.
        groups, handle, options: see :class:`.Axis`.
        replicas: ranks with the same shard; ``None`` with a manager.
        shard_group: the ranks of the shard mesh; ``None`` for a replicated model.
    """

    order: GroupOrder

    def __init__(
        self,
        model: torch.nn.Module,
        groups: list[ParamGroup],
        handle: CommHook,
        options: AttachOptions,
        replicas: dist.ProcessGroup | None,
        shard_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(groups, handle, options)
        self._model, self.group, self.replicas = model, replicas, replicas
        if options.manager is not None:
            self.managed = manager_adapter(options.manager)(model, handle, options, self._layouts)
            self.engine = self.managed.engine
        else:
            transport = transport_over(replicas, options.link, timeout=self._timeout)
            self.engine = Engine(self.reduction, transport, state_of(handle), timeout=self._timeout)
        self.engines = {"replicate": self.engine}
        if replicas is not None and shard_group is not None:
            # The vote of a manager reaches the other ranks of the shard mesh without a relay.
            self.relay, self.other_groups = shard_group, (shard_group,)
        self._native = replicas is not None and groups[0].native_replicas is not None
        self.order = GroupOrder(groups, fixed=self.managed is not None)
        self.slots: list[ReplicateHook] = []
        self._agreed = False

    def place(self, steps: Steps, end: BackwardEnd, expr: str) -> None:
        for index, group in enumerate(self.groups):
            self.slots.append(ReplicateHook(group, index, self.order, steps, end, expr))
            disable_all_reduce(group)

    def after_agreement(self) -> None:
        """Make the replicas equal."""
        self._agreed = True
        for hook in self.slots:
            hook.keep()
        if self.replicas is not None:
            broadcast(managed_tensors(self._model, self.groups), self.replicas)

    def remove(self) -> bool:
        """Leave plain averaging between replicas, which would drift apart, unless torch averages between them itself.

        Raises:
            AttachError: torch would not average gradients that ``set_requires_all_reduce(False)`` has kept.
        """
        if self._native and self.order.keeps_gradients:
            raise gradients_kept(str(self.slots[0].expr), "detach()")
        if self._native or not self._agreed:
            if self.managed is not None:
                self.managed.close()
            return super().remove()
        plain = self.managed.plain() if self.managed is not None else plain_engine(self.replicas, self._timeout)
        steps = Steps({"replicate": plain}, order=self.order, due=partial(getattr, self.order, "due"))
        end = BackwardEnd(self._model, steps.end, steps.abandon, replicas=True)
        for hook in self.slots:
            hook.switch(steps, end)
            hook.expr = None
        return False

    def layout(self, kept: Collection[str]) -> BucketLayout:
        return shards_layout(self.groups, kept)

    def _layouts(self) -> list[BucketLayout]:
        """Return the buckets that a backward reduces between groups of a manager, in the order of :class:`.GroupOrder`."""
        due = (g for g in reversed(self.groups) if g.reduces and g.all_reduces and g.trainable)
        return [g.shards(g.reduce_dtype) for g in due]

    @property
    def sums(self) -> bool:
        return self._native and all(group.sums_replicas for group in self.groups)


class ReplicateHook(SlotObject):
    """The function in FSDP2's all-reduce slot. After ``detach()`` it stays and averages plainly.

    Args:
        group: the parameter group.
        index: position of the group in ``order``.
        order: the groups of the model.
        steps: the handle's engines.
        end: the end of a backward.
        expr: the attached hook.

    Attributes:
        replaced: ``None``, or the plain averaging of a detached handle.
    """

    attribute, axis = "hook", "replicate"

    def __init__(
        self, group: ParamGroup, index: int, order: GroupOrder, steps: Steps, end: BackwardEnd, expr: str
    ) -> None:
        self.index, self.order = index, order
        super().__init__(group, expr)
        self.switch(steps, end)
        if isinstance(self.replaced, ReplicateHook):
            self.replaced.order.released.add(self.replaced.index)

    def switch(self, steps: Steps, end: BackwardEnd) -> None:
        """Run other engines from now on."""
        self.steps, self.end, self.called = steps, end, False

    def keep(self) -> None:
        """Drop the earlier hook, because the ranks agreed on this one."""
        before, self.replaced = self.replaced, None
        if isinstance(before, ReplicateHook) and before.order.all_released:
            before.end.close()  # not earlier: the groups of the earlier handle share it

    def remove(self) -> None:
        """Put the earlier hook back into the slot, and let torch all-reduce again on a 2-D mesh."""
        if isinstance(self.replaced, ReplicateHook):
            self.replaced.order.released.discard(self.replaced.index)
        super().remove()
        enable_all_reduce(self.group)

    @classmethod
    def check_free(cls, group: ParamGroup) -> None:
        """Check the slot of a group.

        Raises:
            SlotTakenError: a handle is attached there, or the user set a hook.
            AttachError: a detached handle keeps gradients of ``set_requires_all_reduce(False)``.
        """
        hook = group.hook
        if isinstance(hook, ReplicateHook):
            if hook.expr is not None:
                raise SlotTakenError(f"{group.name} has {hook.expr} attached on its replicate axis: detach() it first")
            if hook.order.keeps_gradients:
                raise gradients_kept(group.name, "attaching")
        elif hook is not None:
            raise SlotTakenError(
                f"{group.name} has its own all-reduce hook ({getattr(hook, '__qualname__', hook)}; "
                "set_all_reduce_hook acts on one module only, not on those below it). Leave it out and attach to the "
                "whole model"
            )

    def __call__(self, shard: torch.Tensor) -> None:
        """Reduce ``shard`` in place: flat, padded shards of the group's trainable parameters."""
        self.called = True
        self.steps.before_gradient()
        engine = self.steps.group.engines["replicate"]
        refusal = self._refusal(shard, engine)
        if refusal is None:
            record_use(shard)  # torch allocated it on the stream of its reduce-scatter
            self.steps.calls += 1
            refusal = self.order.take(engine, self.index, shard, at_end=self.end.manual or self.end.shared)
        if refusal is not None:
            self.steps.fail(refusal)

    def _refusal(self, shard: torch.Tensor, engine: Engine) -> Exception | None:
        if engine.weighing is not None and (sums := weighted_sums(self.group)) is not None:
            return sums
        if not self.group.all_reduces and engine.transport.elastic:
            return HookNotSupportedError(  # the kept gradients would outlive an attempt that the manager dropped
                f"{self.group.name}: set_requires_all_reduce(False) does not work with manager=, because the manager may "
                "drop a step. Accumulate with set_requires_gradient_sync(False) instead"
            )
        expected = self.group.shards(shard.dtype).numel
        if expected != shard.numel():
            return HookResultError(
                f"{self.group.name}: FSDP2 gave {shard.numel()} elements, its trainable parameters have {expected} on "
                "this rank: some had no gradient. Call set_reduce_scatter_unused_params(True), or upgrade torch"
            )
        return None


def gradients_kept(name: str, before: str) -> AttachError:
    """Return the error for gradients that would never be reduced between the replicas."""
    return AttachError(
        f"{name} holds gradients that set_requires_all_reduce(False) has kept back: run a backward with "
        f"set_requires_all_reduce(True) before {before}"
    )


@torch.no_grad()
def broadcast(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Copy tensors of the group's first rank to all replicas, as DDP does when it wraps a model."""
    carried = {pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")}  # of "cpu:gloo,cuda:nccl"
    for tensor in tensors:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        if local.numel() == 0:
            continue
        sent = local.contiguous() if local.device.type in carried else local.to(torch.accelerator.current_accelerator())
        dist.broadcast(sent, group=group, group_src=0)
        if sent is not local:
            local.copy_(sent)
