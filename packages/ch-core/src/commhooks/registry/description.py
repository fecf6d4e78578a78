"""`describe`: one hook as a block of plain text, and as JSON-able data for the CLI."""

from typing import Any

from commhooks.registry.specs import HookSpec


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


def text(spec: HookSpec) -> str:
    """The block that `commhooks.describe` returns."""
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
    width = max(len(f"{name}={param.default!r}") for name, param in spec.params.items())
    lines += ["  options"]
    for name, param in spec.params.items():
        brings = f" (then: {', '.join(sorted(param.brings))})" if param.brings else ""
        lines.append(f"    {f'{name}={param.default!r}':<{width}}  {param.accepts()}: {param.doc}{brings}")
    return "\n".join(lines)
