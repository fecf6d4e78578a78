"""Checks what ``commhooks run`` was told before anything trains."""

from commhooks.errors import HookConfigError
from commhooks.launch.settings import Settings
from commhooks.registry.builder import Builder
from commhooks.registry.expression import canonical, nodes


def check(settings: Settings) -> None:
    """Check names and options of every level of the expression; imports no torch, and no code of a hook.

    Raises:
        UnknownHookError, AmbiguousHookError, HookConfigError: what ``commhooks.create`` would say, but for what only the
            hook's own code can tell.
    """
    if not settings.hook:
        raise HookConfigError("no hook is given: --hook EXPR, or COMMHOOKS_HOOK=EXPR, e.g. 'powersgd(rank=4)'")
    builder = Builder()
    for node in nodes(canonical(settings.hook)):
        spec = builder.spec(node, "wrapper" if "inner" in node or "rules" in node else None)
        builder.config(spec, node["config"])
