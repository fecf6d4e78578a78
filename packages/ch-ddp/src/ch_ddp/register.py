"""``register_ddp_comm_hook`` with the signatures of PyTorch's and of Lightning's function of that name.

The first argument decides: a :class:`DDPCommHookType` selects PyTorch's signature, a model selects Lightning's.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, overload

import torch
import torch.distributed as dist

import commhooks
from commhooks import CommHook, HookConfigError, Reduction, canonical

What = str | Mapping[str, Any] | Callable[..., Any] | Reduction
"""A hook: an expression, its dict, a callable, or a reduction."""


class DDPCommHookType(Enum):
    """PyTorch's ten built-in hooks. The values are expressions.

    PowerSGD starts to compress at step 1000, as in PyTorch.
    """

    ALLREDUCE = "allreduce"
    FP16_COMPRESS = "fp16_compress"
    BF16_COMPRESS = "bf16_compress"
    QUANTIZE_PER_TENSOR = "quantize_per_tensor"
    QUANTIZE_PER_CHANNEL = "quantize_per_channel"
    POWER_SGD = "powersgd(rank=1, start_iter=1000)"
    POWER_SGD_RANK2 = "powersgd(rank=2, start_iter=1000)"
    BATCHED_POWER_SGD = "batched_powersgd(rank=1, start_iter=1000)"
    BATCHED_POWER_SGD_RANK2 = "batched_powersgd(rank=2, start_iter=1000)"
    NOOP = "noop"


@overload
def register_ddp_comm_hook(
    model: torch.nn.Module,
    ddp_comm_state: object | None = None,
    ddp_comm_hook: What | None = None,
    ddp_comm_wrapper: str | Callable[..., Any] | None = None,
    *,
    state: object | None = None,
) -> CommHook | None: ...


@overload
def register_ddp_comm_hook(comm_hook_type: Enum, model: torch.nn.Module, state: object | None = None) -> CommHook: ...


def register_ddp_comm_hook(*args: Any, **kwargs: Any) -> CommHook | None:  # noqa: D417 - two forms, named below
    """Attach a hook to a DDP model, with PyTorch's arguments or with Lightning's.

    PyTorch's ``(comm_hook_type, model, state=None)``:

    Args:
        comm_hook_type: :class:`DDPCommHookType` of this package or of PyTorch.
        model: DDP model.
        state: process group to use. None means the model's group.

    Lightning's ``(model, ddp_comm_state=None, ddp_comm_hook=None, ddp_comm_wrapper=None)``:

    Args:
        model: DDP model.
        ddp_comm_state: state of the hook, or the process group of a stateless hook. ``state`` is accepted as a second
            name, because Lightning's examples use it.
        ddp_comm_hook: name, expression, dict, or callable (function, partial or object). None attaches nothing.
        ddp_comm_wrapper: wrapper around the hook, as a name or a callable.

    Returns:
        The handle, or None if there is no hook.

    Raises:
        HookConfigError: the arguments match neither signature, or hook or wrapper have a wrong kind.
        AttachError: the model is not a DDP model, or already has a hook.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        >>> register_ddp_comm_hook(model, ddp_comm_hook="allreduce", ddp_comm_wrapper="bf16_wrapper").expr
        'bf16_wrapper(allreduce)'
        >>> dist.destroy_process_group()
    """
    if "comm_hook_type" in kwargs or (args and isinstance(args[0], Enum)):
        return _by_type(*args, **kwargs)
    return _as_lightning(*args, **kwargs)


def _by_type(comm_hook_type: Enum, model: torch.nn.Module, state: object | None = None) -> CommHook:
    if comm_hook_type.name not in DDPCommHookType.__members__:
        legal = ", ".join(DDPCommHookType.__members__)
        raise HookConfigError(f"{comm_hook_type!r} is not a DDPCommHookType. Legal members: {legal}")
    return _attach(model, DDPCommHookType[comm_hook_type.name].value, state)


def _as_lightning(
    model: torch.nn.Module,
    ddp_comm_state: object | None = None,
    ddp_comm_hook: What | None = None,
    ddp_comm_wrapper: str | Callable[..., Any] | None = None,
    *,
    state: object | None = None,
) -> CommHook | None:
    if state is not None and ddp_comm_state is not None:
        raise HookConfigError("ddp_comm_state= and state= are two names of one argument. Give only one of them")
    ddp_comm_state = state if ddp_comm_state is None else ddp_comm_state
    if ddp_comm_hook is None:
        return None
    hook = ddp_comm_hook if ddp_comm_wrapper is None else _wrapped(ddp_comm_wrapper, ddp_comm_hook)
    return _attach(model, hook, ddp_comm_state)


def _wrapped(wrapper: str | Callable[..., Any], hook: What) -> What:
    if isinstance(wrapper, str) and isinstance(hook, str | Mapping):
        return {**canonical(wrapper), "inner": canonical(hook)}
    if isinstance(wrapper, str):
        wrapper = commhooks.get(wrapper, kind="wrapper")
    if isinstance(hook, str | Mapping):
        hook = commhooks.create(hook).built
    if not callable(wrapper):
        raise HookConfigError(f"ddp_comm_wrapper={wrapper!r:.80} is illegal. Give the name of a wrapper, or a callable")
    wrapped: What = wrapper(hook)
    return wrapped


def _attach(model: torch.nn.Module, hook: What, state: object | None) -> CommHook:
    """Attach the hook. For a reduction, a process group given as state is the group to reduce over."""
    if isinstance(state, dist.ProcessGroup) and not _foreign(hook):
        return commhooks.attach(model, hook, process_group=state)
    return commhooks.attach(model, hook, state=state)


def _foreign(hook: What) -> bool:
    """Return True if the hook is a foreign callable, which receives a process group as its state."""
    return callable(hook) and not isinstance(hook, Reduction) and not hasattr(hook, "reduction")
