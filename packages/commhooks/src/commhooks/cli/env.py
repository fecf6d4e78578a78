"""`env`: versions and plugins, for the head of an issue."""

import argparse
import difflib
import json
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

from ch_core import plain
from commhooks.registry.distributions import first_party
from commhooks.registry.registry import REGISTRY

VARIABLES = frozenset(
    "COMMHOOKS_" + name
    for name in (
        *("HOOK", "OUTER", "GATHER", "REPORT", "STATE", "STATE_EVERY", "MODULE_PATTERN", "LINK", "SINGLE_PROCESS"),
        *("CHECK_RANKS_EVERY", "ON_DRIFT", "TRACE", "REPORTS"),  # these and the ones above are read by ch-run
        *("STRICT", "DISABLE", "PLUGINS"),
        *("CONSTRAINTS", "SOAK_REPEATS", "SEED", "DRAW", "LOOPS_SEED"),  # of nox and of the project's tests
    )
)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable `COMMHOOKS_…` that nothing reads.

    >>> unknown_variables({"COMMHOOKS_HOK": "quant4", "COMMHOOKS_HOOK": "quant4"})
    ["the variable COMMHOOKS_HOK is unknown, and nothing reads it; did you mean 'COMMHOOKS_HOOK'?"]
    """
    made = []
    for name in sorted(environ):
        if name.startswith("COMMHOOKS_") and name not in VARIABLES:
            close = difflib.get_close_matches(name, sorted(VARIABLES), 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            made.append(f"the variable {name} is unknown, and nothing reads it{hint}")
    return made


def report() -> dict[str, Any]:
    """Return versions, devices, backends, plugins, failures and switches, with stable keys."""
    lines: dict[str, str] = {}
    for _, more in REGISTRY.ask("commhooks_env"):
        lines.update(more)
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "commhooks": first_party(),
        "packages": dict(sorted(lines.items())),
        "torch": _torch(),
        "providers": {spec.provider: spec.version for spec in REGISTRY.specs()},
        "plugins": {plugin.dist: plugin.version for plugin in REGISTRY.plugins()},
        "failures": [str(failure) for failure in REGISTRY.failures()],
        "skipped": REGISTRY.snapshot().skipped,
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("COMMHOOKS_")},
    }


def _torch() -> dict[str, Any]:
    """Return version, backends and devices of torch, or the error of its import."""
    try:
        import torch
        import torch.distributed as dist

        from ch_core import device_names
    except (
        Exception,
        SystemExit,
    ) as error:  # a bad COMMHOOKS_HOOK exits. The report is needed most when torch is broken
        return {"error": f"{type(error).__name__}: {error}"}
    found: dict[str, Any] = {"version": str(torch.__version__), "distributed": dist.is_available()}
    if dist.is_available():
        backends = {
            "gloo": dist.is_gloo_available,
            "nccl": dist.is_nccl_available,
            "mpi": dist.is_mpi_available,
        }
        found["backends"] = [name for name, present in backends.items() if present()]
    found["cuda"] = torch.version.cuda
    found["devices"] = device_names()
    return found


def env(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Print versions and plugins, as a block for an issue."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return run


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Return 1 if a plugin failed or torch cannot be imported."""
    found = report()
    bad = bool(found["failures"]) or "error" in found["torch"]
    if arguments.json:
        print(json.dumps(found, indent=2))
        return int(bad)
    print("copy from here\n```")
    for key, value in _without_repetition(found).items():
        if isinstance(value, dict) and value:
            print(f"{key}:")
            for label, each in value.items():
                print(f"  {label}: {_text(each)}")
        else:
            print(f"{key}: {_text(value)}")
    print("```")
    return int(bad)


def _without_repetition(found: dict[str, Any]) -> dict[str, Any]:
    """Return the report for people, with each version once. JSON has all keys."""
    others = {**found["providers"], **found["plugins"]}
    shown: dict[str, Any] = {}
    for key, value in found.items():
        if key == "packages":
            shown["packages of others"] = {name: each for name, each in value.items() if name != "torch"}
        elif key == "plugins":
            shown["plugins of others"] = {dist: each for dist, each in others.items() if dist not in found["commhooks"]}
        elif key != "providers":
            shown[key] = value
    shown["environment"] = found["environment"] or "no variable COMMHOOKS_* is set"
    return shown


def _text(value: object) -> str:
    """Return a value in one line; "none" if it is empty."""
    text = "; ".join(map(str, value)) if isinstance(value, list) else str(value)
    return "none" if value in (None, "", [], {}) else plain(text)
