"""Specs and errors: plain data that checks itself and survives pickling."""

import inspect
import pickle

import pytest

from commhooks import errors
from commhooks.registry.specs import HookSpec, Param, PluginFailure

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
        {"stability": "good"},
        {"aliases": ("Bad-Alias",)},
        {"params": {"provider": Param("", "reserved")}},
        {"params": {"Rank": Param(1, "upper case")}},
    ],
)
def test_malformed_specs_are_refused(bad):
    fields = {"name": "x", "kind": "ddp", "target": "a.b:c", "summary": "s", **bad}
    with pytest.raises(errors.HookConfigError):
        HookSpec(**fields)


def test_specs_are_values():
    spec = HookSpec("x", "ddp", "a.b:c", "s", params={"rank": Param(1, "doc")})
    assert spec == pickle.loads(pickle.dumps(spec))
    assert len({spec, spec}) == 1
    with pytest.raises(AttributeError):
        spec.name = "y"  # type: ignore[misc]
    assert str(PluginFailure("acme", "1.0", "commhooks: x", "import", "boom", "Traceback")).endswith("boom")


@pytest.mark.parametrize(
    ("param", "good", "bad"),
    [
        (Param(1, "", at_least=1), [1, 7], [0, True, 1.0, "1", None]),
        (Param(1.0, "", above=0.0, at_most=2.0), [1, 2.0], [0, 2.5, True, "1"]),
        (Param(True, ""), [False], [1, "yes", None]),
        (Param("a", "", choices=("a", "b")), ["b"], ["c", 1, None]),
        (Param(None, ""), [None, 3, "x"], []),
        (Param(4, "", optional=True), [None, 1], ["x"]),
    ],
)
def test_params_accept_what_they_say(param, good, bad):
    for value in good:
        assert param.check(value) == value
    for value in bad:
        with pytest.raises(ValueError, match=r".") as caught:
            param.check(value)
        assert str(caught.value) == param.accepts()
    assert type(Param(1.0, "").check(2)) is float
