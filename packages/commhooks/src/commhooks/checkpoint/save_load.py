"""Saves and loads the state of a handle, attached or not, or of a bare :class:`HookState`.

A load checks everything before it changes anything. The generator of a reduction runs on meta tensors, and the check looks at
the tensors that it writes. No hook has to declare shapes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ch_core import (
    OWN_ORDER,
    Bucket,
    BucketLayout,
    BucketNames,
    CommHooksError,
    HookState,
    Key,
    ParamTable,
    RankId,
    Reduction,
    StateError,
    StateWriter,
    StepContext,
    log,
    translate,
)
from commhooks.checkpoint.format import Saved, alike, as_dict, read, shown
from commhooks.checkpoint.world_change import for_rank
from commhooks.fingerprint import verify_state

if TYPE_CHECKING:
    from commhooks.handle import CommHook


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LEGAL = (*_DTYPES, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
Shape = tuple[tuple[int, ...], torch.dtype]  # of an entry
_ROOM = 4  # an entry of unknown shape may have up to this many times its parameter's elements


@dataclass(frozen=True, slots=True)
class CheckpointTarget:
    """The state to save or load, with all known facts about its hook, model and rank. Before ``attach`` few are known.

    Attributes:
        place: ``None`` before there is a process group.
        sums: True if the model adds the ranks' gradients, and never averages.
        elastic: True if ranks change from step to step. A residual then belongs to the replica whose file holds it.
        nodes: ranks of each node, if the hook has two levels and knows them.
        link: between ranks that are far apart; ``None`` if it is not known yet.
    """

    state: HookState
    expr: str
    config: dict[str, Any] | None
    reduction: Reduction | None
    layout: BucketLayout | None
    place: RankId | None
    sums: bool = False
    elastic: bool = False
    nodes: tuple[tuple[int, ...], ...] = ()
    link: str | None = None

    @property
    def params(self) -> ParamTable:
        if self.layout is not None:
            return tuple((p.name, p.shape) for p in self.layout.params)
        return self.state.identity.params

    @property
    def fields(self) -> dict[str, str]:
        return dict(self.reduction.fields) if self.reduction is not None else {}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A saved state that fits, copied to the device of its model."""

    entries: dict[Key, torch.Tensor]
    step: int
    table: ParamTable
    place: RankId | None
    buckets: BucketNames
    reference: float | None = None


# -- saving


def state_dict(hook: "CommHook | HookState") -> dict[str, Any]:
    """Return a copy of the committed state on this rank. A finished step is committed or rolled back first.

    Args:
        hook: a handle, or the state of a hook on the ``register_comm_hook`` path.

    Raises:
        StateError: a foreign hook keeps its state itself.
    """
    target = _target(hook)
    state = target.state
    state.resolve_step()
    entries: dict[str, dict[str, torch.Tensor]] = {}
    fields, place = target.fields, target.place or RankId(0, 1)
    for name, field, tensor in state.entries():
        if target.reduction is not None and not target.reduction.fields:
            continue  # of an earlier hook: this one would refuse to load it
        entries.setdefault(name, {})[field] = tensor.detach().clone()
        fields.setdefault(field, "local")  # an unknown field: keep every rank's own
    step, ranks, rank = state.versions.certain.step, place.world_size, place.rank
    made = Saved(
        target.expr,
        target.config,
        ranks,
        rank,
        step,
        target.params,
        fields,
        {},
        state.identity.buckets,
        nodes=target.nodes,
        link=target.link or "",
        reference=state.versions.reference,
    )
    return as_dict(made, entries, rank)


# -- loading


def load_state_dict(hook: "CommHook | HookState", saved: Mapping[str, Any], *, world_change: str = "error") -> None:
    """Load a saved state, all or nothing.

    Args:
        hook: a handle, attached or not, or the state of a hook on the ``register_comm_hook`` path.
        saved: from :func:`state_dict` or :func:`merge`, usually through ``torch.load(..., weights_only=True)``.
        world_change: treatment of residuals of other ranks. ``"error"`` refuses them. ``"mean"`` gives every rank the mean
            of a merged state. ``"reset"`` drops them, and keeps the shared fields.

    Raises:
        StateError: malformed, not finite, or of another hook, configuration, model, rank or world size. Nothing was
            changed.
        RankMismatchError: ranks of an attached handle load states that do not belong together.
    """
    load_obtained(hook, lambda: saved, world_change=world_change)


def load_obtained(
    hook: "CommHook | HookState", obtain: Callable[[], Mapping[str, Any]], *, world_change: str = "error"
) -> None:
    """Load the result of ``obtain()``. If that raises on one rank of an attached handle, no rank loads anything."""
    target = _target(hook)
    made: Loaded | None = None
    refusal: Exception | None = None
    try:
        made = _prepared(target, obtain(), world_change)
    except Exception as error:  # out of memory, too: the other ranks must not load
        refusal = error
    _agreed(hook, made, refusal)
    if made is not None:
        state = target.state
        state.resolve_step()  # open steps belong to the old state
        if state.engine is not None:
            state.engine.forget_unresolved()
        state.replace(made.entries, made.step, made.table, made.place, buckets=made.buckets, reference=made.reference)


def _prepared(target: CheckpointTarget, saved: Mapping[str, Any], world_change: str) -> Loaded:
    """Read and check a saved state, and copy it. Nothing is changed."""
    found = read(saved)
    _refuse_another_hook(found, target)
    translation = translate(found.params, target.params)
    lasting = None if target.elastic else target.place
    share = _share(found, target) if found.rank is None else {}
    entries = {
        (translation.get(name, name), field): tensor * share[field] if field in share else tensor
        for (name, field), tensor in for_rank(found, lasting, world_change).items()
        if found.fields[field] != "owned" or found.nodes == target.nodes  # otherwise only some ranks would have it
    }
    table = target.params or found.params
    world = lasting.world_size if lasting is not None else found.world_size
    fits(entries, table, found.step, target.reduction, target.layout, world)
    device = target.layout.device if target.layout is not None else None
    copied = {key: torch.empty_like(t, device=device).copy_(t) for key, t in entries.items()}
    place = target.place
    if place is None and found.rank is not None and world_change != "reset":
        place = RankId(found.rank, found.world_size, loaded=True)  # attach() verifies it
    buckets = tuple(tuple(translation.get(name, name) for name in names) for names in found.buckets)
    return Loaded(copied, found.step, table, place, buckets, found.reference)


def _share(found: Saved, target: CheckpointTarget) -> dict[str, float]:
    """Return the factor of each field of a merged state, for a model that sums gradients over its ranks.

    Each of W' ranks then owes the W'-th part of the sum over W ranks, which is W / W' times their mean.
    """
    if not target.sums or target.place is None or target.reduction is None:
        return {}
    ratio = found.world_size / target.place.world_size
    local = {field for field, locality in target.fields.items() if locality == "local"}
    return {field: ratio**power for field, power in target.reduction.scaled_fields.items() if field in local}


def _agreed(hook: "CommHook | HookState", made: Loaded | None, refusal: Exception | None) -> None:
    """Let all ranks of an attached handle load, or none. All of them make this call."""
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


def _refuse_another_hook(found: Saved, target: CheckpointTarget) -> None:
    if found.config is not None and target.config is not None:
        if not alike(found.config, target.config):
            options = ""
            if found.expr == target.expr:
                options = f" with other options, or of another provider{_other_options(found.config, target.config)}"
            raise StateError(f"the state was saved by {shown(found.expr)}{options}; this hook is {shown(target.expr)}")
        if not alike(found.config, target.config, ignored=()):
            log.warning("the state of %s was saved by another version of its package", target.expr)
    if target.link is not None and found.link != target.link:
        before, now = (f"link={one!r}" if one else "no link=" for one in (found.link, target.link))
        log.warning(
            "the state of %s was saved with %s, and this run has %s, so it continues with other bits",
            target.expr,
            before,
            now,
        )
    if target.reduction is not None and set(found.fields) - set(target.fields):
        raise StateError(
            f"the state of {shown(found.expr)} has the fields {shown(sorted(found.fields))}; {target.expr} keeps "
            f"{shown(sorted(target.fields))}"
        )
    for field, locality in target.fields.items():
        if found.fields.get(field, locality) != locality and {found.fields[field], locality} != {"shared", "owned"}:
            saved = found.fields[field]
            raise StateError(f"field {shown(field)} was saved as {saved}; {target.expr} keeps it {locality}")


def _other_options(saved: dict[str, Any], own: dict[str, Any]) -> str:
    """Describe the outermost hook's options that differ."""
    before, now = saved.get("config"), own.get("config")
    if not isinstance(before, dict) or not isinstance(now, dict):
        return ""
    missing = object()
    differing = [
        f"{name}={shown(before[name]) if name in before else 'unknown'} there, {shown(value)} here"
        for name, value in now.items()
        if not alike(before.get(name, missing), value)
    ]
    return f" ({'; '.join(differing)})" if differing else ""


# -- the place of a state


def _target(hook: "CommHook | HookState") -> CheckpointTarget:
    if isinstance(hook, HookState):
        return _bare(hook)
    state = hook.state
    if not isinstance(state, HookState):
        raise StateError(f"{hook.expr} keeps its state itself ({type(state).__name__}). Save that object in the script")
    engine = hook.binding.engine if hook.binding is not None else None
    place, elastic = _where(engine) if engine is not None else (_place(hook.process_group), False)
    if hook.alone:
        place = None  # one process may look at any rank's state, and leaves it unchanged
    layout = hook.binding.layout if hook.binding is not None else None
    configured = hook.built if isinstance(hook.built, Reduction) else None
    sums = hook.binding is not None and hook.binding.sums
    nodes, link = _nodes(engine), _link(engine)
    return CheckpointTarget(state, hook.expr, hook.full, configured, layout, place, sums, elastic, nodes, link)


def _bare(state: HookState) -> CheckpointTarget:
    engine = state.engine
    if engine is None:
        return CheckpointTarget(state, "", None, None, None, _place(getattr(state, "process_group", None)))
    place, elastic = _where(engine)
    made = engine.reduction
    nodes, link = _nodes(engine), _link(engine)
    return CheckpointTarget(state, repr(made), None, made, None, place, elastic=elastic, nodes=nodes, link=link)


def _where(engine: StateWriter) -> tuple[RankId, bool]:
    """Return an engine's place, and True if it changes from step to step."""
    transport = engine.transport
    return RankId(transport.rank, transport.world_size), transport.elastic


def _nodes(engine: StateWriter | None) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node of an engine with two levels."""
    topology = getattr(engine.transport, "topology", None) if engine is not None and engine.reduction.levels else None
    return topology.nodes if topology is not None else ()


def _link(engine: StateWriter | None) -> str | None:
    if engine is None:
        return None
    return str(engine.transport.link) if engine.transport.link is not None else ""


def _place(group: dist.ProcessGroup | None) -> RankId | None:
    if dist.is_available() and dist.is_initialized():
        return RankId(dist.get_rank(group), dist.get_world_size(group))
    return None


# -- entries that fit a model and a reduction


def fits(
    entries: Mapping[Key, torch.Tensor],
    params: ParamTable,
    step: int,
    reduction: Reduction | None,
    layout: BucketLayout | None,
    world_size: int,
) -> None:
    """Check entries, in the parameters' own order, against the model; check their numbers.

    Raises:
        StateError: an entry of an unknown parameter or field, of another shape or dtype, too large, or not finite.
    """
    sizes = {name: torch.Size(shape).numel() for name, shape in params}
    by_name = reduction is None or reduction.granularity == "tensor"
    largest = _ROOM * max([256, *sizes.values()]) if by_name else _ROOM * (sum(sizes.values()) + 256)
    for (name, field), tensor in entries.items():
        where = f"the state of {shown(name)}, field {shown(field)},"
        if tensor.dtype not in _LEGAL:
            raise StateError(f"{where} is of {tensor.dtype}; a hook keeps floating or integer numbers")
        if sizes and by_name and name not in sizes:
            raise StateError(f"{where} is of no parameter of this model")
        bound = _ROOM * max(256, sizes[name]) if by_name and name in sizes else largest
        if sizes and tensor.numel() > bound:
            raise StateError(f"{where} has {tensor.numel()} numbers; at most {bound} are plausible here")
    if reduction is not None and layout is not None and by_name:
        _as_expected(entries, reduction, layout, step, world_size)
    for (name, field), tensor in entries.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise StateError(f"the state of {shown(name)}, field {shown(field)}, holds NaN or infinite numbers")


def fit_to(state: HookState, reduction: Reduction, layout: BucketLayout, world_size: int) -> None:
    """Check a state that was loaded before there was a model, or that another hook kept.

    Shared fields of another hook start again if this hook keeps them in another shape, such as PowerSGD's ``q`` after a
    change of its rank. All ranks have the same ones.

    Raises:
        StateError: see :func:`fits`.
    """
    entries = {(name, field): tensor for name, field, tensor in state.entries()}
    if state.handed_over and reduction.granularity == "tensor":
        unfit = _unexpected(entries, reduction, layout, state.step, world_size)
        _cast_to_legal(state, entries, unfit)
        gone = [key for key in unfit if key[1] in reduction.shared_fields]
        state.versions.drop(gone)
        for name, field in gone:
            log.info("%s of %s starts again, because the previous hook kept it in another shape", field, name)
            del entries[name, field]
    fits(entries, state.identity.params, state.step, reduction, layout, world_size)


def _cast_to_legal(state: HookState, entries: dict[Key, torch.Tensor], unfit: dict[Key, set[Shape]]) -> None:
    """Cast entries of another hook that have a legal shape, but another floating dtype than this hook keeps."""
    for key, legal in list(unfit.items()):
        tensor = entries[key]
        dtypes = [dtype for shape, dtype in legal if shape == tuple(tensor.shape) and dtype.is_floating_point]
        if not (dtypes and tensor.is_floating_point()):
            continue
        dtype = max(dtypes, key=lambda dtype: dtype.itemsize)
        entries[key] = tensor.to(dtype)
        entry = state.versions.committed[key]
        entry.convert(OWN_ORDER)
        entry.tensor = entry.tensor.to(dtype)
        del unfit[key]


def _as_expected(
    entries: Mapping[Key, torch.Tensor], reduction: Reduction, layout: BucketLayout, step: int, world_size: int
) -> None:
    for (name, field), legal in _unexpected(entries, reduction, layout, step, world_size).items():
        tensor = entries[name, field]
        wanted = " or ".join(sorted(f"{list(shape)} of {dtype}" for shape, dtype in legal))
        raise StateError(
            f"the state of {shown(name)}, field {shown(field)}, is {list(tensor.shape)} of {tensor.dtype}; "
            f"{reduction.name} keeps {wanted} here"
        )


def _unexpected(
    entries: Mapping[Key, torch.Tensor], reduction: Reduction, layout: BucketLayout, step: int, world_size: int
) -> dict[Key, set[Shape]]:
    """Return the entries that no condition explains, with the shapes and dtypes that are legal for each."""
    pending = dict(entries)
    known: dict[Key, set[Shape]] = {}
    for at, dtype in _conditions(layout.dtype, step):
        for key, like in expected(reduction, layout, at, dtype, world_size).items():
            known.setdefault(key, set()).add((tuple(like.shape), like.dtype))
            if key in pending and (tuple(pending[key].shape), pending[key].dtype) in known[key]:
                del pending[key]
        if not pending:
            break
    return {key: known[key] for key in pending if key in known}


def _conditions(dtype: torch.dtype, step: int) -> Iterator[tuple[int, torch.dtype]]:
    """Yield steps and gradient dtypes under which an entry may have been kept, the likeliest first.

    A method that alternates keeps the entries of either step, and a model may have parameters of several dtypes.
    """
    for kind in dict.fromkeys((dtype, *_DTYPES)):
        for at in (max(step - 1, 0), step):
            yield at, kind


def expected(
    reduction: Reduction, layout: BucketLayout, step: int, dtype: torch.dtype, world_size: int
) -> dict[Key, torch.Tensor]:
    """Return the entries that one step writes, as meta tensors; empty if the generator cannot run without numbers."""
    meta = BucketLayout(layout.params, layout.numel, dtype, "meta")
    bucket = Bucket(meta, torch.empty(layout.numel, dtype=dtype, device="meta"))
    state = HookState()
    encodings = reduction.encodings(meta, step)
    stages = reduction.start(bucket, StepContext(0, world_size, step, draft=state.draft, encodings=encodings))
    try:
        for _ in stages:
            pass
    except Exception:  # a reduction that overrides plan(), whose entries only their size bounds
        return {}
    finally:
        stages.close()
    state.versions.commit()
    return {(name, field): tensor for name, field, tensor in state.entries()}
