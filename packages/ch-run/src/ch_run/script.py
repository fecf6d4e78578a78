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
    """Return an excepthook that shows a traceback as the interpreter would, without the frames of the launcher."""

    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        own = trace
        while own is not None and own.tb_frame.f_code is not run.__code__:  # a console script adds frames before it
            own = own.tb_next
        if own is not None:
            trace = own.tb_next
            while trace is not None and _is_the_interpreters(trace):
                trace = trace.tb_next
        error.__traceback__ = trace  # None for a script that does not compile
        hook(kind, error, trace)

    return shown


def _is_the_interpreters(trace: TracebackType) -> bool:
    code = trace.tb_frame.f_code
    return trace.tb_frame.f_globals.get("__name__") == "runpy" or code.co_filename.startswith("<frozen")
