"""Hooks of every method inside ``two_level`` keep the contract on simulated nodes: two of two ranks, and three of two.

Checks on processes belong to ``test_two_level_processes.py`` of ch-ddp. A single rank cannot make a node of two.
"""

import pytest

import commhooks
from commhooks.registry.expression import canonical, nodes
from commhooks.testing import HookContract
from tests.test_contract import NOISE, STEPS

pytestmark = pytest.mark.full

LEFT_OUT = [name for name in dir(HookContract) if name.startswith("test_gloo")]
LEFT_OUT += ["test_single_rank", "test_a_part_is_the_average_on_uneven_shards"]  # they take one rank, or five


METHODS = (  # one hook of each method
    "allreduce",
    "batched_powersgd(rank=4)",
    "bf16_compress",
    "fp16_compress",
    "half",
    "noop",
    "powersgd(rank=4)",
    "quant4(error_feedback=True)",
)

for _expr in METHODS:
    _nodes = nodes(canonical(_expr))
    _more: dict[str, object] = dict.fromkeys(LEFT_OUT)
    _more |= {"expr": f"two_level({_expr}, nodes=2)", "world_sizes": (4, 6), "__module__": __name__, "__doc__": _expr}
    _more |= (
        {"first_step": 1000} if any("needs_warmup" in commhooks.spec(n["hook"]).capabilities for n in _nodes) else {}
    )
    _more |= {"compresses": False}  # gradients inside a node are exact, so short plans send more than flat ones
    if _sparse := max((STEPS.get(n["hook"], 0) for n in _nodes), default=0):
        _more["steps"] = _sparse
    if _noise := max((NOISE.get(n["hook"], 0.0) for n in _nodes), default=0.0):
        _more["tolerance"] = _noise
    if commhooks.create(_expr).reduction.splits == "rows":  # type: ignore[union-attr]
        # Parts of a node have the size of the largest one, which may hide another parameter. attach() compares parameters.
        _more["test_ranks_that_disagree_get_a_typed_error"] = None
    _more["mixes"] = any(n["hook"] == "batched_powersgd" for n in _nodes)
    _name = "TestOnNodes_" + "".join(c if c.isalnum() else "_" for c in _expr)
    globals()[_name] = type(_name, (HookContract,), _more)
