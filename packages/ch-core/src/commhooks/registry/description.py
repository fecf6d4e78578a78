"""`describe`: one hook as a block of plain text, and as JSON-able data for the CLI."""

from collections.abc import Mapping
from typing import Any

from commhooks.registry.builder import Builder
from commhooks.registry.expression import nodes, parse, unparse
from commhooks.registry.specs import HookSpec


def described(what: str, kind: str | None = None) -> list[tuple[HookSpec, dict[str, Any]]]:
    """The levels of an expression, outermost first, each with the options that it is given, checked.

    Raises:
        UnknownHookError, AmbiguousHookError, HookConfigError: as ``commhooks.create``.
    """
    builder, found = Builder(), []
    for node in nodes(parse(what)):
        inside = "inner" in node or "rules" in node
        spec = builder.spec(node, "wrapper" if inside else kind)
        builder.config(spec, node["config"])
        found.append((spec, dict(node["config"])))
    return found


def expression_text(what: str, kind: str | None = None) -> str:
    """The block of every level of an expression; of a bare name, just its own."""
    levels, node = described(what, kind), parse(what)
    if len(levels) == 1 and not levels[0][1]:
        return text(levels[0][0])
    return "\n\n".join([unparse(node), *(text(spec, given) for spec, given in levels)])


def record(spec: HookSpec) -> dict[str, Any]:
    """A spec as plain data with stable keys."""
    params = None
    if spec.params is not None:
        params = {
            name: {
                "default": param.default,
                "accepts": param.accepts(),
                "doc": param.doc,
                "brings": sorted(param.brings),
            }
            for name, param in spec.params.items()
        }
    needs = {field: getattr(spec.needs, field) for field in ("backends", "devices", "dtypes", "torch", "packages")}
    return {
        "name": spec.name,
        "kind": spec.kind,
        "provider": spec.provider,
        "version": spec.version,
        "summary": spec.summary,
        "aliases": list(spec.aliases),
        "capabilities": sorted(spec.capabilities),
        "stability": spec.stability,
        "replaced_by": spec.replaced_by,
        "params": params,
        "needs": {field: list(v) if isinstance(v, tuple) else v for field, v in needs.items() if v},
        "example": spec.example,
        "target": spec.target,
        "hook": spec.hook,
        "state": spec.state,
        "caution": spec.caution,
        "docs": spec.docs,
        "paper": spec.paper,
        "origin": spec.origin,
        "api": spec.api,
    }


def text(spec: HookSpec, given: Mapping[str, Any] | None = None) -> str:
    """The block that `commhooks.describe` returns.

    Args:
        spec: of the hook.
        given: options that are set; they stand in the place of the defaults, marked.
    """
    lines = [f"{spec.name} ({spec.kind}): {spec.summary}", f"  from      {spec.provider} {spec.version}"]
    lines += [f"  example   {spec.example}"]
    facts = {
        "aliases": ", ".join(spec.aliases),
        "can": ", ".join(sorted(spec.capabilities)),
        "needs": "; ".join(
            f"{k} {v if isinstance(v, str) else ', '.join(v)}" for k, v in record(spec)["needs"].items()
        ),
        "stability": "" if spec.stability == "stable" else spec.stability,
        "use": spec.replaced_by or "",
        "caution": spec.caution,
        "callable": spec.hook or "",
        "state": spec.state or "",
        "paper": spec.paper,
        "docs": spec.docs,
    }
    lines += [f"  {label:<9} {value}" for label, value in facts.items() if value]
    if spec.params is None:
        return "\n".join([*lines, "  options   read from its code when it is created"])
    if not spec.params:
        return "\n".join([*lines, "  options   none"])
    shown = {name: f"{name}={(given or {}).get(name, param.default)!r}" for name, param in spec.params.items()}
    width = max(map(len, shown.values()))
    lines += ["  options"]
    for name, param in spec.params.items():
        brings = f" (then: {', '.join(sorted(param.brings))})" if param.brings else ""
        was = f" (given; default {param.default!r})" if name in (given or {}) else ""
        lines.append(f"    {shown[name]:<{width}}  {param.accepts()}: {param.doc}{brings}{was}")
    return "\n".join(lines)
