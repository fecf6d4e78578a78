"""Configure Sphinx. The reference shows the installed packages, so a build imports them and torch."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import reference

project = "commhooks"
author = "the commhooks authors"
copyright = "2026, the commhooks authors"
html_title = "commhooks"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "examples", "_navigation.md"]
myst_heading_anchors = 3
maximum_signature_line_length = 80  # a longer signature has one argument per line
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
autodoc_preserve_defaults = True  # as in the source, because the value of a default may be an address in memory
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False  # the method of a base in torch has references to its own pages
napoleon_use_ivar = True
default_role = "code"  # docstrings write `name`
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app):
    """Connect the handlers below."""
    app.connect("builder-inited", write_reference)
    app.connect("autodoc-process-docstring", qualify_roles)
    app.connect("autodoc-process-signature", plain_defaults)
    app.connect("autodoc-skip-member", is_field_of_tuple)
    app.connect("doctree-read", hide_records)
    app.connect("source-read", front_page)


def write_reference(app):
    """Write the pages of the reference before Sphinx looks for pages."""
    reference.write(Path(app.srcdir, "reference"))


def qualify_roles(app, what, name, obj, options, lines):
    """Complete the targets of roles such as :class:`Engine`, which docstrings write without a module."""
    role = re.compile(r"(:(?:class|func|meth|attr|data):`~?)(?:ch_core\.|commhooks\.)?(\w+)(?=[.`])")
    lines[:] = [role.sub(lambda found: found[1] + full_name(found[2]), line) for line in lines]


def plain_defaults(app, what, name, obj, options, signature, returns):
    """Write the default of a dataclass's factory as an ellipsis, because Sphinx cannot parse `<factory>`."""
    return (signature.replace("<factory>", "..."), returns) if signature else None


def full_name(name):
    """Return a public name with the module on whose page it stands."""
    modules = (each for each in reference.MODULES if name in getattr(sys.modules.get(each), "__all__", ()))
    return next((f"{module}.{name}" for module in modules), name)


def is_field_of_tuple(app, what, name, obj, skip, options):
    """Return True for a field of a named tuple, whose generated docstring is its number. The signature shows it."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


def hide_records(app, doctree):
    """Keep records out of the sidebar and of the search index. Pages link to them."""
    if app.env.docname.startswith("measured/"):
        app.env.metadata[app.env.docname] |= {"orphan": True, "nosearch": True}


INTRO = """\
```{include} ../README.md
:relative-docs: docs/
:relative-images:
:start-line: 2
:end-before: "## Install"
```
"""


def front_page(app, docname, source):
    """Put the README's first part and the navigation into index.md, which a hosting site shows without directives."""
    if docname == "index":
        text = re.sub(r"<!-- intro.*?<!-- end of intro -->\n", lambda _: INTRO, source[0], flags=re.S)
        text = text[: text.index("## Everything")]  # the navigation lists the same pages
        source[0] = text + Path(__file__).with_name("_navigation.md").read_text()
