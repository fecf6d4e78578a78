"""The buckets of one step: those under way, and what is kept of those that have ended."""

from commhooks.bucket import Bucket, BucketLayout
from commhooks.engine.bucket_run import BucketRun
from commhooks.engine.outcome import StepOutcome


class StepBuckets:
    """The buckets of the running step, or of the last one, in the order in which they came.

    Attributes:
        layouts: of all.
        under_way: those that have not ended.
        count: the number that the next one gets; buckets that are under way together have different ones.
        keep: whether the buckets stay readable after the step.
        kept: those that hold their average, if they are kept.
        submitted: those whose averages are used when the step ends, where a failure is told later than that.
    """

    __slots__ = ("count", "keep", "kept", "layouts", "submitted", "under_way")

    def __init__(self) -> None:
        self.layouts: list[BucketLayout] = []
        self.under_way: list[BucketRun] = []
        self.count = 0
        self.keep = False
        self.kept: list[Bucket] = []
        self.submitted: list[Bucket] = []

    def begin(self) -> None:
        """The first bucket of another step has come."""
        self.layouts.clear()
        self.kept.clear()

    def add(self, bucket: Bucket, outcome: StepOutcome) -> BucketRun:
        """The next bucket of the step that this outcome is on."""
        live = BucketRun(self.count, bucket, outcome)
        self.count += 1
        self.layouts.append(bucket.layout)
        self.under_way.append(live)
        return live

    def ended(self) -> None:
        """Some of those under way may have ended."""
        if self.keep:
            self.kept += [live.bucket for live in self.under_way if live.done]
        self.under_way = [live for live in self.under_way if not live.done]

    def drained(self) -> None:
        """Nothing is under way: the next bucket may use the same scratch."""
        self.submitted.clear()  # their memory is not the engine's
        self.count = 0

    def abandon(self) -> None:
        """None of those under way will end."""
        for live in self.under_way:
            live.close()
        self.under_way = []
        self.submitted.clear()
        self.count = 0
