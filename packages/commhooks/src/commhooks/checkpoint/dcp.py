"""State of hooks through ``torch.distributed.checkpoint``, with every rank's residual.

Distributed checkpointing treats plain tensors with equal keys as replicas, and keeps one rank's. All ranks would then resume
with rank 0's residual. Each local field is therefore saved as a table of shape ``(world size, ...)`` sharded by rank. Each rank
writes its own row. Another number of ranks reads the whole table and averages it. Shared fields are saved once. All other
values are saved as the bytes of a JSON text, so commhooks pickles nothing.

In a model that is sharded and replicated (FSDP2), a rank's row is its place among its replicas. Each shard has its own keys
(``"w[0/2]"``), and the text has one part per shard. One save by all ranks of the mesh holds everything.

Distributed checkpointing itself unpickles its ``.metadata`` file. Load only files that you trust.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
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

from ch_core import HookState, StateError, checksum
from commhooks.checkpoint.format import Saved, as_dict, read
from commhooks.checkpoint.save_load import load_obtained, state_dict
from commhooks.checkpoint.world_change import recut, shard_of

if TYPE_CHECKING:
    from commhooks.handle import CommHook

Kind = tuple[tuple[int, ...], torch.dtype]
_LARGEST = 1 << 26  # bytes of the JSON text


def sharded(
    hook: "CommHook | HookState", *, process_group: dist.ProcessGroup | None = None, key: str = "commhook"
) -> dict[str, torch.Tensor]:
    """Return this rank's part of the state, to be saved with the model.

    Save it by ``dcp.save({**model_state, **sharded(handle)}, ...)``. A collective call: every rank of the group makes it,
    after the same step.

    Args:
        hook: an attached handle, or the state of a hook on the ``register_comm_hook`` path.
        process_group: the group that saves: at least all ranks that hold shards and replicas of the model; the default
            group if None.
        key: prefix of the keys in the checkpoint. Parts of a model with the same parameter names (pipeline stages) need
            one each.

    Raises:
        StateError: on all ranks of the group, if it lacks ranks of the hook, or two parts of the model have equal names.
    """
    saved = read(state_dict(hook))
    # One place of each node holds them, and another number of ranks could not use them.
    entries = {key: tensor for key, tensor in saved.entries.items() if saved.fields[key[1]] != "owned"}
    saved = replace(saved, entries=entries)
    own = _own_group(hook, process_group)
    _complete(hook, process_group)
    shapes = _agreed(saved, own)
    tensors: dict[str, torch.Tensor] = {}
    for (name, field), (shape, dtype) in shapes.items():
        entry = saved.entries.get((name, field))
        value = entry if entry is not None else torch.zeros(shape, dtype=dtype, device="cpu")
        where = f"{key}.entries.{field}.{name}"
        tensors[where] = _row(value, own) if saved.fields[field] == "local" else value
    plain = {k: v for k, v in as_dict(saved, {}).items() if k not in ("entries", "rank")}
    plain["rows"] = [[name, field, list(shape), str(dtype)] for (name, field), (shape, dtype) in shapes.items()]
    parts = _parts(plain, tensors, own, process_group, key)
    text = json.dumps(parts[0] if len(parts) == 1 else {"parts": parts}).encode()
    tensors[f"{key}.about"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tensors


def save(hook: "CommHook | HookState", checkpoint_id: Any, *, key: str = "commhook", **options: Any) -> None:
    """Save the hook's state alone: ``dcp.save(sharded(hook), checkpoint_id=...)``. ``dcp.save`` takes the ``options``."""
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
    """Load the state that :func:`save` or :func:`sharded` saved, all or nothing.

    Each rank reads by itself. On the old number of ranks it reads its own residuals. On another number, with
    ``world_change="mean"``, it reads all residuals and takes their mean. For another number of shards the mean is assembled
    and cut again (:mod:`commhooks.checkpoint.world_change`).

    Args:
        hook: an attached handle, or the state of a hook on the ``register_comm_hook`` path.
        checkpoint_id: folder of the checkpoint.
        key: prefix of the keys when the state was saved.
        world_change: see :func:`commhooks.checkpoint.load_state_dict`.
        storage_reader: reader of another storage than a folder.

    Raises:
        StateError: the checkpoint has no such state, or it does not fit. If so on one rank of an attached hook, no rank
            loads anything.
    """
    reader = storage_reader if storage_reader is not None else FileSystemReader(checkpoint_id)
    load_obtained(hook, lambda: _saved(hook, reader, key, world_change), world_change=world_change)


def _saved(hook: "CommHook | HookState", reader: Any, key: str, world_change: str) -> dict[str, Any]:
    """Return a saved state for this rank: its row of each table, or the mean of all rows."""
    metadata = reader.read_metadata()
    parts = _about(reader, metadata, key)
    mine = state_dict(hook)
    fits = [part for part in parts if part["params"] == mine["params"]] if len(parts) > 1 else parts
    if not fits or _cut_otherwise(fits[0], mine):
        return _recut(parts, mine, reader, metadata, key, world_change)
    about = fits[0]
    own = about["world_size"] == mine["world_size"]
    rank = mine["rank"] if own else None
    fetched = _fetch(reader, metadata, key, [(name, field) for name, field, _, _ in about["rows"]])
    entries: dict[str, dict[str, torch.Tensor]] = {}
    for name, field, shape, _ in about["rows"]:
        tensor = fetched[name, field]
        if about["fields"].get(field) == "local":
            tensor = _checked(tensor, about, name, field, shape)
            tensor = tensor[rank] if rank is not None else tensor.double().mean(0).to(tensor.dtype)
        entries.setdefault(name, {})[field] = tensor.clone()
    return {**{k: v for k, v in about.items() if k != "rows"}, "rank": rank, "entries": entries}


def _cut_otherwise(part: Mapping[str, Any], mine: Mapping[str, Any]) -> bool:
    """Return True if the only part of a checkpoint has the same parameters in another number of shards."""
    there, here = ([name for name, _ in table["params"]] for table in (part, mine))
    same = [shard_of(name)[0] for name in there] == [shard_of(name)[0] for name in here]
    return same and there != here


def _recut(
    parts: list[dict[str, Any]], mine: Mapping[str, Any], reader: Any, metadata: Metadata, key: str, world_change: str
) -> dict[str, Any]:
    """Return a state for this rank from all shards of another sharding."""
    if world_change not in ("mean", "reset"):
        there = sorted({shard_of(name)[2] for part in parts for name, _ in part["params"]})
        raise StateError(
            f"the checkpoint has {'/'.join(map(str, there))} shards of each parameter, and none of them is this rank's "
            f"({mine['params'][0][0] if mine['params'] else 'none'}, ...). Set world_change='mean' to cut the mean residual "
            "for the new shards, or 'reset' to drop it. Fields of single shards start again"
        )
    about = {k: v for k, v in parts[0].items() if k != "rows"}
    about |= {"params": mine["params"], "step": max(part["step"] for part in parts), "rank": None, "entries": {}}
    if world_change == "reset":
        return about
    sizes = {(name, field): (part, shape) for part in parts for name, field, shape, _ in part["rows"]}

    def mean(name: str, field: str) -> torch.Tensor:
        part, shape = sizes[name, field]
        table = _checked(_fetch(reader, metadata, key, [(name, field)])[name, field], part, name, field, shape)
        return table.double().mean(0).to(table.dtype)

    return {**about, "entries": recut(parts, mine["params"], mean)}


def _checked(table: torch.Tensor, about: Mapping[str, Any], name: str, field: str, shape: list[int]) -> torch.Tensor:
    if list(table.shape) != [about["world_size"], *shape]:
        raise StateError(f"the checkpoint's table of {name!r}, field {field!r}, is {list(table.shape)}")
    return table


def _fetch(
    reader: Any, metadata: Metadata, key: str, entries: list[tuple[str, str]]
) -> dict[tuple[str, str], torch.Tensor]:
    wanted: dict[str, torch.Tensor] = {}
    for name, field in entries:
        where = f"{key}.entries.{field}.{name}"
        stored = _stored(metadata, where)
        wanted[where] = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
    _fill(wanted, reader)
    return {(name, field): wanted[f"{key}.entries.{field}.{name}"] for name, field in entries}


def _about(reader: Any, metadata: Metadata, key: str) -> list[dict[str, Any]]:
    """Return the JSON text's parts, one per shard. :func:`.load_state_dict` checks the values that are not used here."""
    size = _stored(metadata, f"{key}.about").size
    if len(size) != 1 or size.numel() > _LARGEST:
        raise StateError(f"{key}.about in this checkpoint was not saved by commhooks: its size is {list(size)}")
    text = torch.empty(size, dtype=torch.uint8, device="cpu")
    _fill({f"{key}.about": text}, reader)
    try:
        about = json.loads(bytes(text.tolist()))
        return [_part(part) for part in about.get("parts") or [about]]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StateError(f"{key}.about in this checkpoint is damaged: {type(error).__name__}") from error


def _part(about: Mapping[str, Any]) -> dict[str, Any]:
    rows = [(str(n), str(field), [int(size) for size in shape], str(t)) for n, field, shape, t in about["rows"]]
    params = [[str(name), [int(size) for size in shape]] for name, shape in about["params"]]
    numbers = {"world_size": int(about["world_size"]), "step": int(about["step"])}
    return {**about, **numbers, "rows": rows, "params": params, "fields": dict(about["fields"])}


def _fill(tensors: dict[str, torch.Tensor], reader: Any) -> None:
    try:
        read_tensors(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as error:  # not a subclass of Exception: callers would miss it
        raise StateError(f"the checkpoint cannot be read: {error}") from error


def _stored(metadata: Metadata, where: str) -> TensorStorageMetadata:
    found = metadata.state_dict_metadata.get(where)
    if not isinstance(found, TensorStorageMetadata):
        raise StateError(f"no tensor {where!r} in this checkpoint: save with commhooks.checkpoint.dcp and the same key")
    if math.prod(found.size) * found.properties.dtype.itemsize > 1 << 40:
        raise StateError(f"{where!r} claims a size of {list(found.size)}")
    return found


def _own_group(hook: "CommHook | HookState", saving: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group of ranks that hold the same parameters as this rank. Each has its own residuals."""
    binding = getattr(hook, "binding", None)
    engine = binding.engine if binding is not None else getattr(hook, "engine", None)
    transport = engine.transport if engine is not None else None
    found = getattr(binding, "group", None) or getattr(transport, "group", None) or getattr(hook, "process_group", None)
    return found or saving


def _complete(hook: "CommHook | HookState", saving: dist.ProcessGroup | None) -> None:
    """Refuse to save a part of the hook's state, because two such saves would overwrite each other's folder."""
    binding = getattr(hook, "binding", None)
    others = binding.other_axes if binding is not None else ()
    axes = [group for group in (_own_group(hook, saving), *others) if group is not None]
    ranks = set(dist.get_process_group_ranks(saving)) if saving is not None else set(range(dist.get_world_size()))
    missing = sorted({rank for group in axes for rank in dist.get_process_group_ranks(group)} - ranks)
    if missing:
        raise StateError(
            f"ranks {missing} hold parts of this hook's state and are not in the process group that saves "
            f"({sorted(ranks)}). Leave process_group out, or pass a group with all ranks of the mesh"
        )


def _parts(
    about: dict[str, Any],
    tensors: Mapping[str, torch.Tensor],
    own: dist.ProcessGroup | None,
    saving: dist.ProcessGroup | None,
    key: str,
) -> list[dict[str, Any]]:
    """Return the values of every shard under this key that go into the JSON text, equal on all ranks."""
    ranks = tuple(dist.get_process_group_ranks(own or dist.distributed_c10d._get_default_group()))
    every: list[Any] = [None] * dist.get_world_size(saving)
    dist.all_gather_object(every, (key, ranks, about, sorted(tensors)), group=saving)
    mine = {group: part for where, group, part, _ in every if where == key}
    claims = Counter(name for names in {group: names for _, group, _, names in every}.values() for name in names)
    doubtful = {name for name, parts in claims.items() if parts > 1}  # the same on all ranks
    if doubtful:
        _distinct({name: _bits(tensor) for name, tensor in tensors.items() if name in doubtful}, saving)
    return [json.loads(text) for text in sorted({json.dumps(part) for part in mine.values()})]


def _distinct(bits: Mapping[str, tuple[int, str]], saving: dist.ProcessGroup | None) -> None:
    """Refuse two tensors of one key, because distributed checkpointing would silently keep one of them."""
    every: list[Any] = [None] * dist.get_world_size(saving)
    dist.all_gather_object(every, dict(bits), group=saving)
    found: dict[tuple[str, int], str] = {}
    for rank_bits in every:
        for name, (row, numbers) in rank_bits.items():
            if found.setdefault((name, row), numbers) != numbers:
                raise StateError(
                    f"two parts of the model save {name!r} with different numbers, and one would be lost. Give each part "
                    "(pipeline stage) its own key: sharded(handle, key='stage0')"
                )


def _bits(tensor: torch.Tensor) -> tuple[int, str]:
    """Return the row that a tensor fills, and a checksum of its bits."""
    row = tensor.device_mesh.get_local_rank() if isinstance(tensor, DTensor) else -1
    return row, checksum(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def _agreed(saved: Saved, group: dist.ProcessGroup | None) -> dict[tuple[str, str], Kind]:
    """Return shape and dtype of every entry on any rank. A rank that did not participate in a step may lack some."""
    mine: Mapping[Any, Any] = {k: (tuple(t.shape), t.dtype) for k, t in saved.entries.items()}
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    return dict(sorted({key: value for one in every for key, value in one.items()}.items()))


def _row(value: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return one rank's row of the table of all ranks."""
    mesh = DeviceMesh.from_group(group or dist.distributed_c10d._get_default_group(), value.device.type)
    return DTensor.from_local(value.unsqueeze(0), mesh, [Shard(0)], run_check=False)
