"""Hook expressions: `"bf16_wrapper(powersgd(rank=4))"` and its nested dict.

The dict is canonical. The string and the dict convert to each other without loss:

    {"hook": "bf16_wrapper", "config": {}, "inner": {"hook": "powersgd", "config": {"rank": 4}}}

A node has `hook` and `config`, and optionally

- `provider`: a distribution name, written `provider="acme"`;
- `inner`: the wrapped node, or a list of nodes;
- `rules`: a policy `[[pattern, node], ...]`, written `policy({"*.norm*": allreduce, "*": powersgd(rank=4)})`.

A plain dict of patterns to expressions, without the key `hook`, is short for such a policy. Values are int, float, bool,
None, str and lists of those. An option whose value is a hook, `diloco(exchange=quant4(rotation="none"))`, holds the
expression of this hook as a str, and may be written without quotes.

An expression only names registered hooks. The parser accepts a few `ast` node types and evaluates and imports nothing, so
expressions in config files and checkpoints are data.
"""

import ast
import difflib
import math
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ch_core import HookConfigError
from commhooks.registry.options import Value
from commhooks.registry.spec import legal_name

Node = dict[str, Any]
"""A canonical node. This module's docstring lists its keys."""

MAX_TEXT = 20_000
MAX_DEPTH = 16
_KEYS = ("hook", "provider", "config", "inner", "rules")
_PROVIDER = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\Z")
_PINNED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)/([a-z][a-z0-9_]*)\Z")
_LEGAL = "write a hook name, or name(inner, option=value)"


def canonical(expression: str | Mapping[str, Any]) -> Node:
    """Return the canonical node of an expression, of a node, or of a policy dict.

    Raises:
        HookConfigError: the problem, with a caret under it if the expression is a string.

    Example:
        >>> canonical("powersgd(rank=4)")
        {'hook': 'powersgd', 'config': {'rank': 4}}
        >>> canonical({"*.norm*": "allreduce", "*": "noop"})["rules"][0]
        ['*.norm*', {'hook': 'allreduce', 'config': {}}]
        >>> canonical("acme/topk")
        {'hook': 'topk', 'provider': 'acme', 'config': {}}
    """
    if isinstance(expression, str):
        return parse(expression)
    node = _from_mapping(expression, 0)
    if len(unparse(node)) > MAX_TEXT:
        raise HookConfigError(f"the expression is longer than {MAX_TEXT} characters when printed")
    return node


def unparse(node: Node) -> str:
    """Return the expression of a canonical node: `parse(unparse(node)) == node`.

    Example:
        >>> unparse(parse("bf16_wrapper( powersgd(rank = 4) )"))
        'bf16_wrapper(powersgd(rank=4))'
    """
    inner = node.get("inner", [])
    parts = [unparse(each) for each in (inner if isinstance(inner, list) else [inner])]
    if "rules" in node:
        rules = (f"{pattern!r}: {unparse(rule)}" for pattern, rule in node["rules"])
        parts.append("{" + ", ".join(rules) + "}")
    parts += [f"{name}={value!r}" for name, value in node["config"].items()]
    if "provider" in node:
        parts.append(f"provider={node['provider']!r}")
    return f"{node['hook']}({', '.join(parts)})" if parts else str(node["hook"])


def nodes(node: Node) -> list[Node]:
    """Return the node and all nodes inside it, outermost first.

    Example:
        >>> [n["hook"] for n in nodes(parse("bf16_wrapper(powersgd)"))]
        ['bf16_wrapper', 'powersgd']
    """
    inner = node.get("inner", [])
    children = list(inner) if isinstance(inner, list) else [inner]
    children += [rule for _, rule in node.get("rules", [])]
    return [node] + [found for child in children for found in nodes(child)]


def option_lines(node: Mapping[str, Any], path: str = "") -> list[str]:
    """Return a node as sorted lines, one for each level and option. Ranks compare them.

    Example:
        >>> option_lines(parse("powersgd(rank=4)"))
        ['config.rank = 4', "hook = 'powersgd'"]
    """
    lines = []
    for key, value in sorted(node.items()):
        here = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            lines += option_lines(value, here)
        elif isinstance(value, list | tuple) and any(isinstance(each, Mapping | list | tuple) for each in value):
            for number, each in enumerate(value):
                lines += option_lines(each if isinstance(each, Mapping) else {str(number): each}, f"{here}[{number}]")
        else:
            lines.append(f"{here} = {value!r}")
    return lines


# CPython 3.11 counts the depth of a syntax tree once for all threads. If a garbage collection inside ast.parse lets another
# thread parse, one of them raises SystemError.
_PARSING = threading.Lock()


def parse(text: str) -> Node:
    """Return the canonical node of an expression string.

    Raises:
        HookConfigError: with the bad part underlined.

    Example:
        >>> parse("bf16_wrapper(powersgd.rank)")
        Traceback (most recent call last):
        ...
        ch_core.errors.HookConfigError: bad hook expression: a dotted name is not a hook; ...
          bf16_wrapper(powersgd.rank)
                       ^^^^^^^^^^^^^
    """
    stripped = text.strip()
    if len(stripped) > MAX_TEXT:
        raise HookConfigError(f"the expression has {len(stripped)} characters; at most {MAX_TEXT} are read")
    if not stripped:
        raise HookConfigError(f"the hook expression is empty; {_LEGAL}")
    pinned = _PINNED.match(stripped)
    if pinned:
        return _node(pinned[2], provider=pinned[1])
    try:
        with _PARSING:
            tree = ast.parse(stripped, mode="eval")
    except SyntaxError as error:
        raise HookConfigError(_syntax_message(stripped, error)) from None
    except (ValueError, MemoryError, RecursionError) as error:  # null bytes, or nesting too deep
        raise HookConfigError(f"bad hook expression: it cannot be parsed ({error or type(error).__name__})") from None
    return _Reader(stripped).node(tree.body, 0)


def _syntax_message(text: str, error: SyntaxError) -> str:
    line = _lines(text)[(error.lineno or 1) - 1 : error.lineno or 1] or [""]
    caret = " " * (max(error.offset or 1, 1) - 1) + "^"
    return f"bad hook expression: {error.msg}; {_LEGAL}\n  {_shown(line[0])}\n  {caret}"


def _lines(text: str) -> list[str]:
    """Return the lines that ast counts. `str.splitlines` also breaks at a form feed and at seven other characters."""
    return re.split(r"\r\n|\r|\n", text)


def _shown(line: str) -> str:
    """Return a line in which a caret stands below its character: with a blank for a tab or another control character."""
    return "".join(one if one.isprintable() else " " for one in line)


def _node(hook: str, config: Mapping[str, Value] | None = None, *, provider: str | None = None, **rest: Any) -> Node:
    """Return a node with its keys in canonical order, without absent ones."""
    pinned = {} if provider is None else {"provider": provider}
    return {"hook": hook, **pinned, "config": dict(config or {}), **rest}


class _Reader:
    """Converts `ast` nodes into canonical nodes, and underlines the part that it refuses."""

    def __init__(self, text: str) -> None:
        self.lines = _lines(text)

    def fail(self, at: ast.AST, why: str) -> NoReturn:
        row = getattr(at, "lineno", 1) - 1
        line = self.lines[row]
        raw = line.encode()  # ast counts bytes, and the caret line needs characters
        start = len(raw[: getattr(at, "col_offset", 0)].decode())
        same_row = getattr(at, "end_lineno", row + 1) == row + 1
        end = len(raw[: getattr(at, "end_col_offset", None)].decode()) if same_row else len(line)
        raise HookConfigError(
            f"bad hook expression: {why}\n  {_shown(line)}\n  {' ' * start}{'^' * max(end - start, 1)}"
        )

    def node(self, tree: ast.expr, depth: int) -> Node:
        if depth >= MAX_DEPTH:
            self.fail(tree, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(tree, ast.Constant) and isinstance(tree.value, str) and depth:
            return _from_any(tree.value, depth)
        if isinstance(tree, ast.Name):
            return _node(self.name(tree))
        if isinstance(tree, ast.Attribute):
            self.fail(tree, f"a dotted name is not a hook; {_LEGAL}")
        if not isinstance(tree, ast.Call):
            self.fail(tree, f"expected a hook; {_LEGAL}")
        if not isinstance(tree.func, ast.Name):
            self.fail(tree.func, f"expected a hook name before '('; {_LEGAL}")
        rest = self.inside(tree.args, depth)
        config = self.config(tree.keywords)
        provider = config.pop("provider", None)
        if provider is not None and not (isinstance(provider, str) and _PROVIDER.match(provider)):
            self.fail(tree, f"provider={provider!r} is not a distribution name; write provider='their-package'")
        return _node(self.name(tree.func), config, provider=provider, **rest)

    def name(self, tree: ast.Name) -> str:
        if not legal_name(tree.id):
            self.fail(tree, f"{tree.id!r} is not a hook name: lower-case letters, digits and '_'")
        return tree.id

    def inside(self, args: Sequence[ast.expr], depth: int) -> Node:
        """Return the keys for the positional arguments: none, a policy's rules, one inner hook, or several."""
        if len(args) == 1 and isinstance(args[0], ast.Dict):
            return {"rules": self.rules(args[0], depth + 1)}
        for arg in args:
            if isinstance(arg, ast.Constant) and not isinstance(arg.value, str):
                self.fail(arg, "a positional argument is an inner hook; give values by name: option=value")
        inner = [self.node(arg, depth + 1) for arg in args]
        return {} if not inner else {"inner": inner[0] if len(inner) == 1 else inner}

    def rules(self, tree: ast.Dict, depth: int) -> list[list[Any]]:
        found: dict[str, Node] = {}
        for key, value in zip(tree.keys, tree.values, strict=True):
            if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                self.fail(key or value, "a policy maps quoted patterns of parameter names to hooks")
            if key.value in found:
                self.fail(key, f"the pattern {key.value!r} appears twice")
            found[key.value] = self.node(value, depth)
        if not found:
            self.fail(tree, "a policy needs at least one pattern")
        return [[pattern, node] for pattern, node in found.items()]

    def config(self, keywords: Sequence[ast.keyword]) -> dict[str, Value]:
        config: dict[str, Value] = {}
        for item in keywords:
            if item.arg is None or not legal_name(item.arg):
                self.fail(item.value if item.arg is None else item, "options are written name=value, in lower case")
            if item.arg in config:
                self.fail(item, f"the option {item.arg!r} is given twice")
            config[item.arg] = self.value(item.value, 0)
        return config

    def value(self, tree: ast.expr, depth: int) -> Value:
        sign, number = 1, tree
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, (ast.USub, ast.UAdd)):
            sign, number = (-1 if isinstance(tree.op, ast.USub) else 1), tree.operand
            if not (isinstance(number, ast.Constant) and type(number.value) in (int, float)):
                self.fail(tree, "only a number can have a sign")
        if isinstance(number, (ast.Tuple, ast.List)):
            return self.checked(tree, [self.value(item, depth + 1) for item in number.elts], depth)
        if isinstance(number, ast.Name) and number.id in ("inf", "nan"):
            self.fail(tree, f"{number.id} is not a value: numbers must be finite")
        if isinstance(number, ast.Name | ast.Call):
            return unparse(self.node(number, depth + 1))
        if not isinstance(number, ast.Constant):
            self.fail(tree, "values are numbers, quoted strings, True, False, None, and lists of those")
        return self.checked(tree, number.value if sign == 1 else -number.value, depth)  # type: ignore[operator]

    def checked(self, tree: ast.expr, value: Any, depth: int) -> Value:
        try:
            return _value(value, depth)
        except HookConfigError as error:
            self.fail(tree, str(error))


def _value(value: Any, depth: int = 0) -> Value:
    """Return `value` in canonical form, with lists for tuples.

    Raises:
        HookConfigError: the type or size is illegal.
    """
    if depth > MAX_DEPTH:
        raise HookConfigError(f"a value is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, (list, tuple)):
        return [_value(item, depth + 1) for item in value]
    if type(value) is int and abs(value) >= 2**63:
        raise HookConfigError(f"integers must fit in 64 bits; this one has {value.bit_length()} bits")
    if type(value) is float and not math.isfinite(value):
        raise HookConfigError(f"numbers must be finite, not {value}")
    if value is not None and type(value) not in (int, float, bool, str):
        raise HookConfigError(
            f"{type(value).__name__} is not a value: use numbers, strings, booleans, None, and lists of those"
        )
    return value  # type: ignore[no-any-return]


def _from_any(given: Any, depth: int) -> Node:
    if isinstance(given, str):
        return _checked_depth(parse(given), depth)
    if isinstance(given, Mapping):
        return _from_mapping(given, depth)
    raise HookConfigError(f"expected a hook expression or a dict, got {type(given).__name__}")


def _checked_depth(node: Node, depth: int) -> Node:
    """Return the node of a nested string. Its depth adds to the depth of its place."""
    inner = node.get("inner", [])
    children = (inner if isinstance(inner, list) else [inner]) + [rule for _, rule in node.get("rules", [])]
    if depth >= MAX_DEPTH:
        raise HookConfigError(f"nested deeper than {MAX_DEPTH} levels")
    for child in children:
        _checked_depth(child, depth + 1)
    return node


def _from_mapping(given: Mapping[Any, Any], depth: int) -> Node:
    if depth >= MAX_DEPTH:
        raise HookConfigError(f"nested deeper than {MAX_DEPTH} levels")
    if "hook" not in given:
        return _node("policy", rules=_from_rules(list(given.items()), depth))
    for key in given:
        if key not in _KEYS:
            close = difflib.get_close_matches(str(key), _KEYS, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise HookConfigError(f"unknown key {key!r} in {dict(given)!r:.200}; legal: {', '.join(_KEYS)}{hint}")
    hook, provider, config = given["hook"], given.get("provider"), given.get("config", {})
    if not (isinstance(hook, str) and legal_name(hook)):
        raise HookConfigError(f"{hook!r} is not a hook name: lower-case letters, digits and '_'")
    if provider is not None and not (isinstance(provider, str) and _PROVIDER.match(provider)):
        raise HookConfigError(f"provider={provider!r} is not a distribution name")
    if not isinstance(config, Mapping) or not all(isinstance(k, str) and legal_name(k) for k in config):
        raise HookConfigError(
            f"the config of {hook!r} must be a dict with lower-case option names, got {config!r:.200}"
        )
    if "provider" in config:
        raise HookConfigError(f"'provider' is a key of the node, not of its config: {dict(given)!r:.200}")
    if "inner" in given and "rules" in given:
        raise HookConfigError(f"{hook!r} has both 'inner' and 'rules'; a node has one of them")
    values = {key: _value(value) for key, value in config.items()}
    if "rules" in given:
        return _node(hook, values, provider=provider, rules=_from_rules(given["rules"], depth))
    if "inner" not in given:
        return _node(hook, values, provider=provider)
    inner = given["inner"]
    several = [_from_any(each, depth + 1) for each in (inner if isinstance(inner, (list, tuple)) else [inner])]
    if not several:
        raise HookConfigError(f"{hook!r} has an empty 'inner'; leave it out")
    return _node(hook, values, provider=provider, inner=several[0] if len(several) == 1 else several)


def _from_rules(rules: Any, depth: int) -> list[list[Any]]:
    if not isinstance(rules, list | tuple) or not all(isinstance(rule, list | tuple) for rule in rules):
        raise HookConfigError(f"the rules of a policy are a list of [pattern, hook] pairs, got {rules!s:.80}")
    pairs = [tuple(rule) for rule in rules]
    if not pairs:
        raise HookConfigError("a policy needs at least one pattern")
    if any(len(pair) != 2 or not isinstance(pair[0], str) for pair in pairs):
        raise HookConfigError(f"a policy maps patterns of parameter names to hooks, got {pairs!r:.200}")
    if len({pattern for pattern, _ in pairs}) != len(pairs):
        raise HookConfigError(f"a pattern appears twice in {[pattern for pattern, _ in pairs]!r:.200}")
    return [[pattern, _from_any(hook, depth + 1)] for pattern, hook in pairs]
