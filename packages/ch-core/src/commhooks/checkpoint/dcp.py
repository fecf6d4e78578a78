"""State of hooks through ``torch.distributed.checkpoint``, with every rank's residual.

Given plain tensors, distributed checkpointing takes equal keys for replicas and keeps one rank's: all ranks would go on
from rank 0's residual. So each local field is saved as a table of shape ``(world size, ...)`` sharded by rank, and each
rank writes its own row; on another number of ranks the whole table is read and averaged. Shared fields are saved once.
What is not a tensor is saved as the bytes of a JSON text: nothing is pickled by us.

Distributed checkpointing itself unpickles its ``.metadata`` file: load only what you trust.
"""

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from commhooks.checkpoint.reading import Saved, as_dict, read
from commhooks.checkpoint.using import load_obtained, state_dict
from commhooks.errors import StateError
from commhooks.state import HookState

if TYPE_CHECKING:
    from commhooks.handle import CommHook

Kind = tuple[tuple[int, ...], torch.dtype]
_LARGEST = 1 << 26  # bytes of the JSON text


def sharded(
    hook: "CommHook | HookState", *, process_group: dist.ProcessGroup | None = None, key: str = "commhook"
) -> dict[str, torch.Tensor]:
    """This rank's part of the state, saved beside the model: ``dcp.save({**model_state, **sharded(handle)}, ...)``.

    A collective call: every rank of the group makes it, after the same step.

    Args:
        hook: an attached handle, or the state of a hook given to ``register_comm_hook``.
        process_group: the hook's group, which must be the one that saves; the default group if not given.
        key: prefix of the keys in the checkpoint.
    """
    saved = read(state_dict(hook))
    shapes = _agreed(saved, process_group)
    tensors: dict[str, torch.Tensor] = {}
    for (name, field), (shape, dtype) in shapes.items():
        entry = saved.entries.get((name, field))
        value = entry if entry is not None else torch.zeros(shape, dtype=dtype)
        where = f"{key}.entries.{field}.{name}"
        tensors[where] = _row(value, process_group) if saved.fields[field] == "local" else value
    plain = {k: v for k, v in as_dict(saved, {}).items() if k not in ("entries", "rank")}
    plain["rows"] = [[name, field, list(shape), str(dtype)] for (name, field), (shape, dtype) in shapes.items()]
    text = json.dumps(plain).encode()
    tensors[f"{key}.about"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tensors


def save(hook: "CommHook | HookState", checkpoint_id: Any, *, key: str = "commhook", **options: Any) -> None:
    """Save the hook's state alone: ``dcp.save(sharded(hook), checkpoint_id=...)``; ``options`` are ``dcp.save``'s."""
    tensors = sharded(hook, process_group=options.get("process_group"), key=key)
    write_tensors(tensors, checkpoint_id=checkpoint_id, **options)


def load(
    hook: "CommHook | HookState",
    checkpoint_id: Any,
    *,
    key: str = "commhook",
    world_change: str = "error",
    storage_reader: Any = None,
) -> None:
    """Go on from what :func:`save` wrote, or :func:`sharded` among other things; all or nothing.

    Each rank reads for itself. On the old number of ranks it is given its own residuals. On another, with
    ``world_change="mean"``, it reads all ranks', averages them, and goes on from the mean.

    Args:
        hook: an attached handle, or the state of a hook given to ``register_comm_hook``.
        checkpoint_id: folder of the checkpoint.
        key: prefix that was given when saving.
        world_change: see :func:`commhooks.checkpoint.load_state_dict`.
        storage_reader: for another storage than a folder.

    Raises:
        StateError: there is no such state in the checkpoint, or it does not fit. If that is so on one rank of an
            attached hook, no rank loads anything.
    """
    reader = storage_reader if storage_reader is not None else FileSystemReader(checkpoint_id)
    load_obtained(hook, lambda: _saved(hook, reader, key), world_change=world_change)


def _saved(hook: "CommHook | HookState", reader: Any, key: str) -> dict[str, Any]:
    """What :func:`.load_state_dict` takes: this rank's row of each table, or the mean of all."""
    metadata = reader.read_metadata()
    about = _about(reader, metadata, key)
    mine = state_dict(hook)
    own = about["world_size"] == mine["world_size"]
    rank = mine["rank"] if own else None
    wanted: dict[str, torch.Tensor] = {}
    for name, field, _, _ in about["rows"]:
        where = f"{key}.entries.{field}.{name}"
        wanted[where] = torch.empty(_stored(metadata, where).size, dtype=_stored(metadata, where).properties.dtype)
    _fill(wanted, reader)
    entries: dict[str, dict[str, torch.Tensor]] = {}
    for name, field, shape, _ in about["rows"]:
        tensor = wanted[f"{key}.entries.{field}.{name}"]
        if about["fields"].get(field) == "local":
            if list(tensor.shape) != [about["world_size"], *shape]:
                raise StateError(f"the checkpoint's table of {name!r}, field {field!r}, is {list(tensor.shape)}")
            tensor = tensor[rank] if rank is not None else tensor.double().mean(0).to(tensor.dtype)
        entries.setdefault(name, {})[field] = tensor.clone()
    return {**{k: v for k, v in about.items() if k != "rows"}, "rank": rank, "entries": entries}


def _about(reader: Any, metadata: Metadata, key: str) -> dict[str, Any]:
    """What was saved beside the tensors, checked as far as it is used here; :func:`.load_state_dict` checks the rest."""
    size = _stored(metadata, f"{key}.about").size
    if len(size) != 1 or size.numel() > _LARGEST:
        raise StateError(f"{key}.about in this checkpoint is not what commhooks saves: its size is {list(size)}")
    text = torch.empty(size, dtype=torch.uint8)
    _fill({f"{key}.about": text}, reader)
    try:
        about = json.loads(bytes(text.tolist()))
        rows = [(str(n), str(field), [int(size) for size in shape], str(t)) for n, field, shape, t in about["rows"]]
        return {**about, "rows": rows, "world_size": int(about["world_size"]), "fields": dict(about["fields"])}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StateError(f"{key}.about in this checkpoint is damaged: {type(error).__name__}") from error


def _fill(tensors: dict[str, torch.Tensor], reader: Any) -> None:
    try:
        read_tensors(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:  # no Exception: what expects any error to be one would let it pass
        raise StateError(f"the checkpoint cannot be read: {error}") from error


def _stored(metadata: Metadata, where: str) -> TensorStorageMetadata:
    found = metadata.state_dict_metadata.get(where)
    if not isinstance(found, TensorStorageMetadata):
        raise StateError(f"no tensor {where!r} in this checkpoint: save with commhooks.checkpoint.dcp and the same key")
    if math.prod(found.size) * found.properties.dtype.itemsize > 1 << 40:
        raise StateError(f"{where!r} claims a size of {list(found.size)}")
    return found


def _agreed(saved: Saved, group: dist.ProcessGroup | None) -> dict[tuple[str, str], Kind]:
    """Shape and dtype of every entry that any rank has; a rank that took no part in a step may lack some."""
    mine: Mapping[Any, Any] = {k: (tuple(t.shape), t.dtype) for k, t in saved.entries.items()}
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    return dict(sorted({key: value for one in every for key, value in one.items()}.items()))


def _row(value: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """One rank's row of the table that all ranks make up."""
    mesh = DeviceMesh.from_group(group or dist.distributed_c10d._get_default_group(), value.device.type)
    return DTensor.from_local(value.unsqueeze(0), mesh, [Shard(0)], run_check=False)
