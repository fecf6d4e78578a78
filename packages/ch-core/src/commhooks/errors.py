"""Every error this project raises on purpose.

Each derives from `CommHooksError` and from the builtin that callers would expect, so `except LookupError`
works as well as `except CommHooksError`. None derives from `KeyError`, which prints its message quoted and
with escaped newlines. Messages say what was given, what is legal and what to do next.

This module imports nothing, so that errors can be raised, caught and pickled (a spawned rank sends its
exception to the parent) in processes that never load torch.
"""


class CommHooksError(Exception):
    """Base of every error raised on purpose by commhooks and its packages.

    Example:
        >>> issubclass(UnknownHookError, CommHooksError) and issubclass(UnknownHookError, LookupError)
        True
    """


class UnknownHookError(CommHooksError, LookupError):
    """No installed provider offers the name; the message has the close match and the package to install."""


class AmbiguousHookError(CommHooksError, LookupError):
    """Several providers offer the name; the message names all of them and how to choose one."""


class PluginLoadError(CommHooksError, ImportError):
    """A provider's module or target failed to import; the message names the distribution and the cause."""


class HookConfigError(CommHooksError, ValueError):
    """A bad expression, an unknown parameter, a value out of range, or a wrapper that refuses its inner."""


class HookNotSupportedError(CommHooksError, RuntimeError):
    """The hook exists but cannot run here: backend, device, torch version, or the kind of model."""


class AttachError(CommHooksError, RuntimeError):
    """The model is not wrapped, already has a hook or a foreign one, or no process group exists."""


class SlotTakenError(AttachError):
    """The model has a hook already, a handle's or a foreign one, and takes no second."""


class RankMismatchError(CommHooksError, RuntimeError):
    """The ranks of one group disagree on hook, options, versions or shapes; the message names the fields."""


class HookResultError(CommHooksError, RuntimeError):
    """A hook returned None, a wrong type, or a tensor of a wrong size, device or layout."""


class RemoteHookError(CommHooksError, RuntimeError):
    """A hook raised on another rank, so this rank's step has no valid gradient."""


class HookTimeoutError(CommHooksError, RuntimeError):
    """A collective did not complete within the deadline of `attach(..., timeout=...)`."""


class StateError(CommHooksError, ValueError):
    """A state cannot be bound, loaded or converted: format, parameter names, shapes or world size differ."""


class TransportError(CommHooksError, RuntimeError):
    """A collective failed or could not start: a peer was lost, the ranks disagree, or there is no group."""
