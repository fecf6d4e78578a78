"""From one number of ranks to another: the mean of all residuals, or none.

Only the mean over ranks of a residual enters the averaged update: ``mean_i(g_i + e_i) = mean_i(g_i) + mean_i(e_i)``.
Giving each of W' new ranks ``mean(e)`` therefore loses nothing, and needs one model's worth of disk.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from commhooks.checkpoint.format import Saved, alike, as_dict, read, shown
from commhooks.errors import StateError
from commhooks.state_owner import RankId

Policy = Literal["error", "mean", "reset"]
POLICIES = ("error", "mean", "reset")


def merge(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all ranks of one checkpoint as one state that any rank of any world size can load.

    Args:
        states: what ``handle.state_dict()`` gave on every rank, in any order. Each must have been saved at the same
            step.

    Returns:
        A state with ``rank`` None: local fields averaged over the ranks (fp64 sum; a rank without an entry counts as
        zero), shared fields as they are. Load it with ``world_change="mean"``.

    Raises:
        StateError: one is malformed, a rank is missing or there twice, or they are not of one checkpoint.

    Example:
        >>> import commhooks, torch
        >>> from commhooks import HookState
        >>> def saved(rank):
        ...     state = HookState()
        ...     _ = state.stage("w", "residual", (2,)).fill_(float(rank))
        ...     state.commit()
        ...     return state.state_dict() | {"world_size": 2, "rank": rank, "fields": {"residual": "local"}}
        >>> merge([saved(0), saved(1)])["entries"]["w"]["residual"]
        tensor([0.5000, 0.5000])
    """
    ranks = [read(state) for state in states]
    if not ranks:
        raise StateError("merge was given no states: give handle.state_dict() of every rank")
    first = ranks[0]
    for other in ranks[1:]:
        for what in ("format", "expr", "world_size", "step", "params", "fields"):
            if getattr(other, what) != getattr(first, what) and not (what == "expr" and _same_hook(other, first)):
                raise StateError(
                    f"these are not states of one checkpoint: {what} is {_value(getattr(first, what))} on rank "
                    f"{first.rank} and {_value(getattr(other, what))} on rank {other.rank}"
                )
    present = sorted(-1 if r.rank is None else r.rank for r in ranks)
    if present != list(range(first.world_size)):
        raise StateError(f"merge needs each of the {first.world_size} ranks once; given were {present[:32]}")
    entries: dict[str, dict[str, torch.Tensor]] = {}
    for name, field in sorted({key for r in ranks for key in r.entries}):
        held = {r.rank: r.entries[name, field] for r in ranks if (name, field) in r.entries}
        local = first.fields[field] == "local"
        entries.setdefault(name, {})[field] = (_mean if local else _same)(name, field, held, len(ranks))
    return as_dict(first, entries)


def _same_hook(one: Saved, other: Saved) -> bool:
    """Whether two expressions differ in local options alone, which no configuration has."""
    try:
        return one.config is not None and alike(one.config, other.config)
    except RecursionError:  # no hook is nested so deeply
        return False


def for_rank(saved: Saved, place: RankId | None, policy: str) -> dict[tuple[str, str], torch.Tensor]:
    """The entries that this rank goes on from; ``place`` is None while there is no process group to ask.

    Raises:
        StateError: the state is another rank's or another world's, and ``policy`` does not say what to do.
    """
    if policy not in POLICIES:
        raise StateError(f"world_change={shown(policy)}; legal: 'error', 'mean', 'reset'")
    local = {key for key in saved.entries if saved.fields[key[1]] == "local"}
    own = saved.rank is not None and (place is None or place == RankId(saved.rank, saved.world_size))
    own = own and not (place is None and policy == "reset")
    if own or not local or (policy == "mean" and saved.rank is None):
        return dict(saved.entries)
    if policy == "reset":
        return {key: tensor for key, tensor in saved.entries.items() if key not in local}
    if saved.rank is None:
        raise StateError(
            f"this state is merged over {saved.world_size} ranks: load it with world_change='mean' (every rank goes on "
            "from the mean residual) or 'reset'"
        )
    what = f"{RankId(saved.rank, saved.world_size)}, this is {place}"
    if policy == "mean":
        raise StateError(
            f"the state is of {what}, and the mean takes every rank's: load commhooks.checkpoint.merge([...]) of all "
            "old ranks' states"
        )
    raise StateError(
        f"the state is of {what}, and residuals belong to a rank. Load this rank's own, or choose what happens to "
        "residuals: world_change='mean' with commhooks.checkpoint.merge([...]) of all old ranks' states, or 'reset'"
    )


def _mean(name: str, field: str, held: dict[int | None, torch.Tensor], world_size: int) -> torch.Tensor:
    tensors = list(held.values())
    total = torch.zeros(tensors[0].shape, dtype=torch.float64, device=tensors[0].device)
    for tensor in tensors:
        if tensor.shape != total.shape or tensor.dtype != tensors[0].dtype:
            raise StateError(f"the ranks' states differ in shape or dtype at {shown(name)}, field {shown(field)}")
        total += tensor
    return (total / world_size).to(tensors[0].dtype)


def _same(name: str, field: str, held: dict[int | None, torch.Tensor], world_size: int) -> torch.Tensor:
    (first_rank, first), *others = held.items()
    for rank, tensor in others:
        if first.dtype != tensor.dtype or not torch.equal(first, tensor):
            raise StateError(
                f"{shown(name)}, field {shown(field)}, is the same on all ranks in a sound run; ranks {first_rank} and "
                f"{rank} saved different values"
            )
    return first.clone()


def _value(value: object) -> str:
    return shown(value) if isinstance(value, int | str) else "one thing"
