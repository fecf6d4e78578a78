"""Sphinx: Markdown pages and a reference read from the sources, so that building needs neither torch nor a network."""

project = "commhooks"
author = "the commhooks authors"
html_title = "commhooks"
html_theme = "furo"
extensions = ["myst_parser", "autoapi.extension", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "examples", "README.md"]
myst_heading_anchors = 3

autoapi_dirs = [
    "../packages/ch-core/src/commhooks",
    "../packages/ch-ddp/src/ch_ddp",
    "../packages/ch-powersgd/src/ch_powersgd",
]
autoapi_root = "reference"
autoapi_options = ["members", "show-inheritance", "show-module-summary"]
autoapi_keep_files = False
autoapi_add_toctree_entry = True
# Public names are imported lazily under TYPE_CHECKING; autoapi reads both places and warns of the double.
suppress_warnings = ["autoapi.python_import_resolution", "ref.python", "docutils"]
