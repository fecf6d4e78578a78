"""Error feedback around any reduction that reports its sent part.

Rank i sends C(p_i) of ``p_i = g_i + e_i`` and keeps ``e_i' = p_i - C(p_i)``. Every part of a gradient is applied, only later
(Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847). The residual belongs to this rank, in fp32 for any dtype on the
wire. Parameters that are averaged exactly have none.

Memory per fp32 parameter: the residual twice, because a step may be rolled back, and a copy of the sent numbers unless the
inner reduction ``delivers``.
"""

from collections.abc import Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ch_core import RESIDUAL, as_tuple
from commhooks import (
    AllReduce,
    Bucket,
    Composite,
    HookConfigError,
    ParamLayout,
    Reduction,
    Stages,
    StepContext,
    composed,
)


class ErrorFeedback(Composite):
    """Runs ``inner`` on the gradient plus the residual of earlier steps.

    State: ``residual``, local, fp32, one per compressed parameter.

    Raises:
        HookConfigError: ``inner`` keeps a residual itself, does not report what it sent, or is exact.
    """

    name = "error_feedback"
    lossy = True
    fields = MappingProxyType({RESIDUAL: "local"})

    def __init__(self, inner: Reduction) -> None:
        if RESIDUAL in inner.fields:
            raise HookConfigError(
                f"{inner.name} already keeps a residual, as a part of its algorithm: use it without error_feedback"
            )
        if not inner.reports_sent and "error_feedback" in inner.config():
            raise HookConfigError(
                f"{inner.name} has its own option for error feedback, which covers all of its roundings: write "
                f"{inner.name}(error_feedback=True) instead of error_feedback({inner.name})"
            )
        if not inner.reports_sent:
            raise HookConfigError(
                f"error_feedback cannot wrap {inner.name}: it does not report its contribution (reports_sent is False). Its "
                "author can fill ctx.sent with this rank's contribution, and declare reports_sent = True"
            )
        if not inner.lossy:
            raise HookConfigError(f"{inner.name} loses nothing, so error_feedback would keep zeros: leave it out")
        super().__init__(inner)
        self.reports_sent = False  # this class consumes the report

    def start(self, bucket: Bucket, ctx: StepContext) -> Stages:
        return self.run_with_plain(bucket, ctx, self.routes(bucket.layout, ctx.step))  # exact ones keep no residual

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        kept = []
        for p, gradient in bucket.views():
            before = ctx.read(p.name, RESIDUAL)
            kept.append(_Kept(p, gradient, before, ctx.write(p.name, RESIDUAL, p.shape, device=bucket.device)))
        for part in self._parts(kept):
            _add(part)  # p = g + e
        if self.inner.delivers:  # the bucket itself holds the sent numbers until the average arrives
            yield from self._subtracting(bucket, self.inner.start(bucket, ctx.child("inner")), kept)
            return
        storage = ctx.scratch("sent", bucket.storage.shape, bucket.dtype, bucket.device)
        sent = Bucket(bucket.layout, storage, bucket.index, bucket.is_last)
        yield from self.inner.start(bucket, ctx.child("inner", sent=sent))
        for part in self._parts(kept):
            _subtract(part, [sent.view(one.param) for one in part])  # e' = p - C(p)

    def _subtracting(self, bucket: Bucket, inner: Stages, kept: Sequence["_Kept"]) -> Stages:
        """Yield the requests of in-place all-reduces. Compute ``e' = p - C(p)`` when C(p) is known, without a copy of C(p)."""
        start = bucket.storage.storage_offset()
        for requests in inner:
            asked = as_tuple(requests)
            for request in asked:
                if isinstance(request, AllReduce):
                    begin = request.tensor.storage_offset() - start
                    inside = [k for k in kept if begin <= k.param.offset < begin + request.tensor.numel()]
                    request.sent, request.on_sent = request.tensor, partial(self._subtract_all, inside)
            yield asked

    def _subtract_all(self, kept: Sequence["_Kept"]) -> None:
        for part in self._parts(kept):
            _subtract(part, [one.gradient for one in part])

    @staticmethod
    def _parts(kept: Sequence["_Kept"]) -> Sequence[Sequence["_Kept"]]:
        """Group parameters: all at once on a GPU, for few launches; one by one on a CPU, for its cache."""
        together = bool(kept) and kept[0].gradient.device.type != "cpu"
        return [kept] if together else [[one] for one in kept]


class _Kept(NamedTuple):
    """A parameter's gradient, its old residual, and the place for the new one."""

    param: ParamLayout
    gradient: torch.Tensor
    before: torch.Tensor | None
    wanted: torch.Tensor


def _add(part: Sequence[_Kept]) -> None:
    """Write gradient plus residual to the new residuals, and to the gradients."""
    torch._foreach_copy_([one.wanted for one in part], [one.gradient for one in part])
    kept = [one for one in part if one.before is not None]
    if kept:
        wanted = [one.wanted for one in kept]
        torch._foreach_add_(wanted, [one.before for one in kept if one.before is not None])
        torch._foreach_copy_([one.gradient for one in kept], wanted)


def _subtract(part: Sequence[_Kept], sent: Sequence[torch.Tensor]) -> None:
    torch._foreach_sub_([one.wanted for one in part], list(sent))


def error_feedback(hook: Any) -> Any:
    """Add local fp32 error feedback to ``hook``.

    Args:
        hook: a lossy reduction that reports what it sent, or a hook that carries one.

    Raises:
        HookConfigError: see :class:`ErrorFeedback`. PowerSGD has its own error feedback, and is refused.

    Example:
        >>> import torch
        >>> from commhooks import Bucket, Plain
        >>> from ch_core import simulate
        >>> from ch_wrappers import WireCast
        >>> def two_steps(rank):
        ...     engine = rank.engine(error_feedback(WireCast(Plain(), "bf16")))
        ...     total = 0.0
        ...     for _ in range(2):
        ...         bucket = Bucket.from_tensors({"w": torch.tensor([1.001])})
        ...         engine.submit(bucket)
        ...         engine.finish()
        ...         total += bucket.buffer.item()
        ...     engine.resolve_step()
        ...     return total + engine.state.read("w", "residual").item()
        >>> [round(x, 5) for x in simulate(2, two_steps)]  # applied + residual = the sum of the gradients
        [2.002, 2.002]
    """
    return composed("error_feedback", [hook], lambda parts: ErrorFeedback(parts[0]))
