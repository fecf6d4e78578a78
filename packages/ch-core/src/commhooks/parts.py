"""What compositions share: the reductions they are made of, and what the whole declares about itself."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from commhooks.ddp import as_hook
from commhooks.errors import HookConfigError
from commhooks.reduction import Reduction

Make = Callable[[list[Reduction]], Reduction]


def composed(what: str, hooks: Sequence[object], make: Make) -> Any:
    """``make`` applied to the reductions of ``hooks``: a reduction, or a hook if one of them is a hook.

    Args:
        what: the composition's name, for errors.
        hooks: reductions, or hook functions that carry one, or that make one from their state.
        make: the composition's constructor.

    Raises:
        HookConfigError: one is a foreign function.
    """
    found = [hook if isinstance(hook, Reduction) else getattr(hook, "reduction", None) for hook in hooks]
    for hook, inner in zip(hooks, found, strict=True):
        if not callable(inner) and not isinstance(inner, Reduction):
            raise HookConfigError(
                f"{what} is made of reductions, and {getattr(hook, '__name__', repr(hook)):.80} is not one: its "
                "collectives are its own and cannot be put together with others. Give the hook by name, for example "
                f"commhooks.create('{what}(...)')"
            )
    ready = [inner for inner in found if isinstance(inner, Reduction)]
    if len(ready) < len(found):
        return as_hook(_FromState(found, make), f"{what}({', '.join(getattr(h, '__name__', str(h)) for h in hooks)})")
    made = make(ready)
    return made if all(isinstance(hook, Reduction) for hook in hooks) else as_hook(made)


class _FromState:
    """Makes a composition whose parts follow from the hook's state."""

    def __init__(self, found: Sequence[Any], make: Make) -> None:
        self.found, self.make = found, make

    def __call__(self, state: Any) -> Reduction:
        return self.make([inner if isinstance(inner, Reduction) else inner(state) for inner in self.found])


class Composite(Reduction):
    """A reduction made of others. What it declares is what its parts declare together."""

    def __init__(self, parts: Sequence[Reduction], name: str) -> None:
        self.parts, self.name = tuple(parts), name
        granularities = {part.granularity for part in parts}
        self.granularity: Literal["tensor", "bucket"] = "bucket" if "bucket" in granularities else "tensor"
        self.collectives = frozenset[str]().union(*(part.collectives for part in parts))
        self.lossy = any(part.lossy for part in parts)
        self.reports_sent = all(part.reports_sent for part in parts)
        self.fields = {field: kind for part in parts for field, kind in part.fields.items()}  # type: ignore[misc]

    def node(self) -> dict[str, Any]:
        inner = [part.node() for part in self.parts]
        name = self.name.partition("(")[0]
        return {"hook": name, "config": self.config(), "inner": inner if len(inner) > 1 else inner[0]}
