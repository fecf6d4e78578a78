"""``why_not``: every reason why a hook cannot be used in a given place."""

from collections.abc import Mapping
from typing import Any

from commhooks.registry.builder import Builder
from commhooks.registry.expression import canonical, nodes
from commhooks.registry.registry import REGISTRY, Registry


def why_not(
    what: str | Mapping[str, Any],
    *,
    backend: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    world_size: int | None = None,
    registry: Registry = REGISTRY,
) -> list[str]:
    """Every reason why a hook cannot be used here, `[]` if it can.

    Looks at each level of the expression: unknown names and options, code that fails to import, what the
    hook says it needs, and what any plugin objects to. What is not given is not checked.

    Args:
        what: a name, an expression or a dict.
        backend: the process group's, e.g. `"gloo"`.
        device: a device type, e.g. `"cuda"`.
        dtype: the gradients', e.g. `"bfloat16"`.
        world_size: number of ranks.
        registry: where names are looked up.

    Raises:
        HookConfigError: `what` is not an expression at all.
    """
    known = {"backend": backend, "device": device, "dtype": dtype, "world_size": world_size}
    context = {name: value for name, value in known.items() if value is not None}
    reasons: list[str] = []
    builder = Builder(registry)
    for node in nodes(canonical(what)):
        try:
            spec = builder.spec(node, "wrapper" if "inner" in node or "rules" in node else None)
            config = builder.config(spec, node["config"])
            for target in filter(None, (spec.hook, spec.state)):
                registry.load(target, spec)
            registry.target(spec)
        except (LookupError, ValueError, ImportError) as error:
            reasons.append(str(error))
            continue
        for _, problems in registry.ask("commhooks_check", spec=spec, config=config, context=context):
            reasons += [str(problem) for problem in problems or ()]
    return reasons
