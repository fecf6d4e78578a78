"""Base of reductions that are made of other reductions."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from ch_core import (
    Bucket,
    BucketLayout,
    HookConfigError,
    Packed,
    ParamLayout,
    Reduction,
    Shards,
    Stages,
    StepContext,
    Weights,
)
from commhooks.registry.build import as_hook
from commhooks.registry.expression import unparse

T = TypeVar("T")
Make = Callable[[list[Reduction]], Reduction]


def composed(what: str, hooks: Sequence[object], make: Make) -> Any:
    """Apply ``make`` to the reductions of ``hooks``. Returns a reduction, or a hook if one of them is a hook.

    Args:
        what: the composition's name, for errors.
        hooks: reductions, hook functions that carry a reduction, or hook functions that make one from their state.
        make: the composition's constructor.

    Raises:
        HookConfigError: one of the hooks is a foreign function, or a class.
    """
    found: list[Reduction | Callable[[object], Reduction]] = []
    for hook in hooks:
        if isinstance(hook, type) and issubclass(hook, Reduction):
            raise HookConfigError(f"{what} is made of objects, and {hook.__name__} is a class: give {hook.__name__}()")
        inner = hook if isinstance(hook, Reduction) else getattr(hook, "reduction", None)
        if not callable(inner) and not isinstance(inner, Reduction):
            raise HookConfigError(
                f"{what} is made of reductions, and {getattr(hook, '__name__', repr(hook)):.80} is a foreign function. It "
                "starts its own collectives, which cannot be combined with others. Use a reduction inside. Functions of torch "
                f"have one under their names, for example commhooks.create('{what}(fp16_compress)')"
            )
        found.append(inner)
    ready = [inner for inner in found if isinstance(inner, Reduction)]
    if len(ready) < len(found):
        return as_hook(_FromState(found, make), f"{what}({', '.join(getattr(h, '__name__', str(h)) for h in hooks)})")
    made = make(ready)
    return made if all(isinstance(hook, Reduction) for hook in hooks) else as_hook(made)


class _FromState:
    """Makes a composition from the hook's state."""

    def __init__(self, found: Sequence[Reduction | Callable[[object], Reduction]], make: Make) -> None:
        self.found, self.make = found, make

    def __call__(self, state: object) -> Reduction:
        return self.make([inner if isinstance(inner, Reduction) else inner(state) for inner in self.found])


class Composite(Reduction):
    """A reduction made of other reductions. Its declarations follow from its parts.

    A wrapper needs a ``name``, under which it is registered, and a :meth:`~ch_core.reduction.Reduction.run` that drives
    ``self.inner.start(bucket, ctx)``. A wrapper with options also needs ``__init__`` and
    :meth:`~ch_core.reduction.Reduction.config`.

    Declarations of the class (``lossy``, ``fields``, ``collectives``) are added to those of the parts. State fields keep
    the encoding of the part that writes them. Set ``self.reports_sent = False`` if a part's report is wrong after the
    wrapper. For sharded gradients define :meth:`~ch_core.reduction.Reduction.run_scatter`, which drives
    ``part.start_scatter(shards, ctx)``. To choose among several parts define :meth:`part_for`.

    Args:
        parts: the reductions inside. Each averages parameters exactly that do not fit it.

    Attributes:
        parts: the reductions inside.
        inner: the first part, a wrapper's only one.
        hook: the class's ``name``, which :meth:`node` uses.
        name: ``hook`` with the names of the parts, ``"clip(powersgd)"``.

    Raises:
        HookConfigError: a part is not a reduction, or two parts keep a field of one name in different ways.

    Example:
        >>> from commhooks import Plain
        >>> class Halved(Composite):
        ...     name = "halved"
        ...     def run(self, bucket, ctx):
        ...         bucket.buffer = bucket.buffer * 0.5
        ...         yield from self.inner.start(bucket, ctx)
        >>> Halved(Plain()), Halved(Plain()).node()["inner"]
        (halved(allreduce), {'hook': 'allreduce', 'config': {}})
    """

    def __init__(self, *parts: Reduction) -> None:
        if not parts or not all(isinstance(part, Reduction) for part in parts):
            raise HookConfigError(
                f"{self.name} is made of reductions, got {parts!r:.200}; commhooks.composed() takes hook functions, too"
            )
        self.parts, self.inner, self.hook = parts, parts[0], self.name
        self.name = f"{self.hook}({', '.join(part.name for part in parts)})"
        if any(part.granularity == "bucket" for part in parts):
            self.granularity = "bucket"
        own = frozenset[str]() if self.collectives is Reduction.collectives else self.collectives
        self.collectives = own.union(*(part.collectives for part in parts))
        self.castable = frozenset().union(*(part.castable for part in parts))
        self.lossy = self.lossy or any(part.lossy for part in parts)
        self.delivers = self.delivers and all(part.delivers for part in parts)
        self.reports_sent = all(part.reports_sent for part in parts)
        self.trips = max(part.trips for part in parts)
        self.splits = "rows" if any(part.splits == "rows" for part in parts) else "elements"
        self.levels = self.levels or any(part.levels for part in parts)
        given = {part.nodes for part in parts if part.nodes is not None}
        if len(given) > 1:
            raise HookConfigError(f"{self.name}: its parts have different nodes= ({given}); give all of them the same")
        self.nodes = next(iter(given), None)
        self._own_fields = frozenset(self.fields)
        powers = {field: self.scaled_fields[field] for field in self.fields if field in self.scaled_fields}
        self.scaled_fields = self._merged("scaled_fields", powers)
        self.fields = self._merged("fields", self.fields)

    def pieces_of_parts(self) -> int | None:
        """Return :attr:`piece_bytes` of a composition that chooses among its parts: the largest of the lossy parts."""
        sizes = [part.piece_bytes for part in self.parts if part.lossy]
        return max((size for size in sizes if size), default=None) if all(sizes) else None

    def part_for(self, param: ParamLayout, step: int) -> Reduction:
        """Return the part that treats a parameter in a step."""
        return self.inner

    def route(self, param: ParamLayout, step: int) -> str | None:
        return self.part_for(param, step).route(param, step)

    def low_rank(self, param: ParamLayout, step: int) -> bool:
        return self.part_for(param, step).low_rank(param, step)

    def label(self, param: ParamLayout, step: int) -> str:
        label = self.part_for(param, step).label(param, step)
        return label if len(self.parts) > 1 else f"{self.hook}({label})"

    def memory_order(self, param: ParamLayout, step: int) -> frozenset[str]:
        keepers = {field: self._keeper(field, param, step) for field in self.fields}
        own = self.memory_order_fields & self._own_fields
        return own | {f for f, part in keepers.items() if part is not None and f in part.memory_order(param, step)}

    def packing(self, param: ParamLayout, step: int) -> Mapping[str, Packed]:
        made = {field: packed for field, packed in self.packed_fields.items() if field in self._own_fields}
        for field in self.fields:
            part = self._keeper(field, param, step)
            packed = part.packing(param, step).get(field) if part is not None else None
            if packed is not None:
                made[field] = packed
        return made

    def encodes_itself(self, param: ParamLayout, step: int) -> bool:
        return self.part_for(param, step).encodes_itself(param, step)

    def _keeper(self, field: str, param: ParamLayout, step: int) -> Reduction | None:
        """Return the part that keeps a field of a parameter in a step; ``None`` if this reduction itself does."""
        if field in self._own_fields:
            return None
        return next((part for part in (self.part_for(param, step), *self.parts) if field in part.fields), None)

    def _merged(self, attribute: str, own: Mapping[str, T]) -> dict[str, T]:
        """Return the declarations of each field by the parts and this reduction.

        Raises:
            HookConfigError: two parts keep a field of one name in different ways.
        """
        made: dict[str, T] = {}
        kept: set[str] = set()  # fields of earlier parts; a part declares defaults for fields that it does not keep
        for part in self.parts:
            for field, value in getattr(part, attribute).items():
                if field in part.fields and field in kept and made[field] != value:
                    raise HookConfigError(
                        f"{self.name}: {part.name} declares {attribute}[{field!r}] = {value!r}, and another part "
                        f"{made[field]!r}. State is saved by field, so parts that keep one field agree on it. Give one of "
                        "the fields another name"
                    )
                if field in part.fields or field not in made:
                    made[field] = value
            kept.update(part.fields)
        return made | dict(own)

    def keeps_equal(self, name: str) -> bool:
        return all(part.keeps_equal(name) for part in self.parts)

    def phase(self, step: int) -> Hashable:
        return tuple(part.phase(step) for part in self.parts)

    def check(self, layout: BucketLayout) -> None:
        for part in self.parts:
            part.check(layout)

    def start(self, bucket: Bucket, ctx: StepContext) -> Stages:
        return self.run(bucket, ctx)  # the parts average parameters exactly that do not fit them

    @property
    def scatters(self) -> bool:
        return super().scatters and all(part.scatters for part in self.parts)

    def start_scatter(self, shards: Shards, ctx: StepContext) -> Stages:
        return self.run_scatter(shards, ctx)

    @property
    def gathers_weights(self) -> bool:
        return super().gathers_weights and all(part.gathers_weights for part in self.parts)

    def start_gather_weights(self, weights: Weights, ctx: StepContext, exact: Collection[str] = ()) -> Stages:
        return self.gather_with_plain(weights, ctx, exact)  # the parts route parameters that do not fit them

    def node(self) -> dict[str, Any]:
        inner = [part.node() for part in self.parts]
        return {"hook": self.hook, "config": self.config(), "inner": inner if len(inner) > 1 else inner[0]}

    def __repr__(self) -> str:
        return unparse(self.node())
