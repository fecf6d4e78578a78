"""The adapter for FSDP1 (``FullyShardedDataParallel``) sets one hook on every unit. The strategy decides the hook's
signature.

FSDP1 hands a hook a flat vector, so plain averaging and its 16-bit casts fit every strategy. ``register_comm_hook`` refuses
hybrid sharding. This adapter reduce-scatters inside the shard group and then all-reduces between the replicas, both with
the cast.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from ch_fsdp.flat_sum import FlatSum, fits_flat, flat_bucket, flat_layout, flat_version
from ch_fsdp.hooks import set_factors
from ch_fsdp.steps import Steps
from ch_fsdp.torch_internals.fsdp1_units import Unit, UnitBackwardEnd, is_inner, units
from commhooks import (
    AttachError,
    CommHook,
    CommHooksError,
    DefaultState,
    HookNotSupportedError,
    Plain,
    Reduction,
    SlotTakenError,
)
from commhooks.adapters import AttachOptions, Binding, Engine, Fingerprint, ProcessGroupTransport, agree_along

Call = Callable[[str, torch.Tensor, torch.Tensor | None], None]
"""Reduces the flat gradient of a named unit. The third argument is this rank's shard, or ``None`` (``NO_SHARD``)."""


class UnitHook:
    """The function that one unit's hook calls now. It stays on the unit for ever.

    Attributes:
        expr: the attached hook, ``None`` after ``detach()``.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.expr: str | None = None
        self.call: Call | None = None
        unit.register(self, call_unit_hook)


def call_unit_hook(state: UnitHook, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """The only hook function that this adapter registers with FSDP1."""
    assert state.call is not None  # noqa: S101 - FSDP1Binding sets it right after it makes the state
    state.call(state.unit.name, grad, output)


class FlatDriver:
    """Reduces the flat gradients of all units.

    Args:
        reduction: plain averaging or a cast of it.
        model: the outermost unit.
        unit: any unit. All units have the same groups and strategy.
        timeout: seconds that one collective may take.
        sends_status: False for exactly the messages of FSDP without a hook.
    """

    def __init__(
        self,
        reduction: Reduction,
        model: FullyShardedDataParallel,
        unit: Unit,
        timeout: float,
        *,
        sends_status: bool = True,
    ) -> None:
        engines: dict[str, Engine] = {}
        self._sums: dict[str, FlatSum] = {}
        axes = {"shard" if unit.sharded else "replicate": unit.group}
        if unit.replicas is not None:
            axes["replicate"] = unit.replicas
        for axis, group in axes.items():
            flat, whole = flat_version(reduction, scatter=axis == "shard")
            set_factors(flat, DefaultState(group))
            self._sums[axis] = flat
            engines[axis] = Engine(whole, ProcessGroupTransport(group), timeout=timeout, sends_status=sends_status)
        self.steps = Steps(engines)
        self.end = UnitBackwardEnd(model, self.steps.end, self.steps.abandon)

    def __call__(self, name: str, grad: torch.Tensor, output: torch.Tensor | None) -> None:
        if output is None:
            self.steps.run("replicate", flat_bucket(name, grad))
            return
        self._sums["shard"].output = output
        self.steps.run("shard", flat_bucket(name, grad))
        self._sums["shard"].output = None
        if "replicate" in self._sums:
            self.steps.run("replicate", flat_bucket(name, output))


class FSDP1Binding(Binding):
    """A handle in place on an FSDP1 model."""

    def __init__(self, model: FullyShardedDataParallel, handle: CommHook, options: AttachOptions) -> None:
        refuse_inner(model)
        self.units = list(units(model))
        self.params = [p for p in model.parameters() if p.requires_grad]
        self._agree(handle, options)
        self._model, self._timeout = model, options.timeout
        self.engine: Engine | None = None
        self._foreign = 0
        self.driver: FlatDriver | None = None
        reduction = reduction_of(handle)
        if reduction is not None:
            self.driver = FlatDriver(reduction, model, self.units[0], options.timeout)
            engines = self.driver.steps.group.engines
            self.engine = engines.get("shard") or engines["replicate"]
        call: Call = self.driver if self.driver is not None else self._foreign_call(handle)
        numels = {u.name: u.numel() for u in self.units}
        self.layout = flat_layout(numels, self.units[0].dtype(), next(model.parameters()).device)
        # Last, because an error after it would leave hooks in a model without a handle.
        self._hooks = [u.hook_state if isinstance(u.hook_state, UnitHook) else UnitHook(u) for u in self.units]
        for hook in self._hooks:
            hook.call, hook.expr = call, handle.expr

    @property
    def engines(self) -> Mapping[str, Engine]:
        return {} if self.driver is None else self.driver.steps.group.engines

    @property
    def calls(self) -> int:
        return self.driver.steps.calls if self.driver is not None else self._foreign

    def stats(self) -> dict[str, float]:
        return self.driver.steps.group.stats() if self.driver is not None else {"calls": float(self._foreign)}

    def check(self) -> None:
        if self.driver is not None:
            self.driver.steps.group.check()

    def detach(self) -> None:
        if self.driver is not None:
            self.driver.end.close()
        plain = FlatDriver(Plain(), self._model, self.units[0], self._timeout, sends_status=False)
        for hook in self._hooks:
            hook.call, hook.expr = plain, None

    def _agree(self, handle: CommHook, options: AttachOptions) -> None:
        """Refuse a hook that does not fit, on every rank of the group if one rank refuses it."""
        first = self.units[0]
        refusal: CommHooksError | None = None
        try:
            check_fits(self.units, handle, options)
        except CommHooksError as error:
            refusal = error
        if options.verify_ranks:
            groups: list[tuple[dist.ProcessGroup, Fingerprint]] = [(first.group, {})]
            if first.replicas is not None:
                groups.append((first.replicas, {}))
            fields = {
                "hook": handle.identity,
                "units": [f"{u.name}: {u.numel()}{' sharded' if u.sharded else ''}" for u in self.units],
                "does not fit": [str(refusal)] if refusal is not None else [],
            }
            agree_along(handle.expr, fields, groups, options.timeout)
        if refusal is not None:
            raise refusal

    def _foreign_call(self, handle: CommHook) -> Call:
        def call(name: str, grad: torch.Tensor, output: torch.Tensor | None) -> None:
            self._foreign += 1
            handle.built(handle.state, *((grad,) if output is None else (grad, output)))  # type: ignore[operator]

        return call


def adapter(model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> FSDP1Binding:
    """The ``commhooks_adapter`` of FSDP1."""
    assert isinstance(model, FullyShardedDataParallel)  # noqa: S101 - the registry matched the class
    return FSDP1Binding(model, handle, options)


def refuse_inner(model: FullyShardedDataParallel) -> None:
    """Raise :class:`AttachError` if ``model`` is an inner unit or has no parameters to reduce."""
    if is_inner(model):
        raise AttachError("this is an inner FSDP unit: FSDP1's hooks are set for the whole model; attach to the root")
    if not any(True for _ in units(model)):
        raise AttachError("this FSDP model has no parameters to reduce: attach to a model that has")


def reduction_of(handle: CommHook) -> Reduction | None:
    """Return the reduction of a handle, or ``None`` for a foreign FSDP1 function."""
    reduction = handle.reduction or getattr(handle.built, "reduction", None)
    return reduction if isinstance(reduction, Reduction) else None


def check_fits(all_units: list[Unit], handle: CommHook, options: AttachOptions) -> None:
    """Check that the handle can run on these units.

    Raises:
        HookNotSupportedError: the reduction needs named gradients, the function has another signature, or the units do
            not share their groups.
        SlotTakenError: a unit has a hook.
    """
    first = all_units[0]
    if options.axis is not None:
        raise HookNotSupportedError(
            f"axis={options.axis!r}: FSDP1's strategy decides the axis; leave axis out, or use FSDP2"
        )
    for unit in all_units:
        if (unit.group, unit.replicas, unit.sharded) != (first.group, first.replicas, first.sharded):
            raise HookNotSupportedError(
                f"units {first.name} and {unit.name} have different groups or strategies: one handle serves one. "
                "Wrap all with the same process_group and sharding_strategy, or use FSDP2"
            )
        ours = unit.hook_state
        if isinstance(ours, UnitHook) and ours.expr is not None:
            raise SlotTakenError(f"this model has {ours.expr} attached already: handle.detach() first")
        if unit.hook is not None and not isinstance(ours, UnitHook):
            named = getattr(unit.hook, "__qualname__", repr(unit.hook))
            raise SlotTakenError(f"this model's hook slot is taken by {named}: attach instead of register_comm_hook")
    reduction = reduction_of(handle)
    if reduction is None:
        hook: Callable[..., Any] = handle.built  # type: ignore[assignment]
        _check_function(hook, handle.expr, first)
    elif not fits_flat(reduction):
        raise HookNotSupportedError(
            f"{reduction!r} needs each parameter's own shape, and FSDP1 gives a hook one flat vector. Use FSDP2 with a "
            "replicate axis, or DistributedDataParallel (the same as NO_SHARD). FSDP1 supports 'allreduce', "
            "'reduce_scatter', 'fp16_compress' and 'bf16_compress'"
        )


def _check_function(hook: Callable[..., Any], expr: str, unit: Unit) -> None:
    parameters = list(inspect.signature(hook).parameters.values())
    names = [p.name for p in parameters]
    arguments = (None, None, None) if unit.sharded else (None, None)
    wanted = "(state, grad, output)" if unit.sharded else "(state, grad)"
    try:
        inspect.signature(hook).bind(*arguments)
    except TypeError:
        names.append("bucket")
    if "bucket" in names:
        raise HookNotSupportedError(
            f"{expr} is not a hook for this FSDP1 strategy: it must be callable as {wanted} -> None, and no DDP hook "
            "(state, bucket) -> Future"
        )
    if unit.replicas is not None:
        raise HookNotSupportedError(
            f"{expr} is a function of one group, and hybrid sharding has two: give a name such as 'bf16_compress', "
            "which runs on both"
        )
