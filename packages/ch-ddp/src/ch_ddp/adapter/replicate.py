"""The adapter for composable ``replicate()``: a module that stays what it is, with a ``DistributedDataParallel`` beside it.

``replicate`` makes that DDP in the first forward, over a bare list of the parameters: they have numbers there instead of
names, and the module that is called is the user's own. So the DDP is made when a hook is attached, and the hook is put on
it under the names of the module.
"""

import torch
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from ch_ddp.adapter.binding import DDPBinding
from commhooks import AttachError, CommHook, HookNotSupportedError
from commhooks.adapters import AttachOptions

_READ = ("has_initialized", "lazy_init", "_param_list", "_param_names")


def adapter(model: torch.nn.Module, handle: CommHook, options: AttachOptions) -> DDPBinding:
    """The ``commhooks_adapter`` of ``torch.distributed._composable.replicate``.

    Makes the model's ``DistributedDataParallel``, as the first forward would: it sends the first rank's parameters to the
    others, so every rank has to attach. Move the model to its device before.

    Raises:
        AttachError: the DDP cannot be made; a hook is there already.
        HookNotSupportedError: this torch keeps a replicated model's state in another way.
    """
    ddp, names = _made(model)
    return DDPBinding(ddp, handle, options, names, model)


adapter.idles_alone = True  # type: ignore[attr-defined]  # commhooks.attach asks for it


def _made(model: torch.nn.Module) -> tuple[DistributedDataParallel, dict[int, str]]:
    """The model's DDP, and ``id(parameter)`` -> name in the module."""
    state = replicate.state(model)
    missing = [name for name in _READ if not hasattr(state, name)]
    if missing:
        raise HookNotSupportedError(
            f"torch {torch.__version__}: the state of replicate() has no {', '.join(missing)}. Wrap the model in "
            "DistributedDataParallel instead, or report this with the output of `python -m commhooks env`"
        )
    if not state.has_initialized:
        try:
            state.lazy_init()
        except (RuntimeError, ValueError) as error:
            raise AttachError(
                f"replicate() could not make the DistributedDataParallel that its first forward needs: {error}"
            ) from error
    names: dict[int, str] = {}
    for name, param in zip(state._param_names, state._param_list, strict=True):
        names.setdefault(id(param), name)  # of one that two modules share, the first counts, as in named_parameters()
    return state._ddp, names
