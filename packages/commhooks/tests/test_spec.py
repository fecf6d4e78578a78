"""Specs and errors are plain data, which checks itself and survives pickling."""

import inspect
import pickle

import pytest

from ch_core import errors
from commhooks import HookSpec, Option, PluginFailure

ERRORS = [e for e in vars(errors).values() if inspect.isclass(e) and issubclass(e, errors.CommHooksError)]


@pytest.mark.parametrize("error", ERRORS)
def test_errors_pickle_and_print_their_message(error):
    again = pickle.loads(pickle.dumps(error("what was given\n  what to do")))
    assert type(again) is error
    assert str(again) == "what was given\n  what to do"


@pytest.mark.parametrize(
    "bad",
    [
        {"name": "Power"},
        {"name": "lambda"},
        {"kind": "ddp2"},
        {"target": "no_colon"},
        {"target": "a b:c"},
        {"hook": "x"},
        {"capabilities": frozenset({"fast"})},
        {"group": "good"},
        {"aliases": ("Bad-Alias",)},
        {"options": {"provider": Option("", "reserved")}},
        {"options": {"Rank": Option(1, "upper case")}},
    ],
)
def test_malformed_specs_are_refused(bad):
    fields = {"name": "x", "kind": "ddp", "target": "a.b:c", "summary": "s", **bad}
    with pytest.raises(errors.HookConfigError):
        HookSpec(**fields)


def test_specs_are_values():
    spec = HookSpec("x", "ddp", "a.b:c", "s", options={"rank": Option(1, "doc")})
    assert spec == pickle.loads(pickle.dumps(spec))
    assert len({spec, spec}) == 1
    with pytest.raises(AttributeError):
        spec.name = "y"  # type: ignore[misc]
    assert str(PluginFailure("acme", "1.0", "commhooks: x", "import", "boom", "Traceback")).endswith(
        "import): boom (COMMHOOKS_DISABLE=acme leaves it out)"
    )
