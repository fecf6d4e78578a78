"""What the sparse hooks have in common: options, and which parameters are averaged exactly."""

from commhooks import HookConfigError, ParamLayout


def check_common(density: float, start_iter: int) -> None:
    """Raise HookConfigError for an option out of its range."""
    if isinstance(density, bool) or not 0.0 < density <= 1.0:
        raise HookConfigError(f"density={density!r}: expected a part above 0 and at most 1, such as 0.01")
    if isinstance(start_iter, bool) or start_iter < 0:
        raise HookConfigError(f"start_iter={start_iter!r}: expected 0 or a number of steps")


def check_decay(decay: float, feedback: bool) -> None:
    """Raise HookConfigError for a decay out of its range, or of nothing."""
    if not 0.0 < decay <= 1.0:
        raise HookConfigError(f"decay={decay!r}: expected a number above 0 and at most 1")
    if decay != 1.0 and not feedback:
        raise HookConfigError(f"decay={decay!r} without feedback: nothing is kept that could decay; leave it out")


def exact_because(param: ParamLayout, step: int, density: float, start_iter: int, exempt: bool) -> str | None:
    """Why a parameter is averaged exactly in a step, or ``None``."""
    if step < start_iter:
        return f"exact for the first {start_iter} steps"
    if not exempt:
        return None
    if len(param.shape) < 2:
        return f"{len(param.shape)}-D"
    least = round(1.0 / density)
    return f"fewer than {least} elements" if param.numel < least else None
