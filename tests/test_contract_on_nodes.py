"""Every hook inside ``two_level`` keeps the contract on simulated nodes, two of two ranks and three of two, or is refused.

Checks on processes belong to ``test_two_level_processes.py`` of ch-ddp.
"""

import pytest
import torch

import commhooks
from ch_testing import HookContract
from commhooks import canonical
from commhooks.registry.expression import nodes
from tests.test_contract import NOISE, STEPS, hooks

REFUSED = {  # hook -> text of the refusal
    "post_local_sgd": "starts its own collectives",
    "two_level": "the hook inside has two levels already",
    "reduce_scatter": "it is an FSDP1 hook",
    "diloco": "is an outer optimizer, not a hook",
    "local_sgd": "is an outer optimizer, not a hook",
    "muloco": "is an outer optimizer, not a hook",
    "sparse_loco": "is an outer optimizer, not a hook",
    "streaming": "is an outer optimizer, not a hook",
}
METHODS = (  # one hook of each way to divide a bucket, and to keep state; the others try fp32 alone
    "allreduce",
    "batched_powersgd(rank=4)",
    "bf16_compress",
    "error_feedback(bf16_compress)",
    "powersgd(rank=4)",
    "quant4(error_feedback=True)",
)
RELATIVES = ("topk(density=0.01, bits=2)",)  # costly forms of a hook that is in the list under its bare name
QUICK = {  # the rest belongs to the full set
    "allreduce": ("test_all_ranks", "test_ranks_that_disagree", "test_exception"),
    "quant4(error_feedback=True)": ("test_input_is_sent", "test_each_rank_of_a_node", "test_state_round_trip"),
    "topk": ("test_each_rank_of_a_node", "test_rollback"),
}


def on_nodes(expr: str, **more: object) -> type[HookContract]:
    """Return the contract of a hook inside ``two_level`` on nodes of two ranks."""
    parts = nodes(canonical(expr))
    found: dict[str, object] = {name: None for name in dir(HookContract) if name.startswith("test_gloo")}
    found |= {"expr": f"two_level({expr}, nodes=2)", "world_sizes": (4, 6), "__module__": __name__, "__doc__": expr}
    found |= {"compresses": False}  # gradients inside a node are exact, so short plans send more than flat ones
    if any("needs_warmup" in commhooks.spec(part["hook"]).capabilities for part in parts):
        found["first_step"] = 1000
    if steps := max(STEPS.get(part["hook"], 0) for part in parts):
        found["steps"] = steps
    if noise := max(NOISE.get(part["hook"], 0.0) for part in parts):
        found["tolerance"] = noise
    found["mixes"] = any(part["hook"] == "batched_powersgd" for part in parts)
    if expr not in METHODS:
        found["dtypes"] = (torch.float32,)
    name = "TestOnNodes_" + "".join(c if c.isalnum() else "_" for c in expr)
    return type(name, (HookContract,), found | more)


WRAPPED = [expr for expr in hooks() if canonical(expr)["hook"] not in REFUSED and expr not in RELATIVES]
for _expr in WRAPPED:
    _class = on_nodes(_expr, pytestmark=pytest.mark.full)
    globals()[_class.__name__] = _class
for _expr, _starts in QUICK.items():
    _left = {n: None for n in dir(HookContract) if n.startswith("test_") and not n.startswith(_starts)}
    _class = on_nodes(_expr, **_left)
    globals()[_class.__name__.replace("TestOnNodes", "TestQuick")] = _class


def test_no_hook_is_left_out() -> None:
    wrapped = {part["hook"] for expr in WRAPPED for part in nodes(canonical(expr))}
    assert {spec.name for spec in commhooks.list_hooks()} == wrapped | REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    for spec in (spec for spec in commhooks.list_hooks() if spec.name == name):
        with pytest.raises(commhooks.HookConfigError, match=REFUSED[name]):
            commhooks.create(f"two_level({spec.example})")
