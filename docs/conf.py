"""Configure Sphinx. It reads the reference from the sources, so a build needs neither torch nor a network."""

import atexit
import re
import shutil
import tempfile
from pathlib import Path

project = "commhooks"
author = "the commhooks authors"
copyright = "2026, the commhooks authors"
html_title = "commhooks"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
extensions = ["myst_parser", "autoapi.extension", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "examples", "_navigation.md"]
myst_heading_anchors = 3

PUBLIC = (
    "commhooks",
    "commhooks.adapters",
    "commhooks.checkpoint",
    "commhooks.checkpoint.dcp",
    "ch_core",
    "ch_wrappers",
    "ch_trace",
    "ch_testing",
    "ch_ddp",
    "ch_fsdp",
    "ch_ft",
    "ch_outer",
    "ch_powersgd",
    "ch_quant",
    "ch_sparse",
    "ch_bench",
    "ch_bench.advise",
    "ch_bench.advise.command",
    "ch_bench.cost",
    "ch_bench.cost.bench",
)
"""Modules in the reference: those that users import or run. Each lists its exports."""


def readable_sources():
    """Yield copies of the packages in which autoapi finds the exported names.

    Packages import these names lazily, and list them under ``if TYPE_CHECKING``, which autoapi ignores. The copies have
    these imports at the top level.
    """
    folder = Path(tempfile.mkdtemp(prefix="commhooks-docs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for face in Path(__file__).parent.parent.glob("p*/*/src/*/__init__.py"):
        if face.parent.name != "ch_template":  # users copy and rename it
            copy = folder / face.parent.name
            shutil.copytree(face.parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
            for path in copy.rglob("__init__.py"):
                path.write_text(
                    re.sub(r"^if TYPE_CHECKING:\n((?:    .*\n|\n)+)", dedented, path.read_text(), flags=re.M)
                )
            yield copy.as_posix()


def dedented(match):
    """Return the body of an ``if``."""
    return re.sub(r"^    ", "", match[1], flags=re.M)


autoapi_dirs = sorted(readable_sources())
autoapi_root = "reference"
autoapi_options = ["members", "imported-members", "show-inheritance", "show-module-summary"]
autoapi_keep_files = False
autoapi_add_toctree_entry = False  # _navigation.md places it
# autoapi reads public names twice, because packages import them lazily, and warns of it.
suppress_warnings = ["autoapi.python_import_resolution", "ref.python", "docutils", "myst.header"]


def setup(app):
    """Connect the handlers below."""
    app.connect("autoapi-skip-member", not_public)
    app.connect("doctree-read", hide_records)
    app.connect("source-read", front_page)


def not_public(app, what, name, obj, skip, options):
    """Return True for a private module, and None to let autoapi decide."""
    return True if what in ("package", "module") and name not in PUBLIC else None


def hide_records(app, doctree):
    """Keep records out of the sidebar and of the search index. Pages link to them."""
    if app.env.docname.startswith("measured/"):
        app.env.metadata[app.env.docname] |= {"orphan": True, "nosearch": True}


INTRO = """\
```{include} ../README.md
:relative-docs: docs/
:relative-images:
:start-line: 2
:end-before: "## Install and check"
```
"""


def front_page(app, docname, source):
    """Put the README's first part and the navigation into index.md, which a hosting site shows without directives."""
    if docname == "index":
        text = re.sub(r"<!-- intro.*?<!-- end of intro -->\n", lambda _: INTRO, source[0], flags=re.S)
        text = text[: text.index("## Everything")]  # the navigation lists the same pages
        source[0] = text + Path(__file__).with_name("_navigation.md").read_text()
