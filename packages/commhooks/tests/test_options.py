"""Options are declared once, checked by name and read from dataclass fields."""

import pickle
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest

from ch_core import errors
from commhooks import Option, Options, Plain, option


@pytest.mark.parametrize(
    ("param", "good", "bad"),
    [
        (Option(1, "", at_least=1), [1, 7], [0, True, 1.0, "1", None]),
        (Option(1.0, "", above=0.0, at_most=2.0), [1, 2.0], [0, 2.5, True, "1"]),
        (Option(True, ""), [False], [1, "yes", None]),
        (Option("a", "", choices=("a", "b")), ["b"], ["c", 1, None]),
        (Option(None, ""), [None, 3, "x"], []),
        (Option(4, "", optional=True), [None, 1], ["x"]),
    ],
)
def test_options_accept_their_documented_values(param, good, bad):
    for value in good:
        assert param.check(value) == value
    for value in bad:
        with pytest.raises(ValueError, match=r".") as caught:
            param.check(value)
        assert str(caught.value) == param.accepts()
    assert type(Option(1.0, "").check(2)) is float


@dataclass(frozen=True, eq=False, repr=False)
class Told(Options):
    rate: float = option(0.5, "part that is sent", above=0.0, at_most=1.0)
    kind: Literal["a", "b"] = option("a", "which of the two")
    level: Literal[1, None] = option(1, "one or none")
    kept: ClassVar[int] = 3


class Sends(Told, Plain):
    name = "sends"
    granularity: Literal["tensor", "bucket"] = "bucket"


def test_options_are_declared_once():
    params = Told.options()
    assert params["rate"] == Option(0.5, "part that is sent", above=0.0, at_most=1.0)
    assert params["kind"].choices == ("a", "b")
    assert list(params) == ["rate", "kind", "level"]
    made = Sends(1, level=None)
    assert type(made.rate) is float
    assert made.config() == {"rate": 1.0, "kind": "a", "level": None}
    assert repr(made) == "sends(rate=1.0, kind='a', level=None)"
    assert Sends(**made.config()).config() == made.config()
    assert pickle.loads(pickle.dumps(made)).config() == made.config()
    assert made.granularity == "bucket"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rate": 0}, r"^rate=0: expected a float > 0 and <= 1 \(part that is sent\)$"),
        ({"rate": True}, r"^rate=True: expected a float"),
        ({"kind": "c"}, r"^kind='c': expected one of 'a', 'b' \(which of the two\)$"),
        ({"level": 2}, r"^level=2: expected one of 1, None"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(given, said):
    with pytest.raises(errors.HookConfigError, match=said):
        Sends(**given)


def test_a_forgotten_decorator_or_flag_is_found():
    class Forgotten(Options):
        rate: float = option(0.5, "part that is sent")

    with pytest.raises(errors.HookConfigError, match=r"Forgotten.rate is not a field: write @dataclass"):
        Forgotten.options()

    @dataclass(frozen=True)
    class Compared(Options):
        rate: float = option(0.5, "part that is sent")

    with pytest.raises(errors.HookConfigError, match=r"Compared compares by value: write @dataclass"):
        Compared.options()


def test_a_literal_whose_values_cannot_be_read_is_found():
    @dataclass(frozen=True, eq=False, repr=False)
    class Postponed(Options):
        kind: 'Literal["a", "b"]' = option("a", "which of the two")  # noqa: RUF009

    with pytest.raises(errors.HookConfigError, match="kind: postponed annotations hide the values of its Literal"):
        Postponed.options()
