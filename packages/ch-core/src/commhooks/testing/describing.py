"""The part of the contract that runs no step: listing, options, expressions."""

import json
import subprocess
import sys
from functools import cache

import pytest

import commhooks
from commhooks.testing.case import Case

_LIST = """
import json, sys
import commhooks
specs = commhooks.list_hooks()
print(json.dumps({"torch": "torch" in sys.modules, "ids": [s.id for s in specs],
                  "failures": [str(f) for f in commhooks.failures()]}))
"""


@cache
def listed() -> dict[str, object]:
    """What a fresh interpreter lists, and whether it imported torch for that."""
    run = subprocess.run([sys.executable, "-c", _LIST], capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, object] = json.loads(run.stdout)
    return found


class Describing(Case):
    """Checks of what the hook says of itself."""

    def test_listing_imports_no_torch(self) -> None:
        installed = [spec for spec in self.specs if spec.provider != "local"]
        if not installed:
            pytest.skip("registered in this process, not installed")
        found = listed()
        assert not found["torch"], "listing hooks imported torch: keep the plugin module free of it"
        ids = found["ids"]
        assert isinstance(ids, list)
        missing = [spec.id for spec in installed if spec.id not in ids]
        assert not missing, f"not listed in a fresh interpreter: {missing}; failures: {found['failures']}"

    def test_description(self) -> None:
        for spec in self.specs:
            assert 0 < len(spec.summary) <= 100, f"{spec.id}: a summary has 1 to 100 characters"
            assert spec.name in commhooks.describe(spec.name, spec.kind)
            for option in (spec.params or {}).values():
                option.check(option.default)

    def test_config_round_trip(self) -> None:
        handle = self.handle
        assert json.loads(json.dumps(handle.config)) == handle.config, "options are plain values"
        for again in (commhooks.create(handle.config), commhooks.create(handle.expr)):
            assert (again.expr, again.config, again.full) == (handle.expr, handle.config, handle.full)

    def test_declared_state(self) -> None:
        reduction = self.reduction
        assert set(reduction.fields.values()) <= {"local", "shared"}
        assert bool(reduction.fields) == ("stateful" in self.capabilities), (
            "a hook with state fields declares the capability 'stateful', and no other does; where a parameter decides, "
            "it is the parameter that brings it: Param(..., brings=frozenset({'stateful'}))"
        )
