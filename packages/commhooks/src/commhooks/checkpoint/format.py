"""Form of a saved state: parses untrusted data, and checks every type, key and size before use."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ch_core import BucketNames, Key, ParamTable, StateError

FORMAT = 2
_KEYS = ("format", "expr", "config", "world_size", "rank", "step", "params", "buckets", "fields", "entries")
_OPTIONAL = ("nodes", "link", "reference")
_LOCALITIES = ("local", "shared", "owned")
_LONGEST = 4096  # characters of a name or an expression
_WORLD = 1 << 20
_STEPS = 1 << 53


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved state whose form :func:`read` has checked. It may still be of another hook, model or rank."""

    expr: str
    config: dict[str, Any] | None
    world_size: int
    rank: int | None
    step: int
    params: ParamTable
    fields: dict[str, str]
    entries: dict[Key, torch.Tensor]
    buckets: BucketNames = ()
    nodes: tuple[tuple[int, ...], ...] = ()  # ranks of each node, if a hook with two levels saved the state
    link: str = ""  # between ranks that are far apart
    reference: float | None = None  # weight that residuals are in units of; None if steps had no weights


def read(saved: object) -> Saved:
    """Check the form of a saved state.

    Raises:
        StateError: it is not a saved state, has another format version, or is damaged. The message names the place.
    """
    if not isinstance(saved, Mapping):
        raise StateError(f"the state of a hook is a dict, as handle.state_dict() makes it; got {type(saved).__name__}")
    missing = [key for key in _KEYS if key not in saved]
    if missing:
        raise StateError(f"this is not the state of a hook: {', '.join(missing)} {_are(missing)} missing")
    if type(saved["format"]) is not int or saved["format"] != FORMAT:
        raise StateError(
            f"state format {shown(saved['format'])}; this version of commhooks reads format {FORMAT}. Load it with the version "
            "that saved it"
        )
    unknown = [key for key in saved if type(key) is not str or key not in (*_KEYS, *_OPTIONAL)]
    if unknown:
        raise StateError(f"this is not the state of a hook: it has the unknown keys {shown(unknown)}")
    config = saved["config"]
    if config is not None and type(config) is not dict:
        raise StateError(f"config is a dict or None, got {shown(config)}")
    world_size = _integer("world_size", saved["world_size"], 1, _WORLD)
    rank, fields = saved["rank"], _fields(saved["fields"])
    return Saved(
        expr=_text("expr", saved["expr"]),
        config=config,
        world_size=world_size,
        rank=None if rank is None else _integer("rank", rank, 0, world_size - 1),
        step=_integer("step", saved["step"], 0, _STEPS),
        params=_params(saved["params"]),
        fields=fields,
        entries=_entries(saved["entries"], fields),
        buckets=_buckets(saved["buckets"]),
        nodes=_nodes(saved.get("nodes", [])),
        link=_text("link", saved.get("link", "")),
        reference=_reference(saved.get("reference")),
    )


def as_dict(saved: Saved, entries: Mapping[str, Mapping[str, torch.Tensor]], rank: int | None = None) -> dict[str, Any]:
    """Return the dict that :func:`read` reads."""
    made = {
        "format": FORMAT,
        "expr": saved.expr,
        "config": saved.config,
        "world_size": saved.world_size,
        "rank": rank,
        "step": saved.step,
        "params": [[name, list(shape)] for name, shape in saved.params],
        "buckets": [list(names) for names in saved.buckets],
        "fields": saved.fields,
        "entries": entries,
    }
    if saved.nodes:
        made["nodes"] = [list(node) for node in saved.nodes]
    if saved.link:
        made["link"] = saved.link
    if saved.reference is not None:
        made["reference"] = saved.reference
    return made


def alike(saved: object, own: object, ignored: tuple[str, ...] = ("version",)) -> bool:
    """Return True if two configurations are the same but for versions. Goes no deeper than ``own``.

    An option that this version no longer has may be saved if it was off (False or None). ``two_level`` wrappers do not
    count, because they change the owner of state, not its meaning.
    """
    saved, own = _inner(saved), _inner(own)
    if type(saved) is not type(own):
        return False
    if isinstance(own, dict) and isinstance(saved, dict):
        keys = own.keys() - set(ignored)
        gone = saved.keys() - set(ignored) - keys
        off = all(saved[k] is False or saved[k] is None for k in gone)
        return off and keys <= saved.keys() and all(alike(saved[k], own[k], ignored) for k in keys)
    if isinstance(own, list) and isinstance(saved, list):
        return len(saved) == len(own) and all(alike(a, b, ignored) for a, b in zip(saved, own, strict=True))
    return isinstance(own, bool | int | float | str | type(None)) and saved == own


def _inner(config: object) -> object:
    while isinstance(config, dict) and config.get("hook") == "two_level" and "inner" in config:
        config = config["inner"]
    return config


def shown(value: object) -> str:
    """Return a value for an error message. The text is short for any value that a file may hold."""
    if value is None or type(value) in (bool, float):
        return repr(value)
    if type(value) is int:
        return str(value) if -(1 << 64) < value < 1 << 64 else "an integer of more than 64 bits"
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "[" + ", ".join(map(shown, value[:6])) + (", ...]" if len(value) > 6 else "]")
    return f"a {type(value).__name__}"


def _params(table: object) -> ParamTable:
    if type(table) is not list:
        raise StateError(f"params is a list of [name, sizes], got {shown(table)}")
    made = []
    for row in table:
        if type(row) is not list or len(row) != 2 or type(row[1]) is not list:
            raise StateError(f"params is a list of [name, sizes]; one of them is {shown(row)}")
        name = _text("a parameter name", row[0])
        made.append((name, tuple(_integer(f"a size of {shown(name)}", size, 0, _STEPS) for size in row[1])))
    if len({name for name, _ in made}) != len(made):
        raise StateError("params names a parameter twice")
    return tuple(made)


def _buckets(buckets: object) -> BucketNames:
    if type(buckets) is not list or not all(type(names) is list and names for names in buckets):
        raise StateError(f"buckets is a list of lists of parameter names, none of them empty, got {shown(buckets)}")
    made = tuple(tuple(_text("a name in buckets", name) for name in names) for names in buckets)
    if len({name for names in made for name in names}) != sum(map(len, made)):
        raise StateError("buckets names a parameter twice")
    return made


def _nodes(nodes: object) -> tuple[tuple[int, ...], ...]:
    if type(nodes) is not list or not all(type(node) is list for node in nodes):
        raise StateError(f"nodes is a list of lists of ranks, got {shown(nodes)}")
    return tuple(tuple(_integer("a rank in nodes", rank, 0, _WORLD) for rank in node) for node in nodes)


def _reference(value: object) -> float | None:
    """Return a reference weight. It is a power of two, so that a conversion of residuals rounds nothing."""
    if value is not None and not (
        type(value) is float and 2.0**-64 <= value <= 2.0**64 and math.frexp(value)[0] == 0.5
    ):
        raise StateError(f"reference is a power of two from 2**-64 to 2**64, got {shown(value)}")
    return value


def _fields(fields: object) -> dict[str, str]:
    if type(fields) is not dict:
        raise StateError(f"fields is a dict, got {shown(fields)}")
    for field, locality in fields.items():
        _text("a field", field)
        if type(locality) is not str or locality not in _LOCALITIES:
            raise StateError(f"field {shown(field)} is {shown(locality)}; legal: 'local', 'shared', 'owned'")
    return dict(fields)


def _entries(entries: object, fields: Mapping[str, object]) -> dict[Key, torch.Tensor]:
    if type(entries) is not dict:
        raise StateError(f"entries is a dict, got {shown(entries)}")
    found: dict[Key, torch.Tensor] = {}
    for name, row in entries.items():
        _text("the name of an entry", name)
        if type(row) is not dict:
            raise StateError(f"entries[{shown(name)}] is a dict of tensors, got {shown(row)}")
        for field, tensor in row.items():
            if type(field) is not str or field not in fields:
                raise StateError(f"entries[{shown(name)}] has the field {shown(field)}; known: {shown(list(fields))}")
            found[name, field] = _tensor(f"entries[{shown(name)}][{shown(field)}]", tensor)
    return found


def _tensor(where: str, tensor: object) -> torch.Tensor:
    if type(tensor) is not torch.Tensor:
        raise StateError(f"{where} is a tensor, got {shown(tensor)}")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta" or tensor.is_nested:
        raise StateError(f"{where} is a dense tensor with numbers, got {tensor.layout} on {tensor.device}")
    if tensor.numel() > max(1, tensor.untyped_storage().nbytes() // tensor.element_size()):
        there = tensor.untyped_storage().nbytes()
        raise StateError(f"{where} claims {tensor.numel()} numbers, but the file has {there} bytes for it")
    return tensor.detach()


def _text(label: str, value: object) -> str:
    if type(value) is not str or len(value) > _LONGEST:
        raise StateError(f"{label} is a string of at most {_LONGEST} characters, got {shown(value)}")
    return value


def _integer(label: str, value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise StateError(f"{label} is an integer from {least} to {most}, got {shown(value)}")
    return value


def _are(items: list[str]) -> str:
    return "is" if len(items) == 1 else "are"
