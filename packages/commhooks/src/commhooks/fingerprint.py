"""Fingerprints that ranks compare when a hook is attached and when a state is loaded."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ch_core import LATER, AttachError, Fingerprint, StoreExchange, agree, agree_along, checksum
from commhooks.adapters.base import Binding

if TYPE_CHECKING:
    from commhooks.handle import CommHook

Rows = Sequence[tuple[str, str, str]]
"""Name, shape and dtype of every reduced or frozen tensor."""


def rows_of(named: Iterable[tuple[str, torch.Tensor]]) -> Rows:
    """Return tensors as rows to compare."""
    return [(name, str(tuple(tensor.shape)), str(tensor.dtype)) for name, tensor in named]


def rows_of_model(model: torch.nn.Module, binding: Binding) -> Rows:
    """Return a model's parameters as rows to compare, with a mark on frozen ones. Ranks may differ in ignored ones."""
    ignored = {f"module.{name}" for name in getattr(model, "parameters_to_ignore", ())}  # DDP's
    params = [(n, p) for n, p in model.named_parameters() if n not in ignored and id(p) not in binding.ignored]
    frozen = {name for name, p in params if not p.requires_grad}
    return [(name, shape, dtype + (", frozen" if name in frozen else "")) for name, shape, dtype in rows_of(params)]


def _lasting(handle: "CommHook", rows: Rows) -> dict[str, list[str]]:
    """Return the fields in which all ranks must agree, and which no step changes."""
    return {
        "hook": handle.identity,
        "parameter names": [name for name, _, _ in rows],
        "parameter shapes": [f"{name}: {shape}" for name, shape, _ in rows],
        "parameter dtypes": [f"{name}: {dtype}" for name, _, dtype in rows],
        "torch": [torch.__version__],
    }


def fingerprint(handle: "CommHook", rows: Rows, *, watched: bool = False) -> dict[str, list[str]]:
    """Return the fields in which all ranks of a handle's group must agree.

    Args:
        handle: attached.
        rows: tensors that it reduces, see :func:`rows_of`.
        watched: True if an optimizer or scaler decides which steps count.
    """
    binding = _binding(handle)
    engine = binding.engine
    fields: dict[str, list[str]] = {
        **_lasting(handle, rows),
        "optimizer or scaler given": [str(watched)],
        "world size": [""],
        "step": [""],
        "state": [""],
        "collectives": [""],
        "pieces": [""],
        "nodes": [""],
    }
    if engine is not None:
        fields["world size"] = [str(engine.transport.world_size)]
        fields["step"] = [str(engine.state.step)]
        steps = (engine.state.step, engine.state.step + LATER)  # now, and when every warm-up is over
        contexts = [place for step in steps for place in engine.context(step).places()]
        plans = [engine.reduction.plan(layout, ctx) for layout in binding.layouts for ctx in contexts]
        fields["collectives"] = [str(request) for plan in plans for stage in plan for request in stage]
        fields["nodes"] = [str(engine.schedule.topology.nodes)] if engine.schedule.topology is not None else [""]
        fields["pieces"] = [f"{engine.reduction.piece_bytes} {engine.messenger.tuning.cuts}"]
        held = [e for e in engine.state.entries() if engine.reduction.fields.get(e[1]) not in ("local", "owned")]
        fields["state"] = [_entry(*one) for one in held]
    return fields


def verify(
    handle: "CommHook", rows: Rows, timeout: float, *, watched: bool = False, facts: Fingerprint | None = None
) -> None:
    """Compare the ranks of a handle that was just attached.

    A binding without a process group (a manager, a simulation) is not compared.

    Raises:
        RankMismatchError: on every rank, if ranks differ.
        HookTimeoutError: a rank is missing.
    """
    group = _binding(handle).group
    if group is None or dist.get_world_size(group) == 1:
        return
    fields = {**fingerprint(handle, rows, watched=watched), **(facts or {})}
    agree(handle.expr, fields, StoreExchange(group, timeout), expression=handle.expr)


def verify_move(
    handle: "CommHook", rows: Rows, group: dist.ProcessGroup, timeout: float, facts: Fingerprint | None = None
) -> None:
    """Compare the ranks of another group before a handle moves to it. Their steps and states may still differ.

    Raises:
        RankMismatchError: on every rank, if ranks differ.
        HookTimeoutError: a rank is missing.
    """
    fields = {**_lasting(handle, rows), **(facts or {})}
    agree(f"a move of {handle.expr}", fields, StoreExchange(group, timeout), expression=handle.expr)


def verify_state(
    handle: "CommHook",
    timeout: float,
    step: int,
    entries: Mapping[tuple[str, str], torch.Tensor],
    refused: str = "",
    buckets: Sequence[Sequence[str]] = (),
) -> None:
    """Compare the ranks before they load a state into an attached handle.

    Ranks compare the step, the bits of shared entries, and refusals. Local entries may be missing on some ranks: a rank
    that has had no data yet has no residual.

    Args:
        handle: attached.
        timeout: seconds to wait for a missing rank.
        step: committed steps of the state.
        entries: tensors by `(parameter, field)`.
        refused: reason why this rank refuses its state; empty if it accepts.
        buckets: names of the parameters in each bucket of the state's last step.

    Raises:
        RankMismatchError: on every rank, if ranks differ or one refuses.
        HookTimeoutError: a rank is missing.
    """
    binding = _binding(handle)
    group = binding.group
    if group is None:
        return
    kinds = handle.reduction.fields if handle.reduction is not None else {}
    shared = [(*key, entries[key]) for key in sorted(entries) if kinds.get(key[1]) == "shared"]
    everywhere = {"refused": refused.splitlines(), "step": [str(step)]}
    here = {
        "buckets": [", ".join(names) for names in buckets],
        "state": [_entry(*one) for one in shared],
        "numbers that all ranks share": [f"{name} {field} {checksum(tensor)}" for name, field, tensor in shared],
    }
    nothing: Fingerprint = {}
    others = [(axis, nothing) for axis in binding.other_axes]
    agree_along(f"the state to load into {handle.expr}", everywhere, [*others, (group, here)], timeout)


def _binding(handle: "CommHook") -> Binding:
    if handle.binding is None:
        raise AttachError(f"{handle.expr} is not attached to a model, so its ranks cannot be compared; attach it first")
    return handle.binding


def _entry(name: str, field: str, tensor: torch.Tensor) -> str:
    return f"{name} {field} {tuple(tensor.shape)} {tensor.dtype}"
