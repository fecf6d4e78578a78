"""The site builds without warnings, its reference has every public name with its signature, and its code fits a page."""

import html
import importlib
import inspect
import re
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest

from .test_repo import IMPORTS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BUILT = DOCS / "_build" / "html"
sys.path.insert(0, str(DOCS))

import reference  # noqa: E402

PAGES = [*DOCS.glob("*.md"), *DOCS.glob("packages/*.md"), *ROOT.glob("*.md"), *ROOT.glob("p*/*/README.md")]
SIGNATURE = re.compile(r'<dt class="sig sig-object py" id="([\w.]+)">\n(.*?)</dt>', re.DOTALL)
PARAMETER = '<em class="sig-param">'
LONGEST = 88
WITHOUT_EXAMPLE = {
    "commhooks.ReduceScatter",
    "commhooks.plain_engine",
    "commhooks.refresh",
    "commhooks.gather",
    "commhooks.load_gathered",
    "ch_core.StepOutcome",
    "ch_core.CpuTuning",
    "commhooks.registry.hookspecs.commhooks_wraps",
    "ch_core.FarTransport",
    "ch_core.group_timeout",
    "ch_ddp.allreduce_hook",
    "ch_ddp.fp16_compress_hook",
    "ch_ddp.noop_hook",
    "ch_ddp.ModelAverager",
    "ch_ddp.fp16_compress",
    "ch_ddp.DDPCommHookType",
    "ch_ddp.bf16_compress_wrapper",
    "ch_fsdp.allreduce_hook",
    "ch_fsdp.fp16_compress_hook",
    "ch_fsdp.reduce_scatter_hook",
    "ch_powersgd.batched_powerSGD_hook",
    "ch_quant.quantize_per_channel",
    "ch_quant.quantize_per_tensor",
    "ch_quant.quantization_perchannel_hook",
    "ch_quant.quantization_pertensor_hook",
    "ch_quant.quant2",
    "ch_outer.Members",
    "ch_outer.plain_sgd",
    "ch_outer.streaming_diloco",
    "ch_testing.mean_residuals",
    "ch_testing.Ranks",
}
"""Names that a page mentions, and that have no example. Remove a name when it has one, and add none."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site."""
    command = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path_factory.mktemp("doctrees"))]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *command, str(DOCS), str(BUILT)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return BUILT


def shown(site: Path, module: str) -> str:
    return (site / "reference" / module.replace(".", "/") / "index.html").read_text()


def words(markup: str) -> str:
    return html.unescape(re.sub("<[^>]*>", "", markup))


def parameters(value: object) -> list[inspect.Parameter]:
    """Return the parameters of a function, or of a class that takes its own."""
    if not inspect.isroutine(value) and (not inspect.isclass(value) or issubclass(value, BaseException | Enum)):
        return []
    try:
        found = list(inspect.signature(value).parameters.values())  # type: ignore[arg-type]
    except ValueError:  # a class that has the constructor of a type in C
        return []
    return [] if [each.name for each in found] == ["args", "kwargs"] else found  # overloads show others


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_public_name_has_its_signature(site: Path) -> None:
    pages = {module: shown(site, module) for module in reference.MODULES}
    signatures = {name: markup for page in pages.values() for name, markup in SIGNATURE.findall(page)}
    missing, entries = [], 0
    for module, page in pages.items():
        for name in reference.public_names(module):
            markup = signatures.get(str(name))
            if markup is None:
                linked = [target for target in signatures if target.endswith(f".{name.name}") and f'#{target}"' in page]
                missing += [] if linked else [f"{name}: no entry and no link"]
                continue
            entries += 1
            present = [words(PARAMETER + each).strip() for each in markup.split(PARAMETER)[1:]]
            for parameter in parameters(name.value):
                given = next((each for each in present if re.match(rf"\**{parameter.name}\b", each)), None)
                if given is None:
                    missing.append(f"{name}: no parameter {parameter.name}")
                elif parameter.annotation is not parameter.empty and ":" not in given:
                    missing.append(f"{name}: no type of {parameter.name}")
                elif parameter.default is not parameter.empty and "=" not in given:
                    missing.append(f"{name}: no default of {parameter.name}")
    print(f"{entries} entries with a signature, {len(missing)} without")
    assert not missing, "\n".join(missing)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_name_that_pages_describe_has_an_example(site: Path) -> None:
    """It is in the docstring of the name or of a member, or a page uses the name. Errors are on the page of errors."""
    lacking = []
    for module in reference.MODULES:
        page = shown(site, module)
        for name in reference.public_names(module):
            used, mentioned = reference.pages_with(name.name)
            entry = page.partition(f'id="{name}"')[2].partition("\n</dd></dl>")[0]
            error = inspect.isclass(name.value) and issubclass(name.value, Exception)
            example = "&gt;&gt;&gt;" in entry or used or (error and "errors" in mentioned)
            if mentioned and entry and callable(name.value) and not example:
                lacking.append(str(name))
    assert set(lacking) == WITHOUT_EXAMPLE


def test_every_face_is_in_the_reference() -> None:
    faces = {face for face in IMPORTS.values() if getattr(importlib.import_module(face), "__all__", [])}
    assert faces <= set(reference.MODULES)


@pytest.mark.parametrize("module", reference.MODULES)
def test_navigation_has_the_page_of(module: str) -> None:
    assert f"{module} <reference/{module.replace('.', '/')}/index>\n" in (DOCS / "_navigation.md").read_text()


def test_pages_include_no_others() -> None:
    """A hosting site shows the directive instead of the other file."""
    assert not [path.name for path in PAGES if path.name != "_navigation.md" and "```{" in path.read_text()]


def wide(path: Path) -> list[str]:
    """Return the lines of code on a page that are longer than a page shows without scrolling."""
    code = reference.BLOCK.findall(path.read_text())
    return [line for _, block in code for line in block.splitlines() if len(line) > LONGEST]


def test_code_fits() -> None:
    found = {path.relative_to(ROOT).as_posix(): wide(path) for path in PAGES}
    assert not any(found.values()), found
