"""Write the pages of the reference: one for each package and each module that users import.

A page has an entry for every public name, with the signature and the docstring of the installed package, and links to the
pages that use the name. Two modules may have one name. The entry is then on the first page, and the others link to it.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

MODULES = (
    "commhooks",
    "commhooks.adapters",
    "commhooks.checkpoint",
    "commhooks.checkpoint.dcp",
    "commhooks.registry.hookspecs",
    "ch_core",
    "ch_wrappers",
    "ch_ddp",
    "ch_ddp.frameworks.accelerate",
    "ch_ddp.frameworks.fabric",
    "ch_ddp.frameworks.lightning",
    "ch_ddp.frameworks.ray",
    "ch_ddp.frameworks.transformers",
    "ch_fsdp",
    "ch_ft",
    "ch_powersgd",
    "ch_quant",
    "ch_sparse",
    "ch_outer",
    "ch_trace",
    "ch_testing",
)
"""Modules in the reference. `_navigation.md` lists their pages."""

DOCS = Path(__file__).parent
BLOCK = re.compile(r"^```+(\w*)\n(.*?)^```+$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")


class Name(NamedTuple):
    """A public name of a module."""

    module: str
    name: str
    value: Any
    home: str  # the module that defines it

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@cache
def imports(module: str) -> dict[str, str]:
    """Return the names that a module, or the stub of a package, imports, each with the module that it comes from."""
    path = Path(str(import_module(module).__file__))
    stub = path.with_suffix(".pyi")
    body = ast.parse((stub if stub.exists() else path).read_text()).body
    return {alias.name: str(node.module) for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}


def home(module: str, name: str, value: Any) -> str:
    """Return the module that defines a name."""
    if inspect.isclass(value) or inspect.isroutine(value):
        return str(value.__module__)
    while (source := imports(module).get(name)) is not None:
        module = source
    return module


def public_names(module: str) -> list[Name]:
    """Return the public names of a module: those of `__all__`, or the functions and classes that it defines."""
    loaded = import_module(module)
    names = getattr(loaded, "__all__", None)
    if names is None:
        own = {key: value for key, value in vars(loaded).items() if inspect.isclass(value) or inspect.isfunction(value)}
        names = [key for key, value in own.items() if value.__module__ == module and not key.startswith("_")]
    found = ((name, getattr(loaded, name)) for name in names)
    return [
        Name(module, name, value, home(module, name, value))
        for name, value in found
        if not isinstance(value, ModuleType)
    ]


@cache
def code_of_pages() -> dict[str, tuple[str, list[str]]]:
    """Return the Python blocks of each page, and its other code: pieces in a line and blocks of other languages."""
    found = {}
    for path in sorted([*DOCS.glob("*.md"), *DOCS.glob("packages/*.md")]):
        text = path.read_text()
        blocks = BLOCK.findall(text)
        python = "\n".join(block for language, block in blocks if language in ("py", "python"))
        spans = SPAN.findall(BLOCK.sub("", text)) + [
            block for language, block in blocks if language not in ("py", "python")
        ]
        found[path.relative_to(DOCS).with_suffix("").as_posix()] = python, spans
    return found


def pages_with(name: str) -> tuple[list[str], list[str]]:
    """Return the pages whose Python blocks use a name, and the pages that mention it in other code.

    A name of lower-case letters alone, such as `size`, may be any word. It counts only after the name of its module, in an
    import, or as a call.
    """
    qualified = rf"(?:commhooks|ch_\w+)\.(?:\w+\.)*{name}\b|\b(?:from (?:commhooks|ch_)\S+ )?import (?:.*\W)?{name}\b"
    pattern = re.compile(qualified if re.fullmatch("[a-z]+", name) else rf"(?<![\w.]){name}\b|{qualified}")
    used, mentioned = [], []
    for page, (python, spans) in code_of_pages().items():
        if pattern.search(python):
            used.append(page)
        elif any(pattern.search(span) or re.match(rf"{name}\(", span) for span in spans):
            mentioned.append(page)
    return used, mentioned


def definition(name: Name) -> tuple[str, str]:
    """Return the value and the docstring of a constant or an alias of a type, from the source of its module."""
    body = ast.parse(inspect.getsource(import_module(name.home))).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name.name for target in targets):
            told = after.value if isinstance(after, ast.Expr) else None
            text = told.value if isinstance(told, ast.Constant) and isinstance(told.value, str) else ""
            return ast.unparse(node.value), inspect.cleandoc(text)
    raise LookupError(f"{name.home} does not assign {name.name}")


def entry(name: Name) -> Iterator[str]:
    """Yield the lines of a name's entry."""
    used, mentioned = pages_with(name.name)
    pages = [f":doc:`/{page}`" for page in [*used, *mentioned][:5]]
    text = [f"{'Used' if used else 'Mentioned'} in {', '.join(pages)}."] if pages else []
    if inspect.isclass(name.value):
        kind = "exception" if issubclass(name.value, BaseException) else "class"
        yield from (
            f".. auto{kind}:: {name}",
            "   :members:",
            *["   :show-inheritance:"] * (name.value.__bases__ != (object,)),
        )
    elif inspect.isroutine(name.value):
        yield f".. autofunction:: {name}"
    else:
        value, told = definition(name)
        yield from (f".. py:data:: {name.name}", f"   :value: {value if len(value) < 200 else value[:200] + '…'}")
        text = [*told.splitlines(), "", *text]
    yield from ("", *(f"   {line}" for line in text), "")


def page(module: str, before: dict[tuple[str, str], Name]) -> str:
    """Return the page of a module. `before` maps a definition to its name on an earlier page, and gets those of this page."""
    groups: dict[str, list[Name]] = {"Used in the documentation": [], "Other names": []}
    links = []
    for name in sorted(public_names(module), key=lambda each: each.name.lower()):
        first = before.setdefault((name.home, name.name), name)
        if first is name:
            groups["Used in the documentation" if any(pages_with(name.name)) else "Other names"].append(name)
        else:
            links.append(f":py:obj:`{name} <{first}>`")
    lines = [module, "=" * len(module), "", f".. automodule:: {module}", ""]
    for title, names in groups.items():
        if names:
            lines += [title, "-" * len(title), ""]
            if title == "Other names":
                lines += [
                    "No page uses these names. Most are types of arguments and results, or serve other packages.",
                    "",
                ]
            for name in names:
                lines += entry(name)
    if links:
        title = "Described on another page"
        lines += [title, "-" * len(title), "", ", ".join(links) + ".", ""]
    return "\n".join(lines)


def write(folder: Path) -> None:
    """Write all pages below a folder. A page that has not changed keeps its time, so that Sphinx does not read it again."""
    before: dict[tuple[str, str], Name] = {}
    for module in MODULES:
        path = folder / module.replace(".", "/") / "index.rst"
        text = page(module, before)
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
