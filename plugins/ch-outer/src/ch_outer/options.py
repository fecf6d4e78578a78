"""Options of the registered outer optimizers. This module imports no torch."""

from dataclasses import replace

from commhooks import Option

NAMES: dict[str, dict[str, float]] = {
    "diloco": {"every": 500, "rate": 0.7, "momentum": 0.9},
    "streaming": {"every": 100, "fragments": 4, "overlap": 5, "mix": 0.5, "rate": 0.7, "momentum": 0.9},
    "sparse_loco": {"every": 30, "rate": 1.0, "momentum": 0.0},
    "muloco": {"every": 30, "rate": 0.7, "momentum": 0.6},
    "local_sgd": {"every": 8, "rate": 1.0, "momentum": 0.0},
}
"""Values of the papers, by registered name."""

_COMMON = {
    "every": Option(1, "inner steps between two exchanges of one parameter", at_least=1),
    "exchange": Option("allreduce", "averages the pseudo-gradients: any reduction", hook=True),
    "rate": Option(1.0, "learning rate of the outer optimizer", above=0.0),
    "momentum": Option(0.0, "Nesterov momentum of the outer optimizer", at_least=0.0, at_most=1.0),
    "fragments": Option(1, "parts of the parameters that take turns", at_least=1),
    "overlap": Option(0, "inner steps that an exchange has to arrive", at_least=0),
    "mix": Option(
        None,
        "part of a rank's own parameters that stays on arrival, 0 to 1, or 'carry'; None is the paper's",
        kind="a float, 'carry'",
    ),
    "buffers": Option("average", "floating-point buffers such as BatchNorm's", choices=("average", "local")),
    "timeout": Option(
        None, "seconds that one collective may take; None takes those of the process group", kind="a float"
    ),
    "steps": Option(None, "inner steps of the whole run; after the last one all ranks take one model", kind="an int"),
}
_SPARSE = {
    "density": Option(0.02, "part of the entries that is sent", above=0.0, at_most=1.0),
    "decay": Option(0.95, "factor of the residual per round", at_least=0.0, at_most=1.0),
}


def options_of(name: str) -> dict[str, Option]:
    """Return the options of a registered outer optimizer, with its paper's values as defaults.

    >>> options_of("streaming")["every"].default, "exchange" in options_of("sparse_loco")
    (100, False)
    """
    found = dict(_COMMON)
    if name == "sparse_loco":
        del found["exchange"]
        found |= _SPARSE
    for option, value in NAMES[name].items():
        if found[option].default is not None:  # an option of default None accepts more than one type
            found[option] = replace(found[option], default=value)
    return found
