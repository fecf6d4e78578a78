"""Saving and loading: the state of an attached handle, an unattached one, or a bare :class:`HookState`."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from commhooks.bucket import BucketLayout
from commhooks.checkpoint.format import Saved, alike, as_dict, read, shown
from commhooks.checkpoint.merging import for_rank
from commhooks.checkpoint.validation import Key, fits
from commhooks.encoding import Entries
from commhooks.errors import CommHooksError, StateError
from commhooks.fingerprint import verify_state
from commhooks.param_table import ParamTable, translate
from commhooks.reduction import Reduction
from commhooks.state import HookState
from commhooks.state_owner import RankId, StateWriter

if TYPE_CHECKING:
    from commhooks.handle import CommHook

log = logging.getLogger("commhooks")


@dataclass(frozen=True, slots=True)
class CheckpointTarget:
    """Who saves or loads: everything that is known about the place, which is little before attaching."""

    state: HookState
    expr: str
    config: dict[str, Any] | None
    reduction: Reduction | None
    layout: BucketLayout | None
    place: RankId | None  # None: there is no process group yet
    sums: bool = False  # the model adds up the ranks' gradients, and never averages
    elastic: bool = False  # ranks change from step to step: a residual belongs to the replica whose file it is in

    @property
    def params(self) -> ParamTable:
        if self.layout is not None:
            return tuple((p.name, p.shape) for p in self.layout.params)
        return self.state.params

    @property
    def fields(self) -> dict[str, str]:
        return dict(self.reduction.fields) if self.reduction is not None else {}


def state_dict(hook: "CommHook | HookState") -> dict[str, Any]:
    """The committed state on this rank, copied; a finished step is committed or rolled back first.

    Args:
        hook: a handle, or the state of a hook given to ``register_comm_hook``.

    Raises:
        StateError: a foreign hook that keeps its state itself.
    """
    holder = _holder(hook)
    holder.state.settle()
    entries: dict[str, dict[str, torch.Tensor]] = {}
    fields, place = holder.fields, holder.place or RankId(0, 1)
    by_name = holder.reduction is not None and holder.reduction.granularity == "tensor"
    trained = {name for name, _ in holder.params} if by_name else set()
    for name, field, tensor in holder.state.entries():
        if trained and name not in trained:
            continue  # frozen between wrapping and attach: still in DDP's buckets, and used by nobody
        entries.setdefault(name, {})[field] = tensor.detach().clone()
        fields.setdefault(field, "local")  # nothing is known of it: keep every rank's own
    made = Saved(
        holder.expr,
        holder.config,
        place.world_size,
        place.rank,
        holder.state.certain_step,
        holder.params,
        fields,
        {},
        holder.state.buckets,
    )
    return as_dict(made, entries, place.rank)


def load_state_dict(hook: "CommHook | HookState", saved: Mapping[str, Any], *, world_change: str = "error") -> None:
    """Go on from a saved state; all or nothing.

    Args:
        hook: a handle, attached or not, or the state of a hook given to ``register_comm_hook``.
        saved: from :func:`state_dict` or :func:`merge`, usually through ``torch.load(..., weights_only=True)``.
        world_change: what happens to residuals that are not this rank's own. ``"error"``; ``"mean"``: ``saved`` is
            merged, every rank goes on from the mean; ``"reset"``: they are dropped, what all ranks share is kept.

    Raises:
        StateError: malformed, not finite, or of another hook, configuration, model, rank or world size. Nothing has
            been changed.
        RankMismatchError: attached handles of several ranks were given states that do not belong together.
    """
    load_obtained(hook, lambda: saved, world_change=world_change)


def load_obtained(
    hook: "CommHook | HookState", obtain: Callable[[], Mapping[str, Any]], *, world_change: str = "error"
) -> None:
    """:func:`load_state_dict` of what ``obtain`` returns. If that raises, no rank loads anything."""
    holder = _holder(hook)
    made: Loaded | None = None
    refusal: Exception | None = None
    try:
        made = _prepared(holder, obtain(), world_change)
    except Exception as error:  # out of memory too: the others must not load what this rank cannot
        refusal = error
    _agreed(hook, made, refusal)
    if made is not None:
        holder.state.settle()  # of the state that is replaced, as is what stays open
        if holder.state.engine is not None:
            holder.state.engine.forget_open_steps()
        holder.state.replace(
            made.entries, made.step, made.table, made.place, ordered=made.ordered, buckets=made.buckets
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """A saved state that fits, copied to where it belongs."""

    entries: dict[Key, torch.Tensor]
    step: int
    table: ParamTable
    place: RankId | None
    ordered: bool  # True if entries have the parameters' own order
    buckets: tuple[tuple[str, ...], ...]


def _prepared(holder: CheckpointTarget, saved: Mapping[str, Any], world_change: str) -> Loaded:
    """Read and check everything; nothing is changed."""
    found = read(saved)
    _same_hook(found, holder)
    translation = translate(found.params, holder.params)
    lasting = None if holder.elastic else holder.place
    share = _share(found, holder) if found.rank is None else {}
    entries = {
        (translation.get(name, name), field): tensor * share[field] if field in share else tensor
        for (name, field), tensor in for_rank(found, lasting, world_change).items()
    }
    ordered = found.format > 1
    if not ordered and holder.reduction is not None and holder.layout is not None:
        encodings = holder.reduction.encodings(holder.layout, max(found.step - 1, 0))
        entries, ordered = dict(Entries(entries, encodings).decoded()), True
    table = holder.params or found.params
    world = lasting.world_size if lasting is not None else found.world_size
    fits(entries, table, found.step, holder.reduction, holder.layout, world)
    device = holder.layout.device if holder.layout is not None else None
    copied = {key: torch.empty_like(t, device=device).copy_(t) for key, t in entries.items()}
    place = holder.place
    if place is None and found.rank is not None and world_change != "reset":
        place = RankId(found.rank, found.world_size, loaded=True)  # verified when the hook is attached
    buckets = tuple(tuple(translation.get(name, name) for name in names) for names in found.buckets)
    return Loaded(copied, found.step, table, place, ordered, buckets)


def _share(found: Saved, holder: CheckpointTarget) -> dict[str, float]:
    """What a mean over other ranks is multiplied by, so that the sum over these ranks is that over those.

    Where ranks are averaged, the mean is what stays, and a rank's own residual is the mean. Where they are summed, each of
    W' ranks has its W'-th part of the sum of W.
    """
    if not holder.sums or holder.place is None or holder.reduction is None:
        return {}
    ratio = found.world_size / holder.place.world_size
    local = {field for field, locality in holder.fields.items() if locality == "local"}
    return {field: ratio**power for field, power in holder.reduction.scaled_fields.items() if field in local}


def _agreed(hook: "CommHook | HookState", made: Loaded | None, refusal: Exception | None) -> None:
    """Load on all ranks or on none: of an attached handle only, whose ranks all make this call."""
    if not isinstance(hook, HookState) and hook.attached and hook.agreement_timeout is not None:
        step, entries, buckets = (made.step, made.entries, made.buckets) if made is not None else (0, {}, ())
        try:
            why = "" if refusal is None else str(refusal) or repr(refusal)
            verify_state(hook, hook.agreement_timeout, step, entries, why, buckets)
        except CommHooksError as error:
            if refusal is None:
                raise
            raise refusal from error
    if refusal is not None:
        raise refusal


def _holder(hook: "CommHook | HookState") -> CheckpointTarget:
    if isinstance(hook, HookState):
        return _bare(hook)
    state = hook.state
    if not isinstance(state, HookState):
        raise StateError(f"{hook.expr} keeps its state itself ({type(state).__name__}); save it by its own means")
    engine = hook.binding.engine if hook.binding is not None else None
    place, elastic = _where(engine) if engine is not None else (_place(hook.process_group), False)
    if hook.alone:
        place = None  # any rank's state may be looked at by one process, which leaves it as it is
    layout = hook.binding.layout if hook.binding is not None else None
    configured = hook.built if isinstance(hook.built, Reduction) else None
    sums = hook.binding is not None and hook.binding.sums
    return CheckpointTarget(state, hook.expr, hook.full, configured, layout, place, sums, elastic)


def _bare(state: HookState) -> CheckpointTarget:
    engine = state.engine
    if engine is None:
        return CheckpointTarget(state, "", None, None, None, _place(getattr(state, "process_group", None)))
    place, elastic = _where(engine)
    return CheckpointTarget(state, repr(engine.reduction), None, engine.reduction, None, place, elastic=elastic)


def _where(engine: StateWriter) -> tuple[RankId, bool]:
    """An engine's place, and whether it changes from step to step."""
    transport = engine.transport
    return RankId(transport.rank, transport.world_size), transport.elastic


def _place(group: dist.ProcessGroup | None) -> RankId | None:
    if dist.is_available() and dist.is_initialized():
        return RankId(dist.get_rank(group), dist.get_world_size(group))
    return None


def _same_hook(found: Saved, holder: CheckpointTarget) -> None:
    if found.config is not None and holder.config is not None:
        if not alike(found.config, holder.config):
            options = ""
            if found.expr == holder.expr:
                options = f" with other options, or of another provider{_other_options(found.config, holder.config)}"
            raise StateError(f"the state was saved by {shown(found.expr)}{options}; this hook is {shown(holder.expr)}")
        if not alike(found.config, holder.config, ignored=()):
            log.warning("the state of %s was saved by another version of its package", holder.expr)
    if holder.reduction is not None and set(found.fields) - set(holder.fields):
        raise StateError(
            f"the state of {shown(found.expr)} has the fields {shown(sorted(found.fields))}; {holder.expr} keeps "
            f"{shown(sorted(holder.fields))}"
        )
    for field, locality in holder.fields.items():
        if found.fields.get(field, locality) != locality:
            saved = found.fields[field]
            raise StateError(f"field {shown(field)} was saved as {saved}; {holder.expr} keeps it {locality}")


def _other_options(saved: dict[str, Any], own: dict[str, Any]) -> str:
    """The outermost hook's options that differ, in words."""
    before, now = saved.get("config"), own.get("config")
    if not isinstance(before, dict) or not isinstance(now, dict):
        return ""
    missing = object()
    told = [
        f"{name}={shown(before[name]) if name in before else 'unknown'} there, {shown(value)} here"
        for name, value in now.items()
        if not alike(before.get(name, missing), value)
    ]
    return f" ({'; '.join(told)})" if told else ""
