"""Reads docstrings from source, without an import. A list must be fast, and must work while a package is broken."""

import ast
import functools
import importlib.util
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

IMPORTS = 3
"""Modules that are searched for an object that a module imports from another one."""


def first_line(target: str) -> str:
    """Return the first line of the docstring of a module, `"module"`, or of an object in it, `"module:attribute"`.

    The result is empty if there is no docstring or no source, and for an object that is neither a class nor a function.

    Example:
        >>> first_line("textwrap:dedent")
        'Remove any common leading whitespace from every line in `text`.'
    """
    module, _, path = target.partition(":")
    with suppress(Exception):  # no such module, a syntax error, or a finder of another package that raises
        return _docstring(module, path.split(".") if path else (), IMPORTS).partition("\n")[0].strip()
    return ""


def _docstring(module: str, path: Sequence[str], imports: int) -> str:
    file, tree = _source(module)
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef = tree
    for name in path:
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name == name:
                node = child
                break
            if isinstance(child, ast.ImportFrom) and node is tree and imports:
                for alias in child.names:
                    if (alias.asname or alias.name) == name:
                        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
                        source = importlib.util.resolve_name("." * child.level + (child.module or ""), package)
                        return _docstring(source, [alias.name, *path[1:]], imports - 1)
        else:
            return ""
    return ast.get_docstring(node) or ""


def _source(module: str) -> tuple[Path, ast.Module]:
    """Return the file and the syntax tree of a module.

    Raises:
        FileNotFoundError: it has no source.
    """
    top, *inner = module.split(".")
    found = importlib.util.find_spec(top)  # of a name without dots, it imports nothing
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    files = [Path(found.origin)] if found is not None and found.origin and not inner else []
    for folder in folders if inner else []:
        files += [Path(folder, *inner).with_suffix(".py"), Path(folder, *inner, "__init__.py")]
    for file in filter(Path.is_file, files):
        return file, _parsed(file)
    raise FileNotFoundError(module)


@functools.lru_cache(maxsize=32)
def _parsed(file: Path) -> ast.Module:
    with warnings.catch_warnings():  # such as of an invalid escape sequence, which an import prints only once
        warnings.simplefilter("ignore")
        return ast.parse(file.read_text(encoding="utf-8"))
