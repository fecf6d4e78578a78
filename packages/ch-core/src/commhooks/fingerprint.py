"""What all ranks compare when a hook is attached and when a state is loaded."""

import ctypes
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from commhooks.agreement import Fingerprint, StoreExchange, agree, agree_along
from commhooks.reduction import StepContext

Rows = Sequence[tuple[str, str, str]]
"""Name, shape and dtype of every tensor that is reduced, or frozen beside them."""


def rows_of(named: Iterable[tuple[str, torch.Tensor]]) -> Rows:
    """Tensors as rows to compare."""
    return [(name, str(tuple(tensor.shape)), str(tensor.dtype)) for name, tensor in named]


def rows_of_model(model: torch.nn.Module) -> Rows:
    """A model's parameters as rows to compare: which are frozen, too."""
    ignored = {f"module.{name}" for name in getattr(model, "parameters_to_ignore", ())}  # DDP's: a rank's own
    params = [(name, p) for name, p in model.named_parameters() if name not in ignored]
    frozen = {name for name, p in params if not p.requires_grad}
    return [(name, shape, dtype + (", frozen" if name in frozen else "")) for name, shape, dtype in rows_of(params)]


def fingerprint(handle: Any, rows: Rows, *, watched: bool = False) -> dict[str, list[str]]:
    """What all ranks of a handle's group have to agree on, as fields of lines.

    Args:
        handle: an attached :class:`~commhooks.CommHook`.
        rows: what it reduces, see :func:`rows_of`.
        watched: whether an optimizer or scaler decides which steps count.
    """
    engine = handle.binding.engine
    fields: dict[str, list[str]] = {
        "hook": handle.identity,
        "parameter names": [name for name, _, _ in rows],
        "parameter shapes": [f"{name}: {shape}" for name, shape, _ in rows],
        "parameter dtypes": [f"{name}: {dtype}" for name, _, dtype in rows],
        "torch": [torch.__version__],
        "optimizer or scaler given": [str(watched)],
        "rollback": [""],
        "world size": [""],
        "step": [""],
        "state": [""],
        "collectives": [""],
        "pieces": [""],
    }
    if engine is not None:
        fields["world size"] = [str(engine.transport.world_size)]
        fields["step"] = [str(engine.state.step)]
        fields["rollback"] = [str(not engine.state.in_place)]
        steps = (engine.state.step, engine.state.step + 10**6)  # now, and when every warm-up is over
        contexts = [StepContext(engine.transport.rank, engine.transport.world_size, step) for step in steps]
        plans = [engine.reduction.plan(handle.binding.layout, ctx) for ctx in contexts]
        fields["collectives"] = [str(request) for plan in plans for stage in plan for request in stage]
        fields["pieces"] = [f"{engine.reduction.piece_bytes} {engine.sender.tuning.cuts}"]
        held = [e for e in engine.state.entries() if engine.reduction.fields.get(e[1]) != "local"]
        fields["state"] = [_entry(*one) for one in held]
    return fields


def levels(node: Mapping[str, Any], path: str = "") -> list[str]:
    """A configuration as sorted lines, one per level and option."""
    lines = []
    for key, value in sorted(node.items()):
        here = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            lines += levels(value, here)
        elif isinstance(value, list | tuple) and any(isinstance(each, Mapping | list | tuple) for each in value):
            for number, each in enumerate(value):
                lines += levels(each if isinstance(each, Mapping) else {str(number): each}, f"{here}[{number}]")
        else:
            lines.append(f"{here} = {value!r}")
    return lines


def verify(handle: Any, rows: Rows, timeout: float, *, watched: bool = False, facts: Fingerprint | None = None) -> None:
    """Agree on a handle that has just been attached.

    A binding without a process group of its own (a manager, a simulation) is not verified.

    Raises:
        RankMismatchError: on every rank.
        HookTimeoutError: some rank did not come.
    """
    group = handle.binding.group
    if group is None or dist.get_world_size(group) == 1:
        return
    fields = {**fingerprint(handle, rows, watched=watched), **(facts or {})}
    agree(handle.expr, fields, StoreExchange(group, timeout), says=handle.expr)


def verify_state(
    handle: Any,
    timeout: float,
    step: int,
    entries: Mapping[tuple[str, str], torch.Tensor],
    refused: str = "",
    buckets: Sequence[Sequence[str]] = (),
) -> None:
    """Agree on a state that is about to be loaded into an attached handle; nothing has been changed yet.

    Compared are the step, what all ranks share, its numbers included, and whether a rank refuses what it was given.
    What is a rank's own may be missing on some: one that has had no data yet has no residual.

    Args:
        handle: the attached handle.
        timeout: seconds to wait for a rank that has not come.
        step: committed steps of the state.
        entries: ``(parameter, field)`` -> tensor.
        refused: why this rank refuses its state; empty if it does not.
        buckets: names of the parameters in each bucket of the state's last step.

    Raises:
        RankMismatchError: on every rank.
        HookTimeoutError: some rank did not come.
    """
    group = handle.binding.group
    if group is None:
        return
    kinds = handle.reduction.fields if handle.reduction is not None else {}
    shared = [(*key, entries[key]) for key in sorted(entries) if kinds.get(key[1]) == "shared"]
    everywhere = {"refused": refused.splitlines(), "step": [str(step)]}
    here = {
        "buckets": [", ".join(names) for names in buckets],
        "state": [_entry(*one) for one in shared],
        "numbers that all ranks share": [f"{name} {field} {digest(tensor)}" for name, field, tensor in shared],
    }
    nothing: Fingerprint = {}
    others = [(axis, nothing) for axis in handle.binding.other_axes]
    agree_along(f"the state to load into {handle.expr}", everywhere, [*others, (group, here)], timeout)


def _entry(name: str, field: str, tensor: torch.Tensor) -> str:
    return f"{name} {field} {tuple(tensor.shape)} {tensor.dtype}"


def digest(tensor: torch.Tensor) -> str:
    """A digest of the bits of a tensor: equal bits, equal lines.

    >>> digest(torch.zeros(2)) == digest(torch.zeros(2)), digest(torch.zeros(2)) == digest(-torch.zeros(2))
    (True, False)
    """
    if hasattr(tensor, "__tensor_flatten__"):  # a wrapper has no memory of its own, the tensors inside have
        inside = " ".join(digest(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
        return hashlib.blake2b(inside.encode(), digest_size=8).hexdigest()
    # Read from memory: ``.numpy()`` needs NumPy, which torch does not bring.
    flat = tensor.detach().cpu().contiguous()
    bits = (
        (ctypes.c_ubyte * (flat.numel() * flat.element_size())).from_address(flat.data_ptr()) if flat.numel() else b""
    )
    return hashlib.blake2b(bits, digest_size=8).hexdigest()
