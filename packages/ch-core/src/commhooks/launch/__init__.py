"""``python -m commhooks run``: a hook on the models of a script that knows nothing of it.

Nothing of this is imported unless a hook is asked for, by the command or by ``COMMHOOKS_HOOK``. :mod:`~commhooks.launch.door`
waits for the wrappers that packages name (``commhooks_wraps``) to be imported, and has every model that they make announce
its first forward; :mod:`~commhooks.launch.session` attaches the hook then, before the first backward. After that, nothing
of this is called in a step.
"""
