"""Makes every model of a wrapper report its first forward with gradients.

A wrapper is a class whose instance is the wrapped model (`DistributedDataParallel`), or a function that returns it
(`fully_shard`). The first forward with gradients is the moment to attach. By then the script has loaded its checkpoint
and registered its own hook, if any. The outermost of nested wrappers reports first. The forward pre-hook removes
itself, so later steps do not run it.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MARK = "_commhooks_reports"


def watch_wrapper(module: ModuleType, attribute: str) -> None:
    """Wrap one class or function of a module, once."""
    wrapper = getattr(module, attribute, None)
    if wrapper is None or getattr(wrapper, _MARK, False):  # this torch has no such wrapper, or it is done
        return
    if isinstance(wrapper, type):
        wrapper.__init__ = _reporting_init(wrapper.__init__)  # type: ignore[misc]
        setattr(wrapper, _MARK, True)
        return
    reporting = _reporting_function(wrapper)
    for other in list(sys.modules.values()):  # modules that have imported it by name
        if isinstance(other, ModuleType) and vars(other).get(attribute) is wrapper:
            setattr(other, attribute, reporting)


def _reporting_init(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        before_wrapping(*args, **kwargs)
        init(self, *args, **kwargs)
        wait_for_forward([self])

    return wrapped


def _reporting_function(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before_wrapping(*args, **kwargs)
        made = function(*args, **kwargs)
        wait_for_forward(made if isinstance(made, list | tuple) else [made])
        return made

    setattr(wrapped, _MARK, True)
    return wrapped


def before_wrapping(*args: Any, **kwargs: Any) -> None:
    """End the training of a module in an earlier wrapper. The new one sends the first rank's parameters to all ranks."""
    import torch

    from ch_run.auto_attach import auto_attach

    module = kwargs.get("module", args[0] if args else None)
    if isinstance(module, torch.nn.Module):
        auto_attach().wrapped_again(module)


def wait_for_forward(models: Iterable[Any]) -> None:
    """Attach to these models, or to the models around them, at the first forward with gradients."""
    import torch

    for model in models:
        if isinstance(model, torch.nn.Module) and first_forward not in model._forward_pre_hooks.values():
            model.register_forward_pre_hook(first_forward, prepend=True)  # FSDP's own pre-hook gathers parameters


def first_forward(model: "torch.nn.Module", args: object) -> None:
    """Attach, as the forward pre-hook of a model."""
    import torch

    if torch.is_grad_enabled():  # some ranks may evaluate alone, and attach() needs all ranks
        torch.compiler.disable(_attach)(model)  # torch.compile would trace it


def _attach(model: "torch.nn.Module") -> None:
    from ch_run.auto_attach import auto_attach

    for part in model.modules():  # inner units of FSDP get the hook with the whole model
        for key in [key for key, hook in part._forward_pre_hooks.items() if hook is first_forward]:
            del part._forward_pre_hooks[key]
    if not auto_attach().found(model):
        wait_for_forward([model])
