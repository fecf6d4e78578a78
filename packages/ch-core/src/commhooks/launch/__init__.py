"""`python -m commhooks run`: attaches a hook to the models of a training script that does not know this library.

Nothing of this package is imported unless the command or `COMMHOOKS_HOOK` asks for a hook.

1. :mod:`~commhooks.launch.import_watch` waits for the import of torch and of the wrappers that packages name.
2. :mod:`~commhooks.launch.first_forward` makes each wrapped model report its first forward with gradients.
3. :mod:`~commhooks.launch.auto_attach` attaches the hook there, before the first backward, and reports at the end.
4. :mod:`~commhooks.launch.state_folder` writes the hook's state with `--state`, and resumes it.

After the first forward a step runs no code of this package, unless `--state` is set.
"""
