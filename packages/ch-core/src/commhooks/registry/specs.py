"""What a hook says about itself before any of its code is imported.

A `HookSpec` is plain data: the object it describes is named by a string `"module:attr"`, so that listing and
describing hooks never loads torch. Plugins return specs from `commhooks_specs()`; the host stamps `provider`,
`version` and `origin`, which a plugin cannot choose. This module imports the standard library only.
"""

import keyword
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from commhooks.errors import HookConfigError

API = 1
"""The plugin API this host speaks. A spec with another integer is refused with a sentence."""

KINDS = ("reduction", "ddp", "fsdp", "wrapper")
STABILITIES = ("stable", "experimental", "deprecated")
CAPABILITIES = frozenset(
    {
        "lossy",  # the averaged gradient differs from the exact one by more than rounding
        "stateful",  # carries something from step to step
        "error_feedback",  # adds what it did not send to the next step's gradient
        "needs_warmup",  # starts with plain averaging
        "checkpointable",  # its state has a state_dict
        "changes_dtype",  # sends another dtype than the gradient's
        "skips_sync",  # some steps leave the ranks with different gradients
        "managed",  # runs over a fault-tolerance manager
    }
)

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")

Scalar = int | float | bool | str | None
Value = Scalar | list["Value"]
"""What a parameter may hold: what JSON and the expression grammar both write without loss."""


def legal_name(name: str) -> bool:
    """True if `name` may be a hook's or a parameter's: lower case, no Python keyword (unparsable).

    Example:
        >>> [legal_name(n) for n in ("powersgd", "PowerSGD", "lambda", "2bit")]
        [True, False, False, False]
    """
    return bool(_NAME.match(name)) and not keyword.iskeyword(name)


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of a hook: its default, its meaning, and the values it accepts.

    The type is the default's; `int` is accepted where `float` is declared, `bool` is never taken for a
    number. Numbers are finite: NaN passes every comparison with a limit.

    Args:
        default: the value when none is given.
        doc: one line, with the unit.
        at_least, above, at_most: the accepted range of a number.
        choices: the accepted values, when they can be listed.
        brings: words of `CAPABILITIES` that are true of the hook only where this parameter is on (a value other than
            those in `off`).
        off: the values that bring nothing.
        optional: `None` is accepted too (implied by a default of `None`, which accepts any scalar otherwise).
        local: each rank may have its own value: neither messages nor results nor the state depend on it. Ranks are not
            compared by it, and a state that was kept with one value is loaded with any other.

    Example:
        >>> Param(1, "rank of P and Q", at_least=1).accepts()
        'an int >= 1'
    """

    default: Value
    doc: str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    choices: tuple[Scalar, ...] = ()
    optional: bool = False
    brings: frozenset[str] = frozenset()
    off: tuple[Scalar, ...] = (False, None)
    local: bool = False

    def accepts(self) -> str:
        """The accepted values, in words."""
        if self.choices:
            return "one of " + ", ".join(repr(choice) for choice in self.choices)
        kind = "a value" if self.default is None else f"{_article(type(self.default).__name__)}"
        limits = [
            f"{sign} {limit:g}"
            for sign, limit in ((">=", self.at_least), (">", self.above), ("<=", self.at_most))
            if limit is not None
        ]
        return kind + (" " + " and ".join(limits) if limits else "") + (" or None" if self.optional else "")

    def check(self, value: Value) -> Value:
        """`value` as the target receives it (an int given for a float becomes one).

        Raises:
            ValueError: with the accepted values; the caller adds the names of hook and parameter.
        """
        if value is None and (self.optional or self.default is None):
            return None
        if isinstance(self.default, float) and type(value) is int:
            value = float(value)
        if self.default is not None and type(value) is not type(self.default):
            raise ValueError(self.accepts())
        if self.choices and value not in self.choices:
            raise ValueError(self.accepts())
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            too_low = self.at_least is not None and value < self.at_least
            too_low = too_low or (self.above is not None and value <= self.above)
            if too_low or (self.at_most is not None and value > self.at_most) or not math.isfinite(value):
                raise ValueError(self.accepts())
        return value

    def checked(self, name: str, value: Value) -> Value:
        """:meth:`check` of a value that was given as ``name``.

        Raises:
            HookConfigError: with the name, the value, the accepted ones and the meaning.
        """
        try:
            return self.check(value)
        except ValueError:
            raise HookConfigError(f"{name}={value!r}: expected {self.accepts()} ({self.doc})") from None


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


@dataclass(frozen=True, slots=True)
class Needs:
    """What must be present for a hook to run; an empty field asks for nothing.

    Args:
        backends: process-group backends it works on, e.g. `("nccl", "gloo")`.
        devices: device types, e.g. `("cuda",)`.
        dtypes: gradient dtypes, e.g. `("float32", "bfloat16")`.
        torch: the oldest torch release, e.g. `"2.10"`.
        packages: distributions that must be installed besides its own requirements.
    """

    backends: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    torch: str = ""
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HookSpec:
    """One hook, wrapper or FSDP1 hook, as its provider describes it.

    Args:
        name: lower case, letters, digits and `_`.
        kind: `"reduction"` (the target, called with the config, gives a Reduction; or it is a generator
            function `(bucket, ctx, **config)`), `"ddp"` (a `(state, bucket) -> Future` function), `"fsdp"`
            (FSDP1's `(state, grad[, output]) -> None`), `"wrapper"` (called as `wrapper(inner, **config)`).
        target: `"module:attr"`, imported when the hook is asked for.
        summary: one line of at most 100 characters.
        hook: `"module:attr"` of the plain DDP callable that `commhooks.get` returns, if it is not the target.
        state: `"module:attr"` of the state class with PyTorch's signature, if the hook takes one.
        params: the parameters by name; `None` reads them from the target's signature when it is created.
        capabilities: words of `CAPABILITIES` that hold whatever the parameters are.
        needs: what must be present for it to run.
        aliases: other names it answers to.
        stability: `"stable"`, `"experimental"` or `"deprecated"`; `replaced_by` names the successor of the
            last.
        example: a complete expression; by default the bare name, or `name(allreduce)` for a wrapper.
        caution: when not to use it, in one line that `describe` shows, such as how its volume grows with the ranks.
        docs, paper: links shown by `describe`.
        api: the plugin API spoken, an integer.

    Raises:
        HookConfigError: a field is malformed; the message names it.

    Example:
        >>> HookSpec("topk", "reduction", "acme.topk:TopK", "sends the largest entries").example
        'topk'
        >>> HookSpec("TopK", "reduction", "acme.topk:TopK", "")
        Traceback (most recent call last):
        ...
        commhooks.errors.HookConfigError: bad hook name 'TopK': use lower-case letters, digits and '_', ...
    """

    name: str
    kind: str
    target: str
    summary: str
    hook: str | None = None
    state: str | None = None
    params: Mapping[str, Param] | None = field(default=None, hash=False)
    capabilities: frozenset[str] = frozenset()
    needs: Needs = Needs()
    aliases: tuple[str, ...] = ()
    stability: str = "stable"
    replaced_by: str | None = None
    example: str = ""
    docs: str = ""
    paper: str = ""
    api: int = API
    provider: str = ""
    version: str = ""
    origin: str = ""
    caution: str = ""

    def __post_init__(self) -> None:
        for name in (*self.names, *(self.params or {})):
            if not legal_name(name):
                raise HookConfigError(
                    f"bad hook name {name!r}: use lower-case letters, digits and '_', a letter first, "
                    "and no Python keyword"
                )
        _one_of(self.name, "kind", self.kind, KINDS)
        _one_of(self.name, "stability", self.stability, STABILITIES)
        for target in (self.target, self.hook, self.state):
            if target is not None and not _TARGET.match(target):
                raise HookConfigError(f"hook {self.name!r}: bad target {target!r}; write 'package.module:attribute'")
        brought = (param.brings for param in (self.params or {}).values())
        for word in sorted(self.capabilities.union(*brought)):
            _one_of(self.name, "capability", word, tuple(sorted(CAPABILITIES)))
        if "provider" in (self.params or {}):
            raise HookConfigError(f"hook {self.name!r}: 'provider' is reserved in expressions; rename the parameter")
        if not self.example:
            object.__setattr__(self, "example", f"{self.name}(allreduce)" if self.kind == "wrapper" else self.name)

    @property
    def names(self) -> tuple[str, ...]:
        """What it can be asked for by: the name, then the aliases."""
        return (self.name, *self.aliases)

    @property
    def id(self) -> str:
        """`provider/name`, which no other distribution can claim."""
        return f"{self.provider}/{self.name}"

    def capabilities_with(self, config: Mapping[str, Value]) -> frozenset[str]:
        """What holds of the hook with these parameters, the others at their defaults.

        Example:
            >>> brings = Param(False, "keep what was not sent", brings=frozenset({"stateful"}))
            >>> spec = HookSpec("mine", "reduction", "acme.mine:Mine", "an example", params={"feedback": brings})
            >>> [sorted(spec.capabilities_with(config)) for config in ({}, {"feedback": True})]
            [[], ['stateful']]
        """
        params = (self.params or {}).items()
        return self.capabilities.union(*(p.brings for name, p in params if config.get(name, p.default) not in p.off))

    def sort_key(self) -> tuple[str, str, str]:
        """Order of lists, the same on every rank: kind, name, provider."""
        return self.kind, self.name, self.provider


def _one_of(name: str, what: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise HookConfigError(f"hook {name!r}: unknown {what} {value!r}; legal: {', '.join(legal)}")


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin, or one entry of it, that could not be used; the others are unaffected.

    `phase` is where it stopped: `group` (an entry-point group nobody reads), `import`, `register`, `specs`,
    `api` or `name`. `error` is one line; `traceback` is for the author.
    """

    dist: str
    version: str
    entry: str
    phase: str
    error: str
    traceback: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.dist} {self.version} ({self.entry}, {self.phase}): {self.error}"
