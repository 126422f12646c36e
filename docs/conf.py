"""How the site is built: Sphinx reads Markdown, docstrings and notebooks; the rest is written from code."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

from pygments.lexers.python import PythonLexer
from sphinx.application import Sphinx

import onward

project = "Onward"
release = onward.__version__
author = "The Onward contributors"
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "benchmark_pages",
    "cookbook_pages",
    "notebook_pages",
    "public_links",
    "reference_pages",
]
exclude_patterns = ["_build", "_executed", "_extensions", "_generated/benchmarks.md"]
highlight_language = "text"
pygments_style = "friendly"
pygments_dark_style = "github-dark"

autodoc_inherit_docstrings = False  # what a subclass does not explain is explained at its base
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are executed by the tests; their outputs are taken from there
nb_merge_streams = True
nb_output_stderr = "remove"  # warnings of the machine that ran them

html_theme = "furo"
html_title = f"Onward {release}"
html_static_path = ["_static"]
html_css_files = ["onward.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False


def setup(app: Sphinx) -> None:
    """Blocks of libraries that are not installed here are Python, under a name that says whose they are."""
    for peer in ("pytorch", "paddle", "keras"):
        app.add_lexer(peer, PythonLexer)
