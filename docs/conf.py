"""Sphinx: Markdown pages and a reference read from the sources, so that building needs neither torch nor a network."""

import atexit
import re
import shutil
import tempfile
from pathlib import Path

project = "commhooks"
author = "the commhooks authors"
html_title = "commhooks"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
extensions = ["myst_parser", "autoapi.extension", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "examples"]
myst_heading_anchors = 3

PUBLIC = (
    "commhooks",
    "commhooks.adapters",
    "commhooks.checkpoint",
    "commhooks.checkpoint.dcp",
    "commhooks.simulate",
    "commhooks.numerics",
    "commhooks.telemetry",
    "commhooks.testing",
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
    "ch_bench.compatibility",
    "ch_bench.compatibility.run",
    "ch_bench.convergence",
    "ch_bench.cost",
    "ch_bench.cost.bench",
    "ch_bench.outer",
    "ch_bench.outer.quality",
    "ch_bench.outer.race",
    "ch_bench.faults",
    "ch_bench.faults.ft_matrix",
    "ch_bench.links",
    "ch_bench.links.wire_bytes",
)
"""What the reference shows: the modules that a stranger imports from, or runs. Each lists what it exports."""


def readable_sources():
    """Copies of the packages in which autoapi sees the exported names.

    They are imported lazily, and named for type checkers under ``if TYPE_CHECKING``, which autoapi passes over: the copies
    have these imports at their top level.
    """
    folder = Path(tempfile.mkdtemp(prefix="commhooks-docs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for face in Path(__file__).parent.parent.glob("p*/*/src/*/__init__.py"):
        if face.parent.name != "ch_template":  # which nobody imports: it is copied and renamed
            copy = folder / face.parent.name
            shutil.copytree(face.parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
            for path in copy.rglob("__init__.py"):
                path.write_text(
                    re.sub(r"^if TYPE_CHECKING:\n((?:    .*\n|\n)+)", dedented, path.read_text(), flags=re.M)
                )
            yield copy.as_posix()


def dedented(match):
    """The body of an ``if``."""
    return re.sub(r"^    ", "", match[1], flags=re.M)


autoapi_dirs = sorted(readable_sources())
autoapi_root = "reference"
autoapi_options = ["members", "imported-members", "show-inheritance", "show-module-summary"]
autoapi_keep_files = False
autoapi_add_toctree_entry = False  # index.md places it
# Public names are imported lazily under TYPE_CHECKING; autoapi reads both places and warns of the double.
suppress_warnings = ["autoapi.python_import_resolution", "ref.python", "docutils"]


def setup(app):
    """Hide what is not public from the reference, and the dated records from the sidebar."""
    app.connect("autoapi-skip-member", not_public)
    app.connect("doctree-read", leave_out_of_sidebar)


def not_public(app, what, name, obj, skip, options):
    """Whether to leave an object out; None leaves the decision to autoapi."""
    return True if what in ("package", "module") and name not in PUBLIC else None


def leave_out_of_sidebar(app, doctree):
    """Records are linked from records.md and from the pages that use them; no table of contents lists them."""
    if app.env.docname.startswith("measured/"):
        app.env.metadata[app.env.docname]["orphan"] = True
