"""Every hook of the project keeps the whole contract. Discovery finds the hooks, so a new hook is tested without being named.

The quick set runs the whole contract for one hook of each method. For their relatives (other bits, other options, wrappers)
it runs three checks on gloo processes. The full set runs the whole contract of all relatives and pairs.
"""

import pytest

import commhooks
from ch_testing import HookContract
from commhooks import canonical
from commhooks.registry.expression import nodes

STEPS = {"topk": 50, "randomk": 50}  # steps until most of a gradient has been sent
NOISE = {"quant": 0.2, "quant4": 0.2}  # in one step with 4 bits, without feedback


def hooks() -> list[str]:
    """Return every reduction's and wrapper's example, and the bare name if an option selects the hook."""
    reductions = commhooks.list_hooks(kind="reduction") + commhooks.list_hooks(kind="ddp")
    wrappers = commhooks.list_hooks(kind="wrapper")
    found = [spec.example for spec in [*reductions, *wrappers]]
    found += [spec.name for spec in reductions if any(option.brings for option in (spec.options or {}).values())]
    return list(dict.fromkeys(found))


def pairs() -> list[str]:
    """Return every one-hook wrapper around every stateful reduction."""
    found = []
    for wrapper in commhooks.list_hooks(kind="wrapper"):
        for inner in [*commhooks.list_hooks(kind="reduction"), *commhooks.list_hooks(kind="ddp")]:
            if "stateful" in inner.capabilities_with(canonical(inner.example).get("config", {})):
                try:
                    found.append(commhooks.create({"hook": wrapper.name, "inner": inner.example}).expr)
                except commhooks.HookConfigError:  # it refuses this hook, or takes no single hook
                    continue
    return found


HOOKS = hooks()
METHODS = (  # one of each, whose whole contract is in the quick set
    "allreduce",
    "error_feedback(bf16_compress)",
    "powersgd(rank=4)",
    "quant4(error_feedback=True)",
    "topk",
)
SHORT = ("test_description", "test_gloo", "test_one_step")
SHORT_ON_GLOO = ("attached", "not_finite", "raising")
PAIRS = set(pairs()) - set(HOOKS)


def contracts(expr: str) -> list[type]:
    """Return the test classes of a hook: the whole contract, and a short one if the quick set does without the whole."""
    if expr in METHODS:
        return [contract("TestHook", expr, {})]
    whole = contract("TestHook", expr, {"pytestmark": pytest.mark.full})
    if expr in PAIRS:
        return [whole]
    short: dict[str, object] = {n: None for n in dir(HookContract) if n.startswith("test_") and n not in SHORT}
    short["checks"] = lambda case: [check for check in HookContract.checks(case) if check in SHORT_ON_GLOO]
    return [contract("TestShort", expr, short), whole]


def contract(prefix: str, expr: str, more: dict[str, object]) -> type:
    """Return a test class of a hook. A check that ``more`` sets to None is left out."""
    name = f"{prefix}_" + "".join(c if c.isalnum() else "_" for c in expr)
    warm = any("needs_warmup" in commhooks.spec(n["hook"]).capabilities for n in nodes(canonical(expr)))
    sparse = max((STEPS.get(node["hook"], 0) for node in nodes(canonical(expr))), default=0)
    inside = {"expr": expr, "first_step": 1000 if warm else 0, "__module__": __name__, "__doc__": expr}
    inside |= {"steps": sparse} if sparse else {}
    noise = max((NOISE.get(node["hook"], 0.0) for node in nodes(canonical(expr))), default=0.0)
    inside |= {"tolerance": noise} if noise else {}
    inside |= {"mixes": any(node["hook"] == "batched_powersgd" for node in nodes(canonical(expr)))}
    one_node = any(node["hook"] == "two_level" for node in nodes(canonical(expr)))  # both ranks run on this machine
    inside |= {"compresses": False} if one_node else {}
    return type(name, (HookContract,), inside | more)


for _expr in [*HOOKS, *sorted(PAIRS)]:
    for _class in contracts(_expr):
        globals()[_class.__name__] = _class


def test_no_hook_is_left_out():
    assert set(METHODS) <= set(HOOKS)
    tested = {(kind, node["hook"]) for e in HOOKS for node in nodes(canonical(e)) for kind in _kinds(node)}
    listed = {(spec.kind, spec.name) for spec in commhooks.list_hooks() if spec.kind not in ("fsdp", "outer")}
    assert not listed - tested


def _kinds(node: dict) -> tuple[str, ...]:
    return ("wrapper",) if "inner" in node or "rules" in node else ("reduction", "ddp")


def test_no_plugin_is_broken():
    assert commhooks.failures() == []
