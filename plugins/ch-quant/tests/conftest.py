"""Collect ``triton_cases.py`` only if Triton is installed, because pytest reads every module for doctests."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("triton") else ["triton_cases.py"]
