"""Has every model that a wrapper makes announce its first forward.

A wrapper is a class whose instance is the wrapped model (``DistributedDataParallel``), or a function that returns it
(``fully_shard``). The first forward with gradients is the moment to attach: the script has loaded its checkpoint, has put
its own hook in place if it has one, and of nested wrappers the outermost is called first. The hook that waits for it
removes itself, so a later step has no trace of it.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MARK = "_commhooks_announces"


def watch(module: ModuleType, attribute: str) -> None:
    """Wrap one of a module's classes or functions; once."""
    wrapper = getattr(module, attribute, None)
    if wrapper is None or getattr(wrapper, _MARK, False):
        return  # a torch without it
    if isinstance(wrapper, type):
        wrapper.__init__ = _announcing_init(wrapper.__init__)  # type: ignore[misc]
        setattr(wrapper, _MARK, True)
        return
    announcing = _announcing(wrapper)
    for other in list(sys.modules.values()):  # where it has been imported by name, too
        if isinstance(other, ModuleType) and vars(other).get(attribute) is wrapper:
            setattr(other, attribute, announcing)


def _announcing_init(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        expect([self])

    return wrapped


def _announcing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        expect(made if isinstance(made, list | tuple) else [made])
        return made

    setattr(wrapped, _MARK, True)
    return wrapped


def expect(models: Iterable[Any]) -> None:
    """Attach to these models, or to what they are part of, at the first forward with gradients."""
    import torch

    for model in models:
        if isinstance(model, torch.nn.Module) and first_forward not in model._forward_pre_hooks.values():
            model.register_forward_pre_hook(first_forward, prepend=True)  # before FSDP's own, which gathers parameters


def first_forward(model: "torch.nn.Module", args: object) -> None:
    """The forward pre-hook of a model that waits."""
    import torch

    if torch.is_grad_enabled():  # otherwise an evaluation, which some ranks may do alone
        torch.compiler.disable(_attach)(model)  # torch.compile would trace it


def _attach(model: "torch.nn.Module") -> None:
    from commhooks.launch.session import session

    for part in model.modules():  # an inner unit of FSDP is served with the whole
        for key in [key for key, hook in part._forward_pre_hooks.items() if hook is first_forward]:
            del part._forward_pre_hooks[key]
    session().found(model)
