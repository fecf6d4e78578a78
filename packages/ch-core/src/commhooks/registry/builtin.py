"""ch-core's own plugin: checks that every hook shares, the compositions, and lines for `env`."""

import importlib.util
import re
from collections.abc import Iterable, Mapping
from typing import Any

from commhooks.registry.hookspecs import hookimpl
from commhooks.registry.metadata import version
from commhooks.registry.specs import HookSpec, Param


@hookimpl
def commhooks_specs() -> Iterable[HookSpec]:
    """ch-core provides no hook of its own, but the ways of putting hooks together."""
    return (
        HookSpec(
            "warmup",
            "wrapper",
            "commhooks.compositions.warmup:warmup",
            "averages exactly, or runs a first hook, for a number of steps before the hook takes over",
            params={"steps": Param(1000, "steps before the last hook takes over", at_least=0)},
            capabilities=frozenset({"needs_warmup"}),
            example="warmup(powersgd(rank=4), steps=100)",
        ),
        HookSpec(
            "policy",
            "wrapper",
            "commhooks.compositions.policy:policy",
            "gives each parameter to the hook of the first pattern that its name matches",
            params={},
            example='policy({"*.bias": allreduce, "*": powersgd(rank=4)})',
        ),
        HookSpec(
            "error_feedback",
            "wrapper",
            "commhooks.compositions.error_feedback:error_feedback",
            "adds what a rank could not send to its next gradient, in fp32",
            params={},
            capabilities=frozenset({"stateful", "error_feedback", "checkpointable"}),
            example="error_feedback(bf16_compress)",
            paper="https://arxiv.org/abs/1901.09847",
        ),
    )


@hookimpl
def commhooks_check(spec: HookSpec, context: Mapping[str, Any]) -> list[str]:
    """Compare what a hook says it needs with what is known of the place it should run in."""
    problems = []
    for field, key in (("backends", "backend"), ("devices", "device"), ("dtypes", "dtype")):
        legal, given = getattr(spec.needs, field), context.get(key)
        if legal and given is not None and given not in legal:
            problems.append(f"{spec.name} needs {key} {' or '.join(legal)}, not {given}")
    present = version("torch")
    if spec.needs.torch and (present is None or _release(present) < _release(spec.needs.torch)):
        problems.append(f"{spec.name} needs torch >= {spec.needs.torch}, here is {present or 'none'}")
    for package in spec.needs.packages:
        if version(package) is None and importlib.util.find_spec(package.replace("-", "_")) is None:
            problems.append(f"{spec.name} needs the package {package}: pip install {package}")
    if context.get("backend") == "nccl" and context.get("device") == "cpu":
        problems.append(f"{spec.name} cannot reduce CPU gradients over nccl; use gloo")
    return problems


@hookimpl
def commhooks_env() -> Mapping[str, str]:
    """The versions a report about this project needs first."""
    return {name: version(name) or "not installed" for name in ("torch", "pluggy", "rich", "numpy")}


def _release(text: str) -> tuple[int, ...]:
    """The numbers of a version, without local or pre-release parts: `2.13.0+cpu` is (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", text)[0]))
