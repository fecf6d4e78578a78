"""Finds the adapter of a model: the model inside the wrappers of frameworks, and the function that serves its class."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from ch_core import AttachError
from commhooks.adapters.base import Binding
from commhooks.adapters.options import AttachOptions
from commhooks.handle import CommHook
from commhooks.registry.packages import ADAPTERS, all_names
from commhooks.registry.registry import REGISTRY, class_names

Adapter = Callable[[torch.nn.Module, CommHook, AttachOptions], Binding]
"""Puts a handle's hook on a model, without any collective, because the ranks have not agreed yet.

`attach` then compares the ranks over the binding's `group` if it has one, and calls its `after_agreement()`."""


_INSIDE = ("_forward_module", "_orig_mod", "module")
"""Attributes in which Fabric, `torch.compile` and most other wrappers store the model inside."""


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the outermost model with an adapter inside the wrappers of `torch.compile` and frameworks, or the model."""
    claimed = {*REGISTRY.adapters(), *all_names(ADAPTERS)}
    return next((part for part in inside(model) if claimed.intersection(class_names(part))), model)


def inside(model: object) -> Iterator[torch.nn.Module]:
    """Yield the model, the model inside it, and so on."""
    seen: set[int] = set()
    part: object = model
    while isinstance(part, torch.nn.Module) and id(part) not in seen:
        yield part
        seen.add(id(part))
        wrapped = (getattr(part, name, None) for name in _INSIDE)
        part = next((one for one in wrapped if isinstance(one, torch.nn.Module)), None)


def adapter_for(model: object) -> Adapter:
    """Return the adapter of the first class in the model's MRO that has one.

    Raises:
        AttachError: no class has an adapter. The model is not wrapped, or the adapter's package is not installed.
    """
    kind, names = type(model).__name__, class_names(model)
    found: Adapter | None = REGISTRY.adapter_of(names, f"support for {kind}")
    if found is not None:
        return found
    if isinstance(model, torch.nn.DataParallel):
        raise AttachError(
            "cannot attach to DataParallel: it has one process and sends no gradients. Start a process for each device with "
            "torchrun, wrap the model in torch.nn.parallel.DistributedDataParallel, and attach to that"
        )
    others = [name for name in REGISTRY.wraps() if name != "DistributedDataParallel"]
    also = f". {', '.join(others)} also work" if others else ""
    raise AttachError(
        f"cannot attach to {kind}: it is not wrapped for data parallelism. Wrap it before attach(): "
        f"model = torch.nn.parallel.DistributedDataParallel(model){also}"
    )


def runs_alone(model: torch.nn.Module) -> bool:
    """Return True if a model trains in the only process of the run, e.g. while a script is debugged."""
    return one_process(adapter_for(unwrapped(model)))


def one_process(adapter: Adapter) -> bool:
    """Return True if a model of this adapter trains in the only process of the run, and no other process can join."""
    return bool(getattr(adapter, "idles_alone", False)) and dist.is_initialized() and dist.get_world_size() == 1
