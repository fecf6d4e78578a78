"""`as_hook`: a reduction as a plain function with PyTorch's signature.

ch-core knows no wrapped model. The function is made by the package that answers `commhooks_hook_function`: ch-ddp, whose
hooks have that signature.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from commhooks.errors import HookNotSupportedError
from commhooks.registry.discovery import load_target
from commhooks.registry.metadata import not_installed
from commhooks.registry.registry import REGISTRY

if TYPE_CHECKING:
    from torch import Tensor
    from torch.futures import Future

    from commhooks.typing import GradBucket


def as_hook(reduction: Any, name: str | None = None) -> "Callable[[Any, GradBucket], Future[Tensor]]":
    """A reduction, or a function that makes one from the hook's state, as a hook with PyTorch's signature.

    Args:
        reduction: what to run on every bucket.
        name: what torch and its frameworks show; the reduction's own if not given.

    Raises:
        HookNotSupportedError: ch-ddp, which makes such functions, is not installed.

    Example:
        >>> from commhooks.reduction import Plain
        >>> as_hook(Plain(), "my_hook")
        <hook my_hook>
    """
    for _, maker in REGISTRY.ask("commhooks_hook_function"):
        hook: Callable[[Any, GradBucket], Future[Tensor]] = load_target(maker)(reduction, name)
        return hook
    raise HookNotSupportedError(
        f"a (state, bucket) function of {getattr(reduction, 'name', reduction)!r:.80} is made by ch-ddp, which is "
        + not_installed("ch-ddp")
    )
