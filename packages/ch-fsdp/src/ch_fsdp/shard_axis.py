"""FSDP2's shard axis: a reduce-scatter of this package in torch's slot, one object per parameter group.

torch chooses the ``op`` by its factors: ``AVG``, ``SUM`` (with scaling by torch before and after it) or
``PREMUL_SUM(1 / factor)``. gloo does not support ``PREMUL_SUM``, so this module computes it.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ch_core import Engine, Scattered, transport_over
from ch_fsdp.axis import Axis, SlotObject, state_of, weighted_sums
from ch_fsdp.flat_sum import fits_flat, flat_bucket, flat_version, is_cast
from ch_fsdp.layouts import trainable_shapes, unsharded_layout, whole_layout
from ch_fsdp.steps import Steps
from ch_fsdp.torch_internals.backward_end import BackwardEnd
from ch_fsdp.torch_internals.param_groups import ParamGroup, premultiplier
from commhooks import (
    AttachError,
    AttachOptions,
    Bucket,
    BucketLayout,
    CommHook,
    HookNotSupportedError,
    HookResultError,
    Reduction,
)

Op = dist.ReduceOp


class ShardAxis(Axis):
    """The reduce-scatters inside the shard mesh. All of them share one engine."""

    group: dist.ProcessGroup

    def __init__(
        self, groups: list[ParamGroup], handle: CommHook, options: AttachOptions, group: dist.ProcessGroup
    ) -> None:
        super().__init__(groups, handle, options)
        self.group = group
        flat = fits_flat(self.reduction)
        self.form: _Flat | _Named = _Flat(self.reduction) if flat else _Named(self.reduction)
        state = None if flat else state_of(handle)
        transport = transport_over(group, options.link, timeout=self._timeout)
        self.engine = Engine(self.form.reduction, transport, state, timeout=self._timeout)
        self.engines = {"shard": self.engine}

    def place(self, steps: Steps, end: BackwardEnd, expr: str) -> None:
        self.slots = [ShardScatter(group, self, steps, expr) for group in self.groups]
        for slot in self.slots:
            slot.called = self.group.size() == 1  # then torch reduce-scatters nothing

    def layout(self, kept: Collection[str]) -> BucketLayout:
        if isinstance(self.form, _Flat):
            return unsharded_layout(self.groups)
        return whole_layout(self.groups, trainable_shapes(self.groups, kept), self.groups[0].reduce_dtype)

    def move(self, group: dist.ProcessGroup, slot: SlotObject) -> AttachError | None:
        """Use another process group of the same ranks (``set_separate_reduce_scatter_group``).

        Returns:
            The error if the ranks differ.
        """
        if dist.get_process_group_ranks(group) != dist.get_process_group_ranks(self.group):
            return AttachError(
                f"{slot.group.name}: the ranks of its shard mesh have changed since {slot.expr} was attached; detach the "
                "handle and attach again"
            )
        self.group = group
        self.engine.move(transport_over(group, self.engine.transport.link, timeout=self._timeout))
        return None


class _Flat:
    """Plain averaging and its casts, on the flat gradient.

    On a 16-bit wire ``AVG`` divides before the cast, so that no sum overflows. Without a cast it divides the sum, as gloo
    does, with the same bits.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.cast = is_cast(reduction)
        self.flat, self.reduction = flat_version(reduction, scatter=True)

    def bucket(self, group: ParamGroup, parts: torch.Tensor, output: torch.Tensor, op: Any) -> Bucket:
        flat = self.flat
        flat.op, flat.premultiply, flat.divide = "sum", 1.0, 1.0
        if op == Op.AVG:
            if self.cast:
                flat.op = "mean"
            else:
                flat.divide = float(parts.numel() // output.numel())
        else:
            flat.premultiply = _factor(op)
        flat.output = output
        return flat_bucket(group.name, parts, output)

    def release(self) -> None:
        self.flat.output = None


class _Named:
    """A reduction with ``run_scatter``, on named chunks of parameters. A sum is W averages."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = Scattered(reduction)

    def bucket(self, group: ParamGroup, parts: torch.Tensor, output: torch.Tensor, op: Any) -> Bucket:
        layout = group.scatter_layout(parts.dtype)
        self.reduction.factor = 1.0 if op == Op.AVG else _factor(op) * (parts.numel() // output.numel())
        return self.reduction.bucket(layout, parts, output)

    def release(self) -> None:
        self.reduction.release()


def _factor(op: Any) -> float:
    """Return the factor of a sum."""
    if op == Op.PREMUL_SUM:
        return premultiplier(op)
    if op == Op.SUM:
        return 1.0
    raise HookNotSupportedError(
        f"FSDP2 asked for the reduction {op}; the hooks support AVG, SUM and PREMUL_SUM. Detach the hook"
    )


class ShardScatter(SlotObject):
    """The object in FSDP2's reduce-scatter slot (``set_custom_reduce_scatter``). It allocates as torch's own does."""

    attribute, axis, default = "comm", "shard", "DefaultReduceScatter"
    taken = (
        "its own reduce-scatter ({kind}; torch's setters act on one module only, not on those below it). Hooks exclude "
        "set_custom_reduce_scatter, set_symm_mem_for_comm and set_allocate_memory_from_process_group_for_comm: leave those out "
        "and attach to the whole model"
    )

    def __init__(self, group: ParamGroup, axis: ShardAxis, steps: Steps, expr: str) -> None:
        super().__init__(group, expr)
        self._axis, self.steps = axis, steps

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor``, ``(W * n,)``, into this rank's ``output_tensor``, ``(n,)``.

        Runs on the stream that FSDP made current. Returns when the result is there (CPU) or queued (CUDA).
        """
        self.steps.before_gradient()
        try:
            if group.group_name != self._axis.group.group_name:
                refusal = self._axis.move(group, self)
                if refusal is not None:
                    raise refusal
            self.called = True
            if self._axis.engine.weighing is not None and (sums := weighted_sums(self.group)) is not None:
                self.steps.fail(sums)
            expected = self.group.shards(output_tensor.dtype).numel
            if output_tensor.numel() != expected:
                input_tensor, output_tensor = self._fail_short(input_tensor, output_tensor, expected)
            bucket = self._axis.form.bucket(self.group, input_tensor, output_tensor, op)
        except (AttachError, HookNotSupportedError) as error:  # raised from here it would leave the gradients unsharded
            self.steps.fail(error)
            self.replaced(output_tensor, input_tensor, group, op, async_op=False)
            return
        try:
            self.steps.run("shard", bucket)
        finally:
            self._axis.form.release()

    def _fail_short(
        self, parts: torch.Tensor, output: torch.Tensor, expected: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fail the step if some parameters had no gradient and torch (2.10) left them out.

        Peers may be in a reduce-scatter of all parameters, so this rank joins it with zeros.

        Returns:
            Input and output of all parameters, ``(W * expected,)`` and ``(expected,)``.
        """
        self.steps.fail(
            HookResultError(
                f"{self.group.name}: FSDP2 gave {output.numel()} elements for each rank, its trainable parameters have "
                f"{expected}: some had no gradient. Call set_reduce_scatter_unused_params(True), or upgrade torch"
            )
        )
        output.fill_(float("nan"))
        world = parts.numel() // output.numel()
        return parts.new_zeros(world * expected), output.new_zeros(expected)
