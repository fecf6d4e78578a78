"""Reductions made of generators: plain averaging, and several generators advanced together."""

from collections.abc import Generator
from typing import TYPE_CHECKING

from commhooks.requests import AllReduce, Request, Requests, as_tuple

if TYPE_CHECKING:
    from commhooks.bucket import Bucket


def plain(bucket: "Bucket", sent: "Bucket | None" = None) -> Generator[Requests, None, None]:
    """Average the bucket as it is: one in-place all-reduce per contiguous piece, which the engine merges.

    ``sent``, a bucket of the same layout, is filled with what this rank contributed.
    """
    runs = bucket.segments()
    reports = sent.segments() if sent is not None else [None] * len(runs)
    if runs:
        yield tuple(AllReduce(run, sent=report) for run, report in zip(runs, reports, strict=True))


def parallel(*generators: Generator[Requests, None, None]) -> Generator[Requests, None, None]:
    """Advance several generators together: their requests of one stage travel as one tuple.

    Putting plain averaging beside a two-stage method therefore adds no round.
    """
    live = list(generators)
    try:
        while live:
            stage: list[Request] = []
            for generator in tuple(live):
                try:
                    stage.extend(as_tuple(next(generator)))
                except StopIteration:
                    live.remove(generator)
            if stage:
                yield tuple(stage)
    finally:
        for generator in live:
            generator.close()
