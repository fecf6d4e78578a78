"""FSDP2's gather axis: coded weights in torch's all-gathers, one object for each parameter group.

A step of ``fully_shard`` gathers weights in forward and, if it has freed them, again in backward. With a handle on this axis,
each rank codes its shard and decodes the shards of all ranks, its own included. So all ranks compute with the same weights.
The sharded parameters stay exact. Optimizer, clipping and state dicts see nothing else.

With ``reshard_after_forward=N`` the backward gathers decoded weights in a smaller group. They travel there exactly, so forward
and backward use the same weights. With N ranks per node this is ZeRO++'s hpZ: no backward gather leaves the node.
``two_level`` codes the forward gather between the nodes alone. :meth:`.GatherEngine.complete` starts its second request.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ch_core import BucketRun, Gathered, GatherEngine, transport_over
from ch_fsdp.axes import agree_on_axes, check_materialised, check_tensor_parallel
from ch_fsdp.axis import Axis, SlotObject
from ch_fsdp.layouts import all_shapes, whole_layout
from ch_fsdp.steps import Steps
from ch_fsdp.torch_internals.backward_end import BackwardEnd
from ch_fsdp.torch_internals.param_groups import ParamGroup
from commhooks import (
    AttachError,
    AttachOptions,
    BucketLayout,
    CommHook,
    CommHooksError,
    HookConfigError,
    HookNotSupportedError,
    HookResultError,
    HookState,
    Plain,
    Reduction,
    ShardLayout,
)


class GatherAxis(Axis):
    """The weight gathers of every parameter group, one engine for each process group. The first one's state counts steps."""

    of_gradients, lost_from, setters = False, "the weight gathers of ", "set_custom_all_gather or another setter"

    def __init__(self, groups: list[ParamGroup], handle: CommHook, options: AttachOptions) -> None:
        super().__init__(groups, handle, options)
        over = {str(g.gather_group.group_name): g.gather_group for g in groups if g.gather_group is not None}
        self.relay = groups[0].native_replicas if groups else None
        refusal: CommHooksError | None = None
        try:
            check(groups, self.reduction, options)
        except CommHooksError as error:
            refusal = error
        along = [*over.values(), *([self.relay] if self.relay is not None and over else [])]
        agree_on_axes(handle, options, all_shapes(groups), ["gather"], [(group, {}) for group in along], refusal)
        self.group, *self.other_groups = over.values()
        self.treatment = Gathered(self.reduction, exact_by_default(groups, self.reduction))
        self._exact = Gathered(Plain())
        self._by_group: dict[str, GatherEngine] = {}
        self.engines = {}
        for number, (name, one) in enumerate(over.items()):
            state = handle.state if number == 0 and isinstance(handle.state, HookState) else None
            transport = transport_over(one, options.link, timeout=self._timeout)
            engine = GatherEngine(self.treatment, transport, state, timeout=self._timeout)
            self.engines["gather" if number == 0 else f"gather_{number + 1}"] = self._by_group[name] = engine
        self.engine = self.engines["gather"]

    def place(self, steps: Steps, end: BackwardEnd, expr: str) -> None:
        self.steps = steps
        self.slots = [WeightGather(group, self, expr) for group in self.groups]

    def remove(self) -> bool:
        super().remove()
        for group in self.groups:
            group.reshard()  # the next forward gathers exact weights
        return True

    def layout(self, kept: Collection[str]) -> BucketLayout:
        dtype = next(iter(self.groups[0].gather_dtypes().values()))
        return whole_layout(self.groups, all_shapes(self.groups), dtype)

    def engine_for(self, group: ParamGroup, over: dist.ProcessGroup) -> GatherEngine | None:
        """Return the engine that gathers this parameter group over a process group; ``None`` for an unknown one."""
        found = self._by_group.get(over.group_name)
        if found is None and over is group.regather_group:
            # Every rank makes this call at the same place, so all engines end their steps in one order.
            transport = transport_over(over, self.engine.transport.link, timeout=self._timeout)
            found = GatherEngine(self._exact, transport, timeout=self._timeout)
            self._by_group[over.group_name] = found
            known = self.steps.group.engines
            known["regather" if "regather" not in known else f"regather_{len(known)}"] = found
        return found


class WeightGather(SlotObject):
    """The object in FSDP2's all-gather slot (``set_custom_all_gather``). It allocates as torch's own does."""

    attribute, axis, default = "gather_comm", "gather", "DefaultAllGather"
    taken = (
        "its own all-gather ({kind}). Hooks on weights exclude set_custom_all_gather, set_symm_mem_for_comm and "
        "set_allocate_memory_from_process_group_for_comm: leave those out"
    )

    def __init__(self, group: ParamGroup, axis: GatherAxis, expr: str) -> None:
        super().__init__(group, expr)
        self._axis, self.called = axis, True  # a gather that torch leaves out changes no gradient

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.inference_mode(False):  # decoding writes to it outside of inference mode
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor``, ``(n,)``, this rank's part of ``output_tensor``, ``(W * n,)``.

        On a CPU the returned work decodes when torch waits for it, so the messages of a prefetched gather travel meanwhile. On
        a GPU everything is queued on the stream that FSDP made current. Only ``async_op=True`` defers the decoding, to the
        stream that waits.
        """
        steps, found = self._axis.steps, self._engine_and_layout(group, output_tensor.dtype, input_tensor.numel())
        if isinstance(found, CommHooksError):  # raised here, FSDP2 could not end the backward
            steps.fail(found)
            work: dist.Work | None = self.replaced(output_tensor, input_tensor, group, async_op=async_op)
            return work
        engine, layout = found
        steps.calls += 1
        pending = GatherWork(engine, _launch(engine, layout, output_tensor, input_tensor))
        if output_tensor.is_cpu or async_op:
            return pending
        pending.wait()
        return None

    def _engine_and_layout(
        self, over: dist.ProcessGroup, dtype: torch.dtype, elements: int
    ) -> tuple[GatherEngine, ShardLayout] | CommHooksError:
        """Return the engine of a gather and the layout of its output, or the error of this rank.

        Args:
            over: the ranks that gather.
            dtype: dtype of the gathered weights.
            elements: number of elements that torch gathers from each rank.
        """
        engine = self._axis.engine_for(self.group, over)
        if engine is None:
            return AttachError(f"{self.group.name}: its mesh has changed since {self.expr} was attached; attach again")
        again = engine.reduction is not self._axis.treatment
        layout = self.group.regather_layout(dtype, over.size()) if again else self.group.gather_layout(dtype)
        if layout.part.numel != elements:
            return HookResultError(
                f"{self.group.name}: FSDP2 gathers {elements} elements of {dtype} for each rank, its parameters have "
                f"{layout.part.numel}. Detach the hook before parameters or their dtypes change"
            )
        return engine, layout


def _launch(
    engine: GatherEngine, layout: ShardLayout, output_tensor: torch.Tensor, input_tensor: torch.Tensor
) -> BucketRun:
    """Start the messages of a gather."""
    # In inference mode the engine would make tensors that later steps may not write to.
    with torch.inference_mode(False), torch.no_grad():
        own = output_tensor.narrow(0, engine.transport.rank * layout.part.numel, layout.part.numel)
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        reduction = engine.reduction
        assert isinstance(reduction, Gathered)  # noqa: S101 - this module makes the engines
        return engine.launch(reduction.gather_bucket(layout, output_tensor))


class GatherWork(dist.Work):
    """A gather in flight, for torch to wait for."""

    def __init__(self, engine: GatherEngine, run: BucketRun) -> None:
        super().__init__()
        self._engine, self._run = engine, run

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the messages and decode them."""
        with torch.inference_mode(False), torch.no_grad():
            self._engine.complete(self._run)
        return True

    def is_completed(self) -> bool:
        return self._run.done


def exact_by_default(groups: list[ParamGroup], reduction: Reduction) -> dict[str, str]:
    """Return the parameters that a lossy hook gathers exactly, with the reason. A policy decides for itself."""
    if not reduction.lossy or _has_rules(reduction.node()):
        return {}
    exact = {name: "embedding" for group in groups for name in group.embeddings()}
    for group in groups:
        exact |= {name: f"{len(shape)}-D" for name, shape in group.all_shapes().items() if len(shape) < 2}
    return exact


def _has_rules(node: object) -> bool:
    """Return True if an expression contains a policy."""
    if isinstance(node, dict):
        return "rules" in node or any(map(_has_rules, node.values()))
    return isinstance(node, list | tuple) and any(map(_has_rules, node))


def check(groups: list[ParamGroup], reduction: Reduction, options: AttachOptions) -> None:
    """Check that a reduction can gather the weights of these groups.

    Raises:
        AttachError: no FSDP2 parameters, parameters on the meta device, or a slot is taken.
        HookConfigError: an argument of ``attach`` has no meaning for weights.
        HookNotSupportedError: the reduction cannot gather, or a group's gather cannot be coded.
    """
    for name in ("manager", "optimizer", "scaler", "process_group"):
        if getattr(options, name) is not None:
            raise HookConfigError(
                f"axis='gather' takes no {name}=: the weights follow the sharded parameters over the shard mesh. Leave it "
                "out; give it to the handle of the gradients"
            )
    Gathered.refuse(reduction)
    if not groups:
        raise AttachError("this FSDP2 model has no parameters")
    for group in groups:
        check_materialised(group)
        if group.gather_group is None:
            raise HookNotSupportedError(
                f"axis='gather': {group.name} is replicated, not sharded (torch's replicate), so it gathers nothing"
            )
        WeightGather.check_free(group)
        check_tensor_parallel(group, reduction)
        own = group.gathered_by_tensor()
        if own:
            raise HookNotSupportedError(
                f"{group.name}: {', '.join(own)} have a tensor class that codes its own gather (fsdp_pre_all_gather, such as "
                "torchao's fp8). Use that or axis='gather', not both"
            )
        dtypes = group.gather_dtypes()
        if len(set(dtypes.values())) > 1 or not next(iter(dtypes.values())).is_floating_point:
            raise HookNotSupportedError(
                f"{group.name} gathers {', '.join(sorted(map(str, set(dtypes.values()))))}, and axis='gather' needs one "
                "floating dtype for each group. Give fully_shard(mp_policy=MixedPrecisionPolicy(param_dtype=...)), or "
                "fully_shard the parameters of another dtype apart"
            )
