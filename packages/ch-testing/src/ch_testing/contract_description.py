"""Contract, part 1: the description of a hook (listing, options, expressions). No step runs."""

import json
import subprocess
import sys
from functools import cache

import commhooks
from ch_core import LATER
from ch_testing.contract_case import Case, only_if
from ch_testing.gradients import parameters
from commhooks import BucketLayout, Reduction, StepContext, canonical

_LIST = """
import json, sys
import commhooks
specs = commhooks.list_hooks()
print(json.dumps({"torch": "torch" in sys.modules, "ids": [s.id for s in specs],
                  "failures": [str(f) for f in commhooks.failures()]}))
"""


@cache
def listed() -> dict[str, object]:
    """Return the hooks that a fresh interpreter lists; ``torch`` is True if it imported torch."""
    run = subprocess.run([sys.executable, "-c", _LIST], capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, object] = json.loads(run.stdout)
    return found


class Describing(Case):
    """Checks of the hook's description."""

    @only_if("installed")
    def test_listing_imports_no_torch(self) -> None:
        found = listed()
        assert not found["torch"], "listing hooks imported torch: keep the plugin module free of it"
        ids = found["ids"]
        assert isinstance(ids, list)
        missing = [spec.id for spec in self.specs if spec.id not in ids]
        assert not missing, f"not listed in a fresh interpreter: {missing}; failures: {found['failures']}"

    def test_description(self) -> None:
        for spec in self.specs:
            assert len(spec.summary) <= 100, f"{spec.id}: a summary has at most 100 characters"
            first = commhooks.describe(spec.id, spec.kind).partition("\n")[0]
            assert "(no summary)" not in first, f"{spec.id}: needs a summary, or a docstring of its target"
            assert spec.name in commhooks.describe(spec.name, spec.kind)
            for option in (spec.options or {}).values():
                option.check(option.default)

    def test_config_round_trip(self) -> None:
        handle = self.handle
        assert json.loads(json.dumps(handle.config)) == handle.config, "options are plain values"
        for again in (commhooks.create(handle.config), commhooks.create(handle.expr)):
            assert (again.expr, again.config, again.full) == (handle.expr, handle.config, handle.full)

    @only_if("wraps")
    def test_an_object_says_what_it_is(self) -> None:
        """A wrapper given as an object prints an expression that builds a hook with the same labels, routes and plans."""
        given, layout = self.reduction, BucketLayout.of_tensors(parameters())
        handle = commhooks.create(given)
        assert handle.config == canonical(handle.expr), (
            f"given as an object it prints {handle.expr!r}, which is not an expression: node() is made of the name it is "
            "registered under, its options and its parts, as Composite's is"
        )
        assert handle.config["hook"] in self.specs[0].names, f"node() says {handle.config['hook']!r}"
        built = commhooks.create(handle.expr).reduction
        assert built is not None
        for step in (0, LATER):
            ctx = StepContext(0, 2, step)
            for one, other in zip(_said(built, layout, ctx), _said(given, layout, ctx), strict=True):
                assert one == other, f"step {step}: built from {handle.expr!r} it says {one}, the object {other}"

    @only_if("simulates")
    def test_declared_state(self) -> None:
        reduction = self.reduction
        assert set(reduction.fields.values()) <= {"local", "shared", "owned"}
        assert bool(reduction.fields) == ("stateful" in self.capabilities), (
            "a hook with state fields declares the capability 'stateful', and no other does; where a parameter decides, "
            "it is the parameter that brings it: Option(..., brings=frozenset({'stateful'}))"
        )


def _said(reduction: Reduction, layout: BucketLayout, ctx: StepContext) -> list[object]:
    """Everything that a reduction says of itself, and of a model, in a step."""
    parameters = [(p.name, reduction.label(p, ctx.step), reduction.memory_order(p, ctx.step)) for p in layout.params]
    declared = (reduction.granularity, reduction.lossy, reduction.trips, reduction.reports_sent, reduction.delivers)
    state = (dict(reduction.fields), dict(reduction.scaled_fields))
    routes, plan = reduction.routes(layout, ctx.step), reduction.plan(layout, ctx)
    return [reduction.name, reduction.node(), reduction.collectives, *declared, *state, *parameters, routes, plan]
