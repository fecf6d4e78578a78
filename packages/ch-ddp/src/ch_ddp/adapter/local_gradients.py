"""Turns off DDP's averaging for good, so that an outer optimizer may average the ranks' moves instead.

A hook that sends nothing would not be enough. DDP also broadcasts buffers in each forward, the order of its buckets after the
first backward, and with ``find_unused_parameters`` the set of used parameters in each backward. Ranks that train alone make
none of these calls at the same time. DDP makes none of them under ``no_sync()``, so the model behaves as under ``no_sync()``
from its next forward on.
"""

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ch_ddp.adapter.replicate import ddp_of
from ch_ddp.adapter.slot import refuse_registered
from commhooks import HookNotSupportedError

_LOCAL = "_commhooks_local_gradients"
_SYNC = "require_backward_grad_sync"


class _Sync:
    """Stand in for DDP's attribute ``require_backward_grad_sync``, which scripts and frameworks assign to.

    A script that accumulates gradients may set it to True before the last backward of a step (nanoGPT does). A model with local
    gradients remembers the value and reports False.
    """

    def __get__(self, model: torch.nn.Module | None, owner: type | None = None) -> "_Sync | bool":
        if model is None:
            return self
        try:
            wanted = model.__dict__[_SYNC]
        except KeyError:
            raise AttributeError(_SYNC) from None
        return wanted and _LOCAL not in model.__dict__

    def __set__(self, model: torch.nn.Module, wanted: bool) -> None:
        model.__dict__[_SYNC] = wanted


def of_ddp(model: DistributedDataParallel) -> dist.ProcessGroup:
    """Leave each rank its own gradients, and return the group that averaged them.

    Raises:
        SlotTakenError: the script has registered its own communication hook.
        HookNotSupportedError: the model averages in a way that ``no_sync()`` does not turn off.
    """
    refuse_registered(model, "an outer optimizer")
    refused = {
        "mixed_precision=": model.mixed_precision is not None,
        "delay_all_reduce_named_params=": bool(getattr(model, "_delay_all_reduce_params", None)),
        "parameters_to_ignore": bool(model.parameters_to_ignore),
    }
    for option, given in refused.items():
        if given:
            raise HookNotSupportedError(
                f"an outer optimizer cannot train a DistributedDataParallel with {option}, whose parameters or gradients ranks "
                "do not treat equally. Make the model without it"
            )
    if model._join_config.enable:
        _no_join()
    if not isinstance(vars(DistributedDataParallel).get(_SYNC), _Sync):
        DistributedDataParallel.require_backward_grad_sync = _Sync()  # type: ignore[assignment]
    model.__dict__[_LOCAL] = True
    model.join_hook = _no_join  # type: ignore[method-assign]
    if model.will_sync_module_buffers():
        model._sync_buffers()  # the next forward would do so; ranks begin with equal buffers
    model.require_forward_param_sync = (
        False  # no broadcast of buffers; DDP sets this after each forward under no_sync()
    )
    # Of a static graph, the first backward would average all gradients even under no_sync().
    model._static_graph_delay_allreduce_enqueued = True
    group: dist.ProcessGroup = model.process_group
    return group


def _no_join(*args: object, **options: object) -> NoReturn:
    raise HookNotSupportedError(
        "DDP.join() repeats the averages of each step for ranks without data, and under an outer optimizer there are none. "
        "Remove join(); give all ranks the same number of steps"
    )


def of_replicate(model: Any) -> dist.ProcessGroup:
    """Do the same for a model of the composable ``replicate()``."""
    ddp, _ = ddp_of(model)
    return of_ddp(ddp)
