"""Error feedback around any reduction that can tell what it sent.

Rank i sends C(p_i) of ``p_i = g_i + e_i`` and keeps ``e_i' = p_i - C(p_i)``: nothing is lost, only late (Seide et
al. 2014; Karimireddy et al. 2019, arXiv:1901.09847). The residual is this rank's own, in fp32 whatever travels, and
exists only for parameters that are not averaged exactly.
"""

from types import MappingProxyType
from typing import Any

import torch

from commhooks.bucket import Bucket, ParamLayout
from commhooks.compositions.base import Composite, composed
from commhooks.errors import HookConfigError
from commhooks.reduction import Reduction, Stages, StepContext

FIELD = "residual"


class ErrorFeedback(Composite):
    """``inner`` on the gradient plus what could not be sent before.

    State: ``residual``, local, fp32, one per compressed parameter.

    Raises:
        HookConfigError: ``inner`` keeps a residual of its own, does not say what it sent, or loses nothing.
    """

    name = "error_feedback"
    lossy = True
    fields = MappingProxyType({FIELD: "local"})

    def __init__(self, inner: Reduction) -> None:
        if FIELD in inner.fields:
            raise HookConfigError(
                f"{inner.name} keeps a residual of its own, fused into its algebra: use it without error_feedback"
            )
        if not inner.reports_sent and "error_feedback" in inner.config():
            raise HookConfigError(
                f"{inner.name} has error feedback of its own, which covers every rounding that it makes: write "
                f"{inner.name}(error_feedback=True) instead of error_feedback({inner.name})"
            )
        if not inner.reports_sent:
            raise HookConfigError(
                f"error_feedback cannot wrap {inner.name}: it does not say what it sent (reports_sent is False). Its "
                "author can: fill ctx.sent with this rank's contribution, and declare reports_sent = True"
            )
        if not inner.lossy:
            raise HookConfigError(f"{inner.name} loses nothing, so error_feedback would keep zeros: leave it out")
        super().__init__(inner)
        self.reports_sent = False  # the report is used up here

    def memory_order(self, param: ParamLayout, step: int) -> frozenset[str]:
        return super().memory_order(param, step) - {FIELD}  # which has the parameter's own shape

    def start(self, bucket: Bucket, ctx: StepContext) -> Stages:
        return self.run_with_plain(bucket, ctx, self.routes(bucket.layout, ctx.step))  # those keep no residual

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        storage = ctx.scratch("sent", bucket.storage.shape, bucket.dtype, bucket.device)
        sent = Bucket(bucket.layout, storage, bucket.index, bucket.is_last)
        kept = []
        for p, gradient in bucket.views():
            wanted = ctx.stage(p.name, FIELD, p.shape, device=bucket.device)
            kept.append((gradient, wanted, ctx.read(p.name, FIELD), sent.view(p)))
        # On a GPU all parameters at once, in few launches; on a CPU one after another, while it is in the cache.
        together = [kept] if bucket.device.type != "cpu" else [[one] for one in kept]
        for part in together:
            torch._foreach_copy_([wanted for _, wanted, _, _ in part], [gradient for gradient, *_ in part])  # g
            added = [(gradient, wanted, before) for gradient, wanted, before, _ in part if before is not None]
            if added:
                gradients, wanteds, befores = (list(each) for each in zip(*added, strict=True))
                torch._foreach_add_(wanteds, befores)  # p = g + e
                torch._foreach_copy_(gradients, wanteds)
        yield from self.inner.start(bucket, ctx.child("inner", sent=sent))
        for part in together:  # e' = p - C(p)
            torch._foreach_sub_([wanted for _, wanted, _, _ in part], [contribution for *_, contribution in part])


def error_feedback(hook: Any) -> Any:
    """``hook`` with local fp32 error feedback.

    Args:
        hook: a lossy reduction that reports what it sent, or a hook that carries one.

    Raises:
        HookConfigError: see :class:`ErrorFeedback`. PowerSGD, which fuses its own, is refused.

    Example:
        >>> import torch
        >>> from commhooks.bucket import Bucket
        >>> from commhooks.reduction import Plain
        >>> from commhooks.simulate import simulate
        >>> from commhooks.compositions.wire_cast import WireCast
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
