"""Adapter for the composable ``replicate()``, which keeps a ``DistributedDataParallel`` next to the user's module.

``replicate`` creates that DDP in the first forward, over a list of parameters without names. The adapter creates it at
attach, and uses the parameter names of the user's module.
"""

import torch
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from ch_ddp.adapter.binding import DDPBinding
from commhooks import AttachError, AttachOptions, CommHook, HookNotSupportedError

_READ = ("has_initialized", "lazy_init", "_param_list", "_param_names")


def adapter(model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> DDPBinding:
    """Attach a handle to a model of ``torch.distributed._composable.replicate`` (a ``commhooks_adapter``).

    Creates the model's ``DistributedDataParallel``, as the first forward would. DDP broadcasts the first rank's
    parameters, so every rank must attach. Move the model to its device first.

    Raises:
        AttachError: DDP cannot be created, or the model already has a hook.
        HookNotSupportedError: this torch version stores the state of a replicated model differently.
    """
    ddp, names = ddp_of(model)
    return DDPBinding(ddp, handle, options, names, model)


adapter.idles_alone = True  # type: ignore[attr-defined]  # commhooks.attach reads this attribute


def ddp_of(model: torch.nn.Module) -> tuple[DistributedDataParallel, dict[int, str]]:
    """Return the model's DDP, and ``id(parameter)`` -> name in the module."""
    state = replicate.state(model)
    missing = [name for name in _READ if not hasattr(state, name)]
    if missing:
        raise HookNotSupportedError(
            f"torch {torch.__version__} is not supported: the state of replicate() has no {', '.join(missing)}. Wrap the "
            "model in DistributedDataParallel instead, or report this with the output of `python -m commhooks env`"
        )
    if not state.has_initialized:
        try:
            state.lazy_init()
        except (RuntimeError, ValueError) as error:
            raise AttachError(
                f"replicate() could not create its DistributedDataParallel: {error}. Move the model to its device first"
            ) from error
    names: dict[int, str] = {}
    for name, param in zip(state._param_names, state._param_list, strict=True):
        names.setdefault(id(param), name)  # a shared parameter keeps its first name, as in named_parameters()
    return state._ddp, names
