"""The registry finds outer optimizers of this package and of any plugin by name."""

import subprocess
import sys

import pytest
import torch

import ch_outer
import commhooks
from ch_outer import FixedRanks, OuterOptimizer, Schedule
from commhooks.registry.registry import REGISTRY

from .outer_kit import adam, alone, make, same, train, values

NAMES = ["diloco", "local_sgd", "muloco", "sparse_loco", "streaming"]


def test_the_presets_are_found_by_name() -> None:
    assert [spec.name for spec in commhooks.list_hooks(kind="outer")] == NAMES
    text = commhooks.describe("diloco(every=30, exchange=quant4)")
    assert "every=30" in text and "exchange='quant4'" in text and "a hook expression" in text


@pytest.mark.parametrize("name", NAMES)
def test_a_registered_outer_optimizer_is_the_preset_with_its_options(name: str) -> None:
    spec, options = REGISTRY.outer(f"{name}(every=6)")
    by_name, by_hand = make(), make()
    preset = getattr(ch_outer, spec.target.partition(":")[2])
    one = REGISTRY.target(spec)(adam(by_name), by_name, transport=alone(), **options)
    other = preset(adam(by_hand), by_hand, every=6, transport=alone())
    assert isinstance(one, OuterOptimizer) and one.schedule == other.schedule
    assert repr(one.outer) == repr(other.outer)
    for model, optimizer in ((by_name, one), (by_hand, other)):
        train(model, optimizer, 0, range(13))
    assert same(values(by_name), values(by_hand))


def test_a_hook_may_be_an_option_without_quotes() -> None:
    node = commhooks.canonical("diloco(exchange=policy({'*.bias': allreduce, '*': quant4(block=64)}), mix=carry)")
    assert node["config"] == {"exchange": "policy({'*.bias': allreduce, '*': quant4(block=64)})", "mix": "carry"}


@pytest.mark.parametrize(
    ("expression", "error", "word"),
    [
        ("diloco(evry=3)", commhooks.HookConfigError, "every"),
        ("diloco(every=0)", commhooks.HookConfigError, ">= 1"),
        ("diloco(exchange=quant5)", commhooks.UnknownHookError, "did you mean"),
        ("diloco(exchange=quant4(bits=99))", commhooks.HookConfigError, "bits"),
        ("diloco(exchange=local_sgd)", commhooks.HookConfigError, "is an outer optimizer"),
        ("quant4", commhooks.HookConfigError, "diloco(exchange=quant4)"),
        ("warmup(diloco)", commhooks.HookConfigError, "is a wrapper"),
        ("dilco", commhooks.UnknownHookError, "did you mean 'diloco'"),
    ],
)
def test_a_bad_outer_expression_names_the_problem(expression: str, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word.replace("(", r"\(").replace(")", r"\)")):
        REGISTRY.outer(expression)


def test_an_outer_optimizer_is_no_hook() -> None:
    for refused in (lambda: commhooks.create("diloco"), lambda: commhooks.get("diloco")):
        with pytest.raises(commhooks.HookConfigError, match="is an outer optimizer, not a hook"):
            refused()


def test_the_options_import_no_torch() -> None:
    text = "import sys, commhooks; commhooks.describe('diloco(every=3)'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)


def test_a_preset_takes_its_ranks_whole_or_by_name() -> None:
    model = make()
    ranks = FixedRanks(transport=alone(), timeout=5.0)
    whole = ch_outer.local_sgd(adam(model), model, ranks=ranks)
    by_name = ch_outer.local_sgd(adam(model), model, transport=alone(), timeout=5.0)
    assert whole.schedule == by_name.schedule == Schedule(8)
    with pytest.raises(TypeError, match="timeout"):
        ch_outer.local_sgd(adam(model), model, ranks=ranks, timeout=5.0)


def test_a_bad_number_of_steps_is_refused() -> None:
    model = make()
    with pytest.raises(commhooks.HookConfigError, match="steps='many'"):
        ch_outer.diloco(adam(model), model, steps="many", transport=alone())
    with pytest.warns(UserWarning, match="rounds are few"):
        ch_outer.diloco(torch.optim.SGD(model.parameters()), model, steps=1000, transport=alone())
