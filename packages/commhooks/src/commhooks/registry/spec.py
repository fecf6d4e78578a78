"""Plain-data descriptions of hooks and commands, readable before any of their code is imported. Imports no torch.

A spec names its object by a string `"module:attribute"`. Plugins return specs from `commhooks_specs()`; discovery adds
`provider`, `version` and `origin`, which a plugin cannot choose.
"""

import argparse
import importlib.util
import keyword
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder

from ch_core import HookConfigError
from commhooks.registry.distributions import version
from commhooks.registry.options import Option, Value

API = 1
"""Version of the plugin interface that this commhooks supports."""

KINDS = ("reduction", "ddp", "fsdp", "wrapper", "outer")

GROUPS = {
    "exact": "exact averages",
    "16-bit": "16 bits per element",
    "low-bit": "1 to 8 bits per element",
    "low-rank": "low-rank factors",
    "sparse": "a part of the entries",
    "local": "averages less often, or never",
    "fsdp": "FSDP1 hook functions: for register_comm_hook, attach does not take them",
    "wrapper": "wrappers: put another hook inside",
    "outer": "outer optimizers: each rank trains alone between averages",
    "other": "other hooks",
}
"""Uses by which `commhooks list` groups hooks, in its order."""

CAPABILITIES = {
    "lossy": "changes the average by more than rounding",
    "stateful": "keeps a state between steps",
    "checkpointable": "saves its state in checkpoints",
    "error_feedback": "adds the unsent residual to the next gradient",
    "needs_warmup": "starts with plain averaging",
    "changes_dtype": "sends another dtype than the gradient's",
    "skips_sync": "leaves ranks with different gradients in some steps",
    "managed": "runs over a fault-tolerance manager",
}
"""Capabilities of hooks, with the words of `describe`."""

OWN_COMMANDS = ("list", "describe", "env")
"""Commands of commhooks itself. No package may take their names."""

SetUp = Callable[[argparse.ArgumentParser], Callable[[argparse.Namespace], int | None]]
"""A command: a function that adds its options to a parser and returns the function that runs with the parsed options.

The first line of its docstring is the command's help. The run returns an exit status; None is 0. `commhooks` prints a
CommHooksError of the run in one line, and hides the warnings of other libraries. A command that runs a user's script calls
`parser.set_defaults(runs_script=True)`, because exceptions and warnings of the script must pass through."""

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_COMMAND = re.compile(r"[a-z][a-z0-9_-]*\Z")
TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")


def legal_name(name: str) -> bool:
    """Return True if a hook or an option may have this name: lower case, and no Python keyword.

    Example:
        >>> [legal_name(n) for n in ("powersgd", "PowerSGD", "lambda", "2bit")]
        [True, False, False, False]
    """
    return bool(_NAME.match(name)) and not keyword.iskeyword(name)


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of a hook. An empty field requires nothing.

    Args:
        backends: process-group backends, e.g. `("nccl", "gloo")`.
        devices: device types, e.g. `("cuda",)`.
        dtypes: gradient dtypes, e.g. `("float32", "bfloat16")`.
        torch: oldest torch release, e.g. `"2.10"`.
        packages: distributions that its own package does not require.
    """

    backends: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    torch: str = ""
    packages: tuple[str, ...] = ()

    def unmet(self, name: str, place: Mapping[str, object]) -> list[str]:
        """Return one sentence for each requirement of the hook `name` that a place does not meet.

        Args:
            name: of the hook, for the sentences.
            place: any of `backend`, `device` and `dtype`. Missing keys are not checked.
        """
        problems = []
        for legal, key in ((self.backends, "backend"), (self.devices, "device"), (self.dtypes, "dtype")):
            given = place.get(key)
            names = _backends(given) if key == "backend" else {given}
            if legal and given is not None and not names.intersection(legal):
                problems.append(f"{name} needs {key} {' or '.join(legal)}, not {given}")
        present = version("torch")
        if self.torch and (present is None or _release(present) < _release(self.torch)):
            problems.append(f"{name} needs torch >= {self.torch}; installed is {present or 'none'}")
        for package in self.packages:
            if version(package) is None and importlib.util.find_spec(package.replace("-", "_")) is None:
                problems.append(f"{name} needs the package {package}: pip install {package}")
        if place.get("device") == "cpu" and _backends(place.get("backend"), "cpu") == {"nccl"}:
            problems.append(f"{name} cannot reduce CPU gradients over nccl; use gloo")
        return problems


def _backends(given: object, device: str = "") -> set[object]:
    """Return the backends in a name of ``init_process_group``, those for a device only if it names devices.

    >>> sorted(_backends("cpu:gloo,cuda:nccl")), _backends("cpu:gloo,cuda:nccl", "cpu"), _backends("nccl2")
    (['gloo', 'nccl'], {'gloo'}, {'nccl'})
    """
    pairs = [pair.rpartition(":") for pair in str(given).split(",")]
    names = [name for where, _, name in pairs if not device or where in ("", device)]
    return {"nccl" if name.startswith("nccl") else name for name in names}


def _release(text: str) -> tuple[int, ...]:
    """Return the numbers of a version without local and pre-release parts: `2.13.0+cpu` gives (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", text)[0]))


@dataclass(frozen=True, slots=True)
class HookSpec:
    """Description of one hook, wrapper, FSDP1 hook or outer optimizer.

    Args:
        name: lower case, letters, digits and `_`.
        kind: `"reduction"` (the target is called with the options and returns a Reduction, or it is a generator
            function `(bucket, ctx, **options)`), `"ddp"` (a function `(state, bucket) -> Future`), `"fsdp"` (FSDP1's
            `(state, grad[, output]) -> None`), `"wrapper"` (called as `wrapper(inner, **options)`), or
            `"outer"` (an outer optimizer, called as `outer(optimizer, model, **options)`).
        target: `"module:attribute"`, imported when the hook is used.
        summary: one line of at most 100 characters. `list` shows the docstring's first line if it is empty.
        hook: `"module:attribute"` of the plain DDP function that `commhooks.get` returns, if it is not the target.
        state: `"module:attribute"` of the state class with PyTorch's signature, if the hook takes one.
        options: by name. `None` reads them from the target's signature when the hook is created.
        capabilities: keys of `CAPABILITIES` that hold for every value of the options.
        needs: requirements.
        aliases: other names of the hook.
        example: a complete expression. The default is the bare name, or `name(allreduce)` for a wrapper.
        docs, paper: links that `describe` shows.
        api: version of the plugin interface.
        caution: one line on when not to use it, e.g. how its bytes grow with the ranks.
        group: a key of `GROUPS`. The default follows from the kind.
        recommended: True if `commhooks list` marks it as a first choice of its group.
        when: one line on when to use it.
        loss: one line on the training loss it costs, as measured.

    Raises:
        HookConfigError: naming the malformed field.

    Example:
        >>> HookSpec("topk", "reduction", "acme.topk:TopK", "sends the largest entries").example
        'topk'
        >>> HookSpec("TopK", "reduction", "acme.topk:TopK", "")
        Traceback (most recent call last):
        ...
        ch_core.errors.HookConfigError: bad name 'TopK': use lower-case letters, digits and '_', ...
    """

    name: str
    kind: str
    target: str
    summary: str
    hook: str | None = None
    state: str | None = None
    options: Mapping[str, Option] | None = field(default=None, hash=False)
    capabilities: frozenset[str] = frozenset()
    needs: Needs = Needs()
    aliases: tuple[str, ...] = ()
    example: str = ""
    docs: str = ""
    paper: str = ""
    api: int = API
    provider: str = ""
    version: str = ""
    origin: str = ""
    caution: str = ""
    group: str = ""
    recommended: bool = False
    when: str = ""
    loss: str = ""

    def __post_init__(self) -> None:
        for field_name in ("summary", "example", "docs", "paper", "caution", "group", "when", "loss"):
            if not isinstance(getattr(self, field_name), str):
                raise HookConfigError(
                    f"hook {self.name!r}: {field_name} is {getattr(self, field_name)!r:.80}, not a str"
                )
        if not isinstance(self.needs, Needs):
            raise HookConfigError(f"hook {self.name!r}: needs is {self.needs!r:.80}, not Needs(...)")
        for name in (*self.names, *(self.options or {})):
            if not legal_name(name):
                raise HookConfigError(
                    f"bad name {name!r}: use lower-case letters, digits and '_', a letter first, and no Python keyword"
                )
        _one_of(self.name, "kind", self.kind, KINDS)
        for target in (self.target, self.hook, self.state):
            if target is not None and not TARGET.match(target):
                raise HookConfigError(f"hook {self.name!r}: bad target {target!r}; write 'package.module:attribute'")
        brought = (option.brings for option in (self.options or {}).values())
        for word in sorted(self.capabilities.union(*brought)):
            _one_of(self.name, "capability", word, sorted(CAPABILITIES))
        if "provider" in (self.options or {}):
            raise HookConfigError(f"hook {self.name!r}: expressions reserve 'provider'; rename the option")
        if not self.example:
            object.__setattr__(self, "example", f"{self.name}(allreduce)" if self.kind == "wrapper" else self.name)
        if not self.group:
            object.__setattr__(self, "group", self.kind if self.kind in GROUPS else "other")
        _one_of(self.name, "group", self.group, list(GROUPS))

    @property
    def names(self) -> tuple[str, ...]:
        """The name, then the aliases."""
        return (self.name, *self.aliases)

    @property
    def id(self) -> str:
        """`provider/name`, which no other distribution can claim."""
        return f"{self.provider}/{self.name}"

    def capabilities_with(self, config: Mapping[str, Value]) -> frozenset[str]:
        """Return the capabilities of the hook with these options, the others at their defaults.

        Example:
            >>> feedback = Option(False, "keep the residual", brings=frozenset({"stateful"}))
            >>> spec = HookSpec("mine", "reduction", "acme.mine:Mine", "an example", options={"feedback": feedback})
            >>> [sorted(spec.capabilities_with(config)) for config in ({}, {"feedback": True})]
            [[], ['stateful']]
        """
        options = (self.options or {}).items()
        return self.capabilities.union(*(o.brings for name, o in options if config.get(name, o.default) not in o.off))

    def unusable(self) -> list[str]:
        """Return one sentence for each reason why the hook cannot be loaded here. Imports none of its code.

        Example:
            >>> HookSpec("mine", "reduction", "acme_missing.mine:Mine", "an example").unusable()
            ["its code 'acme_missing.mine:Mine' is not installed: there is no module acme_missing"]
        """
        targets = filter(None, (self.target, self.hook, self.state))
        lost = [(target, module) for target in targets if (module := missing_module(target))]
        found = [f"its code {target!r} is not installed: there is no module {module}" for target, module in lost]
        return found + self.needs.unmet(self.name, {})

    def sort_key(self) -> tuple[str, str, str]:
        """Return the key of lists, which is the same on every rank: kind, name, provider."""
        return self.kind, self.name, self.provider


def missing_module(target: str) -> str:
    """Return the first module in the path of a target `"module:attribute"` that cannot be found, or an empty string.

    It imports nothing, so a module that fails while it is imported counts as found.

    Example:
        >>> missing_module("json.decoder:JSONDecoder"), missing_module("json.no.such:thing")
        ('', 'json.no')
    """
    top, *inside = target.partition(":")[0].split(".")
    found = sys.modules[top].__spec__ if top in sys.modules else importlib.util.find_spec(top)
    if found is None and top not in sys.modules:
        return top
    for name in inside:
        if found is None or found.submodule_search_locations is None:  # a module that makes its own attributes
            return ""
        top = f"{top}.{name}"
        found = PathFinder.find_spec(top, found.submodule_search_locations)
        if found is None and top not in sys.modules:
            return top
    return ""


def _one_of(name: str, field: str, value: str, legal: "tuple[str, ...] | list[str]") -> None:
    if value not in legal:
        raise HookConfigError(f"hook {name!r}: unknown {field} {value!r}; legal: {', '.join(legal)}")


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand of `commhooks` that a package adds.

    Args:
        name: lower case, letters, digits, `-` and `_`.
        target: `"module:function"` of a :data:`SetUp` function.
        provider, version: of the distribution.

    Raises:
        HookConfigError: name or target is malformed, or commhooks itself has a command of this name.

    Example:
        >>> Command("list", "acme.show:main", "acme-hooks", "1.0")
        Traceback (most recent call last):
        ...
        ch_core.errors.HookConfigError: the command 'list' of acme-hooks has the name of one of commhooks' own ...
    """

    name: str
    target: str
    provider: str
    version: str

    def __post_init__(self) -> None:
        if self.name in OWN_COMMANDS:
            raise HookConfigError(
                f"the command {self.name!r} of {self.provider} has the name of one of commhooks' own "
                f"({', '.join(OWN_COMMANDS)}); rename the entry point"
            )
        if not _COMMAND.match(self.name):
            raise HookConfigError(
                f"bad command name {self.name!r}: use lower-case letters, digits, '-' and '_', a letter first"
            )
        if not TARGET.match(self.target):
            raise HookConfigError(
                f"command {self.name!r}: bad target {self.target!r}; write 'package.module:function', a function that "
                "adds options to an argparse parser and returns the function to run"
            )

    @property
    def id(self) -> str:
        """`provider/name`, which no other distribution can claim."""
        return f"{self.provider}/{self.name}"


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin, or one entry of it, that could not be used. The other plugins are unaffected.

    Attributes:
        dist, version: the distribution.
        entry: entry-point group and name.
        phase: `metadata` (of the distribution), `group` (an unknown entry-point group), `import`, `register`, `api`, `name`,
            or the function of the plugin that failed, such as `commhooks_specs`.
        error: one line.
        traceback: for the plugin's author.
    """

    dist: str
    version: str
    entry: str
    phase: str
    error: str
    traceback: str = field(default="", repr=False)

    def __str__(self) -> str:
        head = f"{self.dist} {self.version}".rstrip()
        return f"{head} ({self.entry}, {self.phase}): {self.error} (COMMHOOKS_DISABLE={self.dist} leaves it out)"
