"""Runs a script or a module as the interpreter does: `__main__`, `sys.argv`, `sys.path[0]`, and its own traceback."""

import os
import runpy
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def run(target: str, words: list[str], *, module: bool) -> dict[str, Any]:
    """Run a script and return its globals. Its exceptions pass through.

    Args:
        target: path of a script, or of a folder or archive with a `__main__`; with `module` a dotted name.
        words: arguments of the script.
        module: True to run a module, as `python -m` does.
    """
    before = sys.excepthook
    sys.excepthook = _without_own_frames(before)
    sys.argv = [target, *words]
    if module:
        _put_first(os.getcwd())
        return runpy.run_module(target, run_name="__main__", alter_sys=True)
    _put_first(os.path.dirname(os.path.abspath(target)))
    return runpy.run_path(target, run_name="__main__")


def _put_first(folder: str) -> None:
    if not sys.flags.safe_path if hasattr(sys.flags, "safe_path") else True:
        sys.path[0] = folder  # replaces the launcher's; `python script.py` does the same


def _without_own_frames(hook: Hook) -> Hook:
    """Return an excepthook that shows a traceback without the launcher's frames."""

    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        own = trace
        while own is not None and _is_ours(own):
            own = own.tb_next
        error.__traceback__ = own or trace
        hook(kind, error, own or trace)

    return shown


def _is_ours(trace: TracebackType) -> bool:
    name = trace.tb_frame.f_globals.get("__name__", "")
    package = trace.tb_frame.f_globals.get("__package__", "")
    launcher = name.startswith(("commhooks.launch", "commhooks.cli")) or name == "runpy" or package == "commhooks"
    return launcher or trace.tb_frame.f_code.co_filename.startswith("<frozen")
