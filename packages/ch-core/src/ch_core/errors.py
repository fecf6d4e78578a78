"""The errors that this project raises on purpose.

Each derives from `CommHooksError` and from the builtin that callers would expect, so `except LookupError` works as well as
`except CommHooksError`. None derives from `KeyError`, which prints its message quoted and with escaped newlines. Messages
name the problem, the legal values and the remedy.

This module imports nothing, so processes without torch can raise, catch and pickle the errors. A spawned rank sends its
exception to the parent process.
"""


class CommHooksError(Exception):
    """Base class of the errors of this package and of all that build on it.

    Example:
        >>> issubclass(UnknownHookError, CommHooksError) and issubclass(UnknownHookError, LookupError)
        True
    """


class UnknownHookError(CommHooksError, LookupError):
    """No installed provider offers the name. The message has the closest name and the package to install."""


class AmbiguousHookError(CommHooksError, LookupError):
    """Several providers offer the name. The message names all of them and how to choose one."""


class PluginLoadError(CommHooksError, ImportError):
    """A provider's module or target failed to import. The message names the distribution and the cause."""


class HookConfigError(CommHooksError, ValueError):
    """A bad expression, an unknown option, a value out of range, or a wrapper that refuses its inner hook."""


class HookNotSupportedError(CommHooksError, RuntimeError):
    """The hook exists, but does not support this backend, device, torch version, or kind of model."""


class AttachError(CommHooksError, RuntimeError):
    """The model is not wrapped, already has a hook or a foreign one, or no process group exists."""


class SlotTakenError(AttachError):
    """The model has a hook already, from a handle or from other code, and takes no second one.

    Attributes:
        by: name or expression of that hook, if it is known.
    """

    def __init__(self, message: str, by: str = "") -> None:
        super().__init__(message)
        self.by = by


class RankMismatchError(CommHooksError, RuntimeError):
    """The ranks of one group disagree on hook, options, versions, shapes or parameters. The message names them."""


class HookResultError(CommHooksError, RuntimeError):
    """A hook returned None, a wrong type, or a tensor of a wrong size, device or layout."""


class RemoteHookError(CommHooksError, RuntimeError):
    """A hook raised on another rank, so this rank's step has no valid gradient."""


class HookTimeoutError(CommHooksError, RuntimeError):
    """A collective did not complete within the deadline of `attach(..., timeout=...)`."""


class StateError(CommHooksError, ValueError):
    """A state cannot be bound, loaded or converted: format, parameter names, shapes or world size differ."""


class TransportError(CommHooksError, RuntimeError):
    """A collective failed or could not start: a peer is lost, the ranks disagree, or there is no group."""
