"""``register_ddp_comm_hook``: PyTorch's function of that name, and Lightning's.

Told apart by the first argument: a :class:`DDPCommHookType` for PyTorch's, a model for Lightning's.
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
    """PyTorch's ten built-in hooks; the values are expressions.

    PowerSGD starts compressing at step 1000, as PyTorch's does.
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
    """Attach a hook to a DDP model, by PyTorch's arguments or by Lightning's.

    PyTorch's ``(comm_hook_type, model, state=None)``:

    Args:
        comm_hook_type: a :class:`DDPCommHookType`, ours or PyTorch's.
        model: the DDP model.
        state: the process group to use; ``None`` is the model's own.

    Lightning's ``(model, ddp_comm_state=None, ddp_comm_hook=None, ddp_comm_wrapper=None)``:

    Args:
        model: the DDP model.
        ddp_comm_state: the hook's state, or the process group of one that has none; also by the name ``state``, as
            Lightning's examples have it.
        ddp_comm_hook: a hook: a name, an expression, a dict, or any callable, partials and objects included; without
            one nothing happens.
        ddp_comm_wrapper: a wrapper, by name or as a callable, to put around it.

    Returns:
        The handle; ``None`` if there was no hook to register.

    Raises:
        HookConfigError: neither form, or a hook or wrapper of the wrong kind.
        AttachError: the model is not DDP's, or has a hook.

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
        raise HookConfigError(f"{comm_hook_type!r} is not a DDPCommHookType; legal: {legal}")
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
        raise HookConfigError("ddp_comm_state= and state= are the same argument; give one of them")
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
        raise HookConfigError(f"ddp_comm_wrapper={wrapper!r:.80}: expected a wrapper's name or a callable")
    wrapped: What = wrapper(hook)
    return wrapped


def _attach(model: torch.nn.Module, hook: What, state: object | None) -> CommHook:
    """A process group as state is where to reduce; a reduction has no other use for it."""
    if isinstance(state, dist.ProcessGroup) and not _foreign(hook):
        return commhooks.attach(model, hook, process_group=state)
    return commhooks.attach(model, hook, state=state)


def _foreign(hook: What) -> bool:
    """Whether a callable is none of our hooks, and so takes a process group as its own state."""
    return callable(hook) and not isinstance(hook, Reduction) and not hasattr(hook, "reduction")
