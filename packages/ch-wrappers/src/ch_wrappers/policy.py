"""Policy: a hook for each parameter by name, as plain configuration.

``{"*.norm*": "allreduce", "*.bias": "allreduce", "*": "powersgd(rank=4)"}``. The hooks of a bucket run together. Their
requests of one stage travel as one tuple, and all-reduces of one dtype as one message. A policy therefore has as many rounds as
its longest hook.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from ch_core import log, parallel, payload_bytes
from commhooks import (
    Bucket,
    BucketLayout,
    Composite,
    HookConfigError,
    ParamLayout,
    Reduction,
    Shards,
    Stages,
    StepContext,
    Weights,
    composed,
)


def matches(name: str, pattern: str) -> bool:
    """Return True if a parameter's full name matches a shell pattern. A leading ``*.`` includes the top level.

    A shard of a parameter (``"w[0/2]"``) matches the patterns of the parameter.

    >>> [matches(n, "*.bias") for n in ("layers.0.bias", "bias", "bias.weight", "layers.0.bias[1/2]")]
    [True, True, False, True]
    """
    name = name.partition("[")[0]
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase("." + name, pattern)


class Policy(Composite):
    """Reductions by pattern of parameter name. The first pattern that matches wins.

    Each part sees a sub-bucket of its parameters and keeps their state under their names. Two parts of one kind share
    no state.

    Args:
        rules: ``(pattern, reduction)``, in order of precedence.
    """

    name = "policy"

    def __init__(self, rules: Sequence[tuple[str, Reduction]]) -> None:
        if not rules:
            raise HookConfigError("a policy needs at least one pattern, for example {'*': 'allreduce'}")
        super().__init__(*(part for _, part in rules))
        self.piece_bytes = self.pieces_of_parts()
        self.rules = tuple(rules)
        self.name = f"policy({{{', '.join(f'{pattern!r}: {part.name}' for pattern, part in rules)}}})"
        self._groups: dict[BucketLayout, dict[int, frozenset[str]]] = {}

    def node(self) -> dict[str, Any]:
        return {"hook": self.hook, "config": {}, "rules": [[pattern, part.node()] for pattern, part in self.rules]}

    def rule(self, name: str) -> int:
        """Return the number of the first rule that matches a parameter.

        Raises:
            HookConfigError: no pattern matches its name.
        """
        for number, (pattern, _) in enumerate(self.rules):
            if matches(name, pattern):
                return number
        raise HookConfigError(
            f"no pattern of the policy matches the parameter {name!r}; it has "
            f"{[pattern for pattern, _ in self.rules]}. Add one, or '*' as the last for all that remain"
        )

    def groups(self, layout: BucketLayout) -> dict[int, frozenset[str]]:
        """Return the names of the parameters of each rule, in the order of the rules. Rules without any are left out."""
        found = self._groups.get(layout)
        if found is None:
            names: dict[int, set[str]] = {}
            for p in layout.params:
                names.setdefault(self.rule(p.name), set()).add(p.name)
            found = self._groups[layout] = {number: frozenset(names[number]) for number in sorted(names)}
        return found

    def payload(self, layout: BucketLayout, ctx: StepContext) -> dict[str, int]:
        """Return the bytes per step and rank that the hook of each pattern gives to collectives."""
        return {
            self.rules[number][0]: payload_bytes(self.rules[number][1].plan(layout.select(names), ctx))
            for number, names in self.groups(layout).items()
        }

    def part_for(self, param: ParamLayout, step: int) -> Reduction:
        return self.parts[self.rule(param.name)]

    def keeps_equal(self, name: str) -> bool:
        part = next((part for pattern, part in self.rules if matches(name, pattern)), None)
        return part is None or part.keeps_equal(name)  # no rule matches a frozen parameter

    def check(self, layout: BucketLayout) -> None:
        unmatched = [p.name for p in layout.params if not any(matches(p.name, pattern) for pattern, _ in self.rules)]
        if unmatched:
            raise HookConfigError(
                f"no pattern of the policy matches {', '.join(unmatched[:10])}{' …' if len(unmatched) > 10 else ''}; "
                f"it has {[pattern for pattern, _ in self.rules]}. Add one, or '*' as the last for all that remain"
            )
        used = self.groups(layout)
        for number, (pattern, part) in enumerate(self.rules):
            if number in used:
                part.check(layout.select(used[number]))
            else:
                log.warning("the policy's pattern %r is the first match of no parameter of this model", pattern)

    def run(self, bucket: Bucket, ctx: StepContext) -> Stages:
        parts = []
        for number, names in self.groups(bucket.layout).items():
            sent = ctx.sent.select(names) if ctx.sent is not None else None
            parts.append(self.parts[number].start(bucket.select(names), ctx.child(f"rule {number}", sent=sent)))
        return parallel(*parts)

    def run_scatter(self, shards: Shards, ctx: StepContext) -> Stages:
        groups = self.groups(shards.layout.part).items()
        return parallel(
            *(self.parts[n].start_scatter(shards.select(names), ctx.child(f"rule {n}")) for n, names in groups)
        )

    def gather_weights(self, weights: Weights, ctx: StepContext) -> Stages:
        groups = self.groups(weights.layout.part).items()
        return parallel(
            *(self.parts[n].start_gather_weights(weights.select(names), ctx.child(f"rule {n}")) for n, names in groups)
        )


def policy(rules: Mapping[str, Any] | Sequence[tuple[str, Any]]) -> Any:
    """Treat each parameter by the hook of the first pattern that matches its name.

    Args:
        rules: pattern -> reduction, in order of precedence. By name, write
            ``commhooks.create({"*.bias": "allreduce", "*": "powersgd(rank=4)"})``.

    Raises:
        HookConfigError: no rule, or a foreign hook. At attach, if no pattern matches a parameter.

    Example:
        >>> from commhooks import BucketLayout, Plain, StepContext
        >>> from ch_wrappers import WireCast
        >>> mixed = policy({"*.bias": Plain(), "*": WireCast(Plain(), "fp16")})
        >>> mixed.payload(BucketLayout.of_shapes({"up.weight": (4, 4), "up.bias": (4,)}), StepContext(world_size=2))
        {'*.bias': 16, '*': 32}
    """
    pairs = list(rules.items()) if isinstance(rules, Mapping) else [(pattern, hook) for pattern, hook in rules]
    patterns = [pattern for pattern, _ in pairs]
    return composed(
        "policy", [hook for _, hook in pairs], lambda parts: Policy(list(zip(patterns, parts, strict=True)))
    )
