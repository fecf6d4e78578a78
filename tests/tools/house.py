"""Check imports and rules of the source: `python tests/tools/house.py` prints every breach of a rule.

The program reads the sources and imports no module. An import counts everywhere, also in a function or under
TYPE_CHECKING. A name of a face (an `__init__.py` that re-exports) counts as a name of the module that defines it.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

ORDER = (  # ch-core: a module may import from its own line and from the lines below it
    "cli testing __main__",
    "launch",
    "api telemetry",
    "checkpoint",
    "fingerprint",
    "handle",
    "trace",
    "report",
    "simulate",
    "adapters",
    "engine",
    "compositions",
    "registry",
    "reduction",
    "state fsdp_states encoding param_table",
    "transport rounding",
    "digest numerics scratch shards agreement topology",
    "bucket device requests errors log sizes typing _lazy",
)
PACKAGES = (
    "ch_bench",
    "ch_fsdp ch_ft ch_outer ch_powersgd ch_quant ch_sparse ch_template",
    "ch_ddp",
    "commhooks",
)  # the same, of packages
READ_CHECKPOINTS = {("commhooks.state", "commhooks.checkpoint"), ("commhooks.handle", "commhooks.checkpoint")}
FACES = {  # public modules that are no packages
    "commhooks.checkpoint.dcp",
    "commhooks.errors",
    "commhooks.numerics",
    "commhooks.simulate",
    *(f"ch_ddp.frameworks.{name}" for name in ("accelerate", "fabric", "lightning", "ray", "transformers")),
}
FACTORIES = {  # torch's factories. Without dtype= and device= they obey set_default_dtype() and set_default_device()
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint"),
    *("randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}


class Import(NamedTuple):
    """One name that a module imports. `name` is empty for an import of the whole module."""

    path: Path
    line: int
    source: str
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.source} takes {self.module}{'.' if self.name else ''}{self.name}"


class House:
    """The packages and plugins of a tree.

    Args:
        root: the tree.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, Path] = {}
        for source in sorted(root.glob("p*/*/src")):
            for path in sorted(source.rglob("*.py")):
                parts = path.relative_to(source).with_suffix("").parts
                self.files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self.trees = {name: ast.parse(self.stub(path).read_text()) for name, path in self.files.items()}

    @staticmethod
    def stub(path: Path) -> Path:
        """Return the stub of a face, which lists its public names, or the module itself."""
        stub = path.with_suffix(".pyi")
        return stub if stub.exists() else path

    # -- imports

    def taken(self, name: str) -> Iterator[Import]:
        """Return this project's names that a module imports, as it writes them."""
        path = self.files[name].relative_to(self.root)
        for node in ast.walk(self.trees[name]):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name in self.files:
                        yield Import(path, node.lineno, name, alias.name, "")
            elif isinstance(node, ast.ImportFrom) and node.module in self.files and not node.level:
                for alias in node.names:
                    inside = f"{node.module}.{alias.name}"
                    whole = inside in self.files and alias.name not in self.defined(node.module)
                    yield Import(path, node.lineno, name, inside if whole else node.module, "" if whole else alias.name)

    def defined(self, name: str) -> set[str]:
        """Return the names that a module defines at its top level."""
        found: set[str] = set()
        for node in self.trees[name].body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign):
                found |= {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
        return found

    def home(self, module: str, name: str) -> str:
        """Return the module that defines a name of a face."""
        if not name or self.files[module].name != "__init__.py" or name in self.defined(module):
            return module
        for one in self.taken(module):
            if one.name == name and one.module != module:
                return self.home(one.module, name)
        return module

    @cached_property
    def arrows(self) -> dict[tuple[str, str], Import]:
        """Return (module, imported module) pairs, through faces. Faces themselves import nothing, because they stand
        for their names.
        """
        found: dict[tuple[str, str], Import] = {}
        for name in self.files:
            if not self.is_face(name):
                for one in self.taken(name):
                    target = self.home(one.module, one.name)
                    if target != name:
                        found.setdefault((name, target), one)
        return found

    def is_face(self, name: str) -> bool:
        return self.files[name].name == "__init__.py"

    @staticmethod
    def reads_checkpoints(source: str, target: str) -> bool:
        return any(source == a and (target + ".").startswith(b + ".") for a, b in READ_CHECKPOINTS)

    # -- the rules, each of which returns its breaches

    def against_the_order(self) -> list[str]:
        """Return imports against `ORDER` inside ch-core, or against `PACKAGES` between packages."""
        found = []
        for (source, target), one in self.arrows.items():
            above, below = self.level(source), self.level(target)
            if below < above and not self.reads_checkpoints(source, target):
                found.append(f"{one}: the order is {' > '.join(ORDER)}; {' > '.join(PACKAGES)}")
        return found

    def level(self, name: str) -> int:
        """Return the line of a module in the order. A module without a line is at the top, so that no module may import
        it.
        """
        parts = name.split(".")
        packages = next((i for i, line in enumerate(PACKAGES) if parts[0] in line.split()), -1)
        if parts[0] != "commhooks" or len(parts) == 1:
            return packages if parts[0] != "commhooks" else 100
        return 100 + next((i for i, line in enumerate(ORDER) if parts[1] in line.split()), -1)

    def circles(self) -> list[str]:
        """Return cycles of modules that import one another."""
        onward: dict[str, set[str]] = {}
        for source, target in self.arrows:
            if not self.reads_checkpoints(source, target):
                onward.setdefault(source, set()).add(target)
        reach = {name: self._reached(name, onward) for name in onward}
        groups = {frozenset(b for b in reach[a] if a in reach.get(b, ())) for a in reach if a in reach[a]}
        return [f"a circle: {', '.join(sorted(group))}" for group in sorted(groups, key=sorted)]

    @staticmethod
    def _reached(start: str, onward: dict[str, set[str]]) -> set[str]:
        seen: set[str] = set()
        rest = list(onward.get(start, ()))
        while rest:
            name = rest.pop()
            if name not in seen:
                seen.add(name)
                rest += onward.get(name, ())
        return seen

    def unexported(self) -> list[str]:
        """Return names that one package imports from another although no `__all__` of a public module lists them."""
        found = []
        for name in self.files:
            for one in self.taken(name):
                if one.module.split(".")[0] != name.split(".")[0] and not self.is_public(one.module, one.name):
                    found.append(str(one))
        return found

    def is_public(self, module: str, name: str) -> bool:
        package, _, last = module.rpartition(".")
        if not name:  # the module itself
            return not package or module in FACES or last in self.listed(package)
        return (module in FACES or self.is_face(module)) and name in self.listed(module)

    def listed(self, module: str) -> set[str]:
        """Return a module's `__all__`."""
        if module in self.trees and self.stub(self.files[module]).suffix == ".pyi":
            imports = [node for node in self.trees[module].body if isinstance(node, ast.ImportFrom)]
            return {alias.asname or alias.name for node in imports for alias in node.names}
        for node in self.trees[module].body if module in self.trees else ():
            if isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == ["__all__"]:
                return set(ast.literal_eval(node.value))
        return set()

    def path_edits(self) -> list[str]:
        """Return programs that change `sys.path`, themselves or in a program that they write."""
        edit = re.compile(r"\bsys\.path(\.(insert|append|extend)\(|\s*(\[[^\]]*\]\s*)?[+]?=[^=])|\bsite\.addsitedir\(")
        me = Path(__file__).name
        launcher = self.root / "packages/ch-core/src/commhooks/launch/script.py"  # acts like `python script.py`
        folders = ("packages", "plugins", "tests", "docs")
        files = [
            p
            for folder in folders
            for p in sorted((self.root / folder).rglob("*.py"))
            if p.name not in (me, f"test_{me}") and p != launcher
        ]
        return [
            f"{path.relative_to(self.root)}:{number}: {line.strip()}"
            for path in files
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if edit.search(line)
        ]

    def default_factories(self) -> list[str]:
        """Return calls of torch's factories that leave dtype or device to the user's defaults."""
        found = []
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
                    given = {keyword.arg for keyword in node.keywords}
                    missing = [f"{word}=" for word in ("dtype", "device") if not given & {word, "out", None}]
                    if ast.unparse(node.func.value) == "torch" and missing:
                        where = f"{self.files[name].relative_to(self.root)}:{node.lineno}"
                        found.append(f"{where}: torch.{node.func.attr}() without {' and '.join(missing)}")
        return found


RULES = ("against_the_order", "circles", "unexported", "path_edits", "default_factories")


def main() -> int:
    house = House(Path(__file__).resolve().parents[2])
    breaches = [(rule, breach) for rule in RULES for breach in getattr(house, rule)()]
    for rule, breach in breaches:
        print(f"{rule}: {breach.split(': the order is')[0]}")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
