"""A reduction from whatever a hook is registered as: a generator function, a class, or a factory."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from commhooks.bucket import Bucket
from commhooks.errors import HookConfigError
from commhooks.reduction import Reduction, Stages, StepContext


class FunctionReduction(Reduction):
    """A generator function ``f(bucket, ctx, **config)`` as a reduction."""

    lossy = True

    def __init__(self, function: Callable[..., Stages], /, **config: Any) -> None:
        self.function = function
        self.name = function.__name__
        self._config = config
        for attribute in (
            "granularity",
            "collectives",
            "castable",
            "lossy",
            "fields",
            "reports_sent",
            "trips",
            "route",
            "phase",
            "memory_order_fields",
            "scaled_fields",
            "packed_fields",
        ):
            if hasattr(function, attribute):
                setattr(self, attribute, getattr(function, attribute))

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        return self.function(bucket, ctx, **self._config)

    def config(self) -> dict[str, Any]:
        return dict(self._config)


def as_reduction(target: object, /, **config: Any) -> Reduction:
    """A :class:`Reduction` from a reduction, a class or factory of one, or a generator function.

    Raises:
        HookConfigError: ``target`` is none of these, or does not take ``config``.
    """
    if isinstance(target, Reduction):
        if config:
            raise HookConfigError(f"{target!r} is configured already; it takes no further {sorted(config)}")
        return target
    if isinstance(target, functools.partial) and not target.args:
        return as_reduction(target.func, **{**target.keywords, **config})
    if inspect.isgeneratorfunction(target):
        return FunctionReduction(target, **config)
    if inspect.isfunction(target) and [*inspect.signature(target).parameters][:2] == ["bucket", "ctx"]:
        raise HookConfigError(
            f"{target.__name__}(bucket, ctx) has no yield, and has to be a generator function: it yields its requests, such as "
            "AllReduce(bucket.buffer), and goes on when they hold the result"
        )
    made = target(**config) if callable(target) else target
    if not isinstance(made, Reduction):
        raise HookConfigError(
            f"{target!r} is not a reduction: expected a generator function (bucket, ctx), a Reduction, or something "
            f"that returns one; got {type(made).__name__}"
        )
    return made
