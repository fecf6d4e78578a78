"""A reduction that is asked what it sent, as ``error_feedback`` asks it: what the contract proves a report with."""

import torch

from commhooks.bucket import Bucket, BucketLayout
from commhooks.compositions.base import Composite
from commhooks.reduction import Reduction, Stages, StepContext
from commhooks.requests import StagePlan


class Reporting(Composite):
    """``inner``, and in :attr:`sent` what it reported in the last step.

    Args:
        inner: a reduction that declares ``reports_sent``.

    Attributes:
        sent: parameter name -> this rank's contribution. What was not reported is NaN.
    """

    name = "reporting"

    def __init__(self, inner: Reduction) -> None:
        super().__init__(inner)
        self.sent: dict[str, torch.Tensor] = {}

    def plan(self, layout: BucketLayout, ctx: StepContext) -> tuple[StagePlan, ...]:
        return self.inner.plan(layout, ctx)

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        storage = torch.full_like(bucket.storage, float("nan"))
        report = Bucket(bucket.layout, storage, bucket.index, bucket.is_last)
        yield from self.inner.start(bucket, ctx.child("inner", sent=report))
        self.sent.update({p.name: view for p, view in report.views()})
