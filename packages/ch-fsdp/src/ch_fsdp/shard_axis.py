"""FSDP2's shard axis: our reduce-scatter in torch's slot, one object per parameter group.

torch passes the ``op`` that its factors come down to: ``AVG``, ``SUM`` (it scales by itself before and after) or
``PREMUL_SUM(1 / factor)``, which gloo refuses and we carry out. Everything else is :class:`ch_fsdp.flat_reduction.FlatSum`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ch_fsdp.flat_reduction import fits_flat, flat_bucket, flat_version, is_cast
from ch_fsdp.step_boundary import Steps
from ch_fsdp.torch_internals import ParamGroup, premultiplier
from commhooks import (
    AttachError,
    Bucket,
    HookNotSupportedError,
    HookResultError,
    HookState,
    Reduction,
    SlotTakenError,
)
from commhooks.adapters import Engine, ProcessGroupTransport, Scattered

Op = dist.ReduceOp


class ShardAxis:
    """What all reduce-scatters of one model share.

    Args:
        reduction: plain averaging, a cast of it, or one that ``scatters``.
        group: the ranks over which the model is sharded.
        timeout: seconds that one collective may take.
        state: of a reduction that keeps something.
    """

    def __init__(
        self, reduction: Reduction, group: dist.ProcessGroup, timeout: float, state: HookState | None = None
    ) -> None:
        self.group = group
        self.form: _Flat | _Named = _Flat(reduction) if fits_flat(reduction) else _Named(reduction)
        self.engine = Engine(self.form.reduction, ProcessGroupTransport(group), state, timeout=timeout)
        self.called: set[str] = set()

    def follow(self, group: dist.ProcessGroup, name: str, holder: str) -> AttachError | None:
        """Go on over another process group of the same ranks (``set_separate_reduce_scatter_group``)."""
        if dist.get_process_group_ranks(group) != dist.get_process_group_ranks(self.group):
            return AttachError(
                f"{name}: the ranks that it is sharded over have changed since {holder} was attached; detach the "
                "handle and attach again"
            )
        self.group = group
        self.engine.move(ProcessGroupTransport(group))
        return None


class _Flat:
    """Plain averaging and its casts, on the flat gradient.

    ``AVG`` on a 16-bit wire divides before the cast, so that no sum overflows; without a cast it divides the sum, which
    is to the bit what gloo does.
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
        return flat_bucket(group.name, parts)

    def release(self) -> None:
        self.flat.output = None


class _Named:
    """A reduction that leaves each rank a part of the average, on named chunks of parameters; a sum is W averages."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = Scattered(reduction)

    def bucket(self, group: ParamGroup, parts: torch.Tensor, output: torch.Tensor, op: Any) -> Bucket:
        layout = group.parts(parts.dtype)
        if layout.part.numel != output.numel():
            raise HookResultError(
                f"{group.name}: FSDP2 gave {output.numel()} elements for each rank, its trainable parameters have "
                f"{layout.part.numel}: some had no gradient. Call set_reduce_scatter_unused_params(True), or upgrade torch"
            )
        self.reduction.factor = 1.0 if op == Op.AVG else _factor(op) * (parts.numel() // output.numel())
        return self.reduction.bucket(layout, parts, output)

    def release(self) -> None:
        self.reduction.release()


def _factor(op: Any) -> float:
    """What a sum is multiplied by."""
    if op == Op.PREMUL_SUM:
        return premultiplier(op)
    if op == Op.SUM:
        return 1.0
    raise HookNotSupportedError(f"FSDP2 asked for {op}; the hooks here know AVG, SUM and PREMUL_SUM")


class ShardScatter:
    """The object given to ``set_custom_reduce_scatter``: allocation as torch's own, communication ours."""

    def __init__(self, group: ParamGroup, axis: ShardAxis, steps: Steps, holder: str) -> None:
        self.group, self.axis, self.steps, self.holder = group, axis, steps, holder
        self.replaced = group.comm
        group.comm = self

    @property
    def in_place(self) -> bool:
        return self.group.comm is self

    def remove(self) -> None:
        """Give torch its own object back."""
        if self.in_place:
            self.group.comm = self.replaced

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
        """Reduce ``input_tensor`` (``W * n``) and leave this rank's part in ``output_tensor`` (``n``).

        Runs on the stream that FSDP has made current. Returns when the work is done (CPU) or in the stream (CUDA).
        """
        if group.group_name != self.axis.group.group_name:
            refusal = self.axis.follow(group, self.group.name, self.holder)
            if refusal is not None:  # raised from here it would leave the gradients unsharded
                self.steps.keep(refusal)
                self.replaced(output_tensor, input_tensor, group, op, async_op=False)
                return
        self.axis.called.add(self.group.name)
        form = self.axis.form
        try:
            bucket = form.bucket(self.group, input_tensor, output_tensor, op)
        except HookResultError as error:  # as above
            self.steps.keep(error)
            self.replaced(output_tensor, input_tensor, group, op, async_op=False)
            return
        try:
            self.steps.run("shard", bucket)
        finally:
            form.release()


def check_free(group: ParamGroup) -> None:
    """Raise :class:`~commhooks.SlotTakenError` unless torch's own reduce-scatter is in the slot."""
    comm = group.comm
    if isinstance(comm, ShardScatter):
        raise SlotTakenError(f"{group.name} has {comm.holder} attached on its shard axis: detach() that handle first")
    kind = type(comm).__name__
    if kind != "DefaultReduceScatter":
        raise SlotTakenError(
            f"{group.name} has a reduce-scatter of its own ({kind}; torch's setters act on one module only, not on "
            "those below it). Hooks exclude set_custom_reduce_scatter, set_symm_mem_for_comm and "
            "set_allocate_memory_from_process_group_for_comm: leave those out and attach to the whole model"
        )
