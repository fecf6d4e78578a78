"""Names and shapes of a model's parameters, and the translation between names and positions.

A hook on the ``register_comm_hook`` path sees no names. Its parameters are called by position in model order and shape:
``"0:50x50"``. Tables of both kinds describe the same model if the shapes agree, place by place.
"""

from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch

from ch_core.errors import StateError

ParamTable = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of a model's trainable parameters, in model order."""


def translate(old: ParamTable, new: ParamTable) -> dict[str, str]:
    """Map names of ``old`` to names of ``new``: by name, or by place if one side has positions.

    Raises:
        StateError: the tables are of different models. The message names the first differences.
    """
    if not old or not new or old == new:
        return {}
    if positional(old) != positional(new):
        if [shape for _, shape in old] == [shape for _, shape in new]:
            return {a: b for (a, _), (b, _) in zip(old, new, strict=True)}
        raise StateError(
            f"this state does not fit the model. It names parameters by position and has {len(old)} of shapes "
            f"{few([s for _, s in old])}. The model has {len(new)} of shapes {few([s for _, s in new])}"
        )
    before, after = dict(old), dict(new)
    problems = [f"{n!r} is not in the model" for n in before if n not in after]
    problems += [f"{n!r} is not in the state" for n in after if n not in before]
    problems += [
        f"{n!r} has shape {before[n]} in the state, {after[n]} in the model"
        for n in before
        if n in after and before[n] != after[n]
    ]
    if problems:
        raise StateError(f"this state does not fit the model: {few(problems)}")
    return {}


def positional(table: ParamTable) -> bool:
    """Return True if the parameters are called by position and shape."""
    return all(name == position_name(i, shape) for i, (name, shape) in enumerate(table))


def position_name(position: int, shape: Sequence[int]) -> str:
    """Return the name of a parameter that is known by position alone.

    >>> position_name(0, (50, 50))
    '0:50x50'
    """
    return f"{position}:{'x'.join(map(str, shape))}"


def trained_params(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return trainable parameters in model order. Parameters of a DDP model have the names of the inner module."""
    ignored: Iterable[str] = ()
    inside, left_out = getattr(model, "module", None), getattr(model, "parameters_to_ignore", None)
    if isinstance(inside, torch.nn.Module) and left_out is not None:
        ignored, model = left_out, inside
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad and n not in ignored]


def refuse_shapes(kept: Sequence[tuple[int, ...]], given: Sequence[tuple[int, ...]]) -> NoReturn:
    """Raise :class:`StateError` for a state of parameters of other shapes."""
    raise StateError(
        f"this hook state belongs to a model with other parameters, of shapes {few(kept)}; this model has {few(given)}. "
        "Call state.bind(ddp_model) before the first step, or make a new state for this model"
    )


def few(items: Sequence[object]) -> str:
    """Return the first items as text, and the number of the others."""
    text = ", ".join(str(item) for item in items[:4])
    return text + (f" and {len(items) - 4} more" if len(items) > 4 else "")
