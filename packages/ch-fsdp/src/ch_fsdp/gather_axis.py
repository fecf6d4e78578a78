"""FSDP2's gather axis: coded weights in torch's all-gathers, one object for each parameter group.

A step of ``fully_shard`` gathers weights in forward and, if it has freed them, again in backward. With a handle on this axis,
each rank codes its shard and decodes the shards of all ranks, its own included. So all ranks compute with the same weights.
The sharded parameters stay exact. Optimizer, clipping and state dicts see nothing else.

With ``reshard_after_forward=N`` the backward gathers decoded weights in a smaller group. They travel there exactly, so forward
and backward use the same weights. With N ranks per node this is ZeRO++'s hpZ: no backward gather leaves the node.
``two_level`` codes the forward gather between the nodes alone. :meth:`.GatherEngine.complete` starts its second request.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ch_core import BucketRun, Engine, Fingerprint, Gathered, GatherEngine, ProcessGroupTransport, agree_along
from ch_fsdp.axes import check_tensor_parallel, reduction_of
from ch_fsdp.slot import SlotObject
from ch_fsdp.steps import Steps
from ch_fsdp.torch_internals.backward_end import BackwardEnd
from ch_fsdp.torch_internals.param_groups import ParamGroup, all_params, ignored_params, param_groups
from commhooks import (
    AttachError,
    AttachOptions,
    Binding,
    BucketLayout,
    CommHook,
    CommHooksError,
    HookConfigError,
    HookNotSupportedError,
    HookResultError,
    HookState,
    Plain,
    Reduction,
)


class GatherBinding(Binding):
    """A handle on the weight gathers of every parameter group below a model.

    Attributes:
        groups: the parameter groups.
        steps: the engines, one for each process group that gathers.
    """

    def __init__(self, model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> None:
        self.groups = param_groups(model)
        for group in self.groups:
            group.reshard()
        self.ignored = ignored_params(model, self.groups)
        self._expr, self._timeout = handle.expr, options.timeout
        reduction = reduction_of(handle)
        over = {g.gather_group.group_name: g.gather_group for g in self.groups if g.gather_group is not None}
        replicas = self.groups[0].native_replicas if self.groups else None
        self._agree(handle.identity, options, reduction, list(over.values()), replicas)
        self.treatment = Gathered(reduction, exact_by_default(self.groups, reduction))
        self._exact = Gathered(Plain())
        self._by_group: dict[str, GatherEngine] = {}
        engines: dict[str, Any] = {}
        relay = ProcessGroupTransport(replicas) if replicas is not None and replicas.size() > 1 else None
        for number, one in enumerate(over.values()):
            state = handle.state if number == 0 and isinstance(handle.state, HookState) else None  # it counts steps
            engine = GatherEngine(self.treatment, ProcessGroupTransport(one), state, timeout=self._timeout)
            engines["gather" if number == 0 else f"gather_{number + 1}"] = self._by_group[one.group_name] = engine
        self.engine: GatherEngine = engines["gather"]
        self.group, *others = over.values()
        self.other_axes = tuple(others)
        self.steps = Steps(engines, self._inspect, relay, due=lambda: bool(self._lost()))
        self._end = BackwardEnd(model, self.steps.end, self.steps.abandon)
        self._comms = [WeightGather(group, self, handle.expr) for group in self.groups]

    @property
    def layout(self) -> BucketLayout:  # type: ignore[override]
        """The whole parameters, frozen ones too, as one virtual bucket in model order."""
        shapes = {name: shape for group in self.groups for name, shape in group.all_shapes().items()}
        order = {name: at for group in self.groups for name, at in group.positions().items()}
        dtype = next(iter(self.groups[0].gather_dtypes().values()))
        ordered = {name: shapes[name] for name in sorted(shapes, key=order.__getitem__)}
        return BucketLayout.of_shapes(ordered, dtype, self.groups[0].device)

    @property
    def params(self) -> list[torch.Tensor]:  # type: ignore[override]
        """The parameters of :attr:`layout`."""
        every = all_params(self.groups)
        return [every[p.name] for p in self.layout.params]

    @property
    def engines(self) -> Mapping[str, Engine]:
        return self.steps.group.engines

    @property
    def calls(self) -> int:
        return self.steps.calls

    def stats(self) -> dict[str, float]:
        return self.steps.group.stats()

    def check(self) -> None:
        self.steps.group.check()

    def detach(self) -> None:
        """Give torch its own all-gather back."""
        for comm in self._comms:
            comm.remove()
        for group in self.groups:
            group.reshard()  # the next forward gathers exact weights
        self._end.close()

    def engine_for(self, group: ParamGroup, over: dist.ProcessGroup) -> GatherEngine | None:
        """Return the engine that gathers this parameter group over a process group; ``None`` for an unknown one."""
        found = self._by_group.get(over.group_name)
        if found is None and over is group.regather_group:
            # Every rank makes this call at the same place, so all engines end their steps in one order.
            found = GatherEngine(self._exact, ProcessGroupTransport(over), timeout=self._timeout)
            self._by_group[over.group_name] = found
            known = self.steps.group.engines
            known["regather" if "regather" not in known else f"regather_{len(known)}"] = found
        return found

    def _agree(
        self,
        hook: list[str],
        options: AttachOptions,
        reduction: Reduction,
        over: list[dist.ProcessGroup],
        replicas: dist.ProcessGroup | None,
    ) -> None:
        """Compare the ranks. If one rank refuses the hook, all ranks of the mesh raise."""
        refusal: CommHooksError | None = None
        try:
            check(self.groups, reduction, options)
        except CommHooksError as error:
            refusal = error
        if options.verify_ranks and over:
            shapes = {name: shape for group in self.groups for name, shape in group.all_shapes().items()}
            fields: Fingerprint = {
                "hook": hook,
                "parameters": [f"{name}: {shape}" for name, shape in shapes.items()],
                "axes": ["gather"],
                "does not fit": [str(refusal)] if refusal is not None else [],
            }
            groups = [*over, replicas] if replicas is not None else over
            agree_along(self._expr, fields, [(group, {}) for group in groups], self._timeout)
        if refusal is not None:
            raise refusal

    def _lost(self) -> list[str]:
        """Return the groups whose slot someone else has filled."""
        return [comm.group.name for comm in self._comms if not comm.in_place]

    def _inspect(self) -> CommHooksError | None:
        lost = self._lost()
        if not lost:
            return None
        return AttachError(
            f"{self._expr} is no longer in place on the weight gathers of {', '.join(lost)}: set_custom_all_gather or another "
            "setter was called after attach. Those setters act on one module only; attach again instead of calling them"
        )


class WeightGather(SlotObject):
    """The object in FSDP2's all-gather slot (``set_custom_all_gather``). It allocates as torch's own does."""

    attribute, axis, default = "gather_comm", "gather", "DefaultAllGather"
    taken = (
        "its own all-gather ({kind}). Hooks on weights exclude set_custom_all_gather, set_symm_mem_for_comm and "
        "set_allocate_memory_from_process_group_for_comm: leave those out"
    )

    def __init__(self, group: ParamGroup, binding: GatherBinding, expr: str) -> None:
        super().__init__(group, expr)
        self.binding = binding

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
        binding = self.binding
        engine = binding.engine_for(self.group, group)
        refusal: CommHooksError | None = None
        if engine is None:
            refusal = AttachError(
                f"{self.group.name}: its mesh has changed since {self.expr} was attached; attach again"
            )
        else:
            again = engine.reduction is not binding.treatment
            dtype = output_tensor.dtype
            layout = self.group.regather_layout(dtype, group.size()) if again else self.group.gather_layout(dtype)
            if layout.part.numel != input_tensor.numel():
                refusal = HookResultError(
                    f"{self.group.name}: FSDP2 gathers {input_tensor.numel()} elements of {dtype} for each rank, its "
                    f"parameters have {layout.part.numel}. Detach the hook before parameters or their dtypes change"
                )
        if refusal is not None or engine is None:
            assert refusal is not None  # noqa: S101 - set with engine None
            binding.steps.fail(refusal)
            work: dist.Work | None = self.replaced(output_tensor, input_tensor, group, async_op=async_op)
            return work
        binding.steps.calls += 1
        with torch.inference_mode(False), torch.no_grad():
            own = output_tensor.narrow(0, engine.transport.rank * layout.part.numel, layout.part.numel)
            if own.data_ptr() != input_tensor.data_ptr():
                own.copy_(input_tensor)
            reduction = engine.reduction
            assert isinstance(reduction, Gathered)  # noqa: S101 - this module makes the engines
            run = engine.launch(reduction.gather_bucket(layout, output_tensor))
        pending = GatherWork(engine, run)
        if output_tensor.is_cpu or async_op:
            return pending
        pending.wait()
        return None


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
        if any(p.is_meta for p in group.params):
            raise AttachError(f"{group.name} is on the meta device: materialise its parameters before attaching")
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
