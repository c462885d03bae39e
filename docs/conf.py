"""Configures Sphinx, which builds the documentation: `make docs`. Warnings are errors.

The reference is generated from the code on every build: commands from their `--help`, settings from their fields, the
Python names from their docstrings. Docstrings are Markdown; `_to_rst` translates the few Markdown elements that they
use.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import reference_pages

import palaestra

project = "Palaestra"
author = "The Palaestra contributors"
release = version = palaestra.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_fence_as_directive = []
smartquotes = False  # they turn `--flag` in a plain sentence into a dash
suppress_warnings = ["misc.highlighting_failure"]  # transcripts hold both commands and their output

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "Palaestra"
html_search_scorer = str(Path(__file__).parent / "search.js")
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["llms.txt"]
html_show_copyright = False
html_show_sphinx = False


def setup(app):
    reference_pages.write(Path(__file__).parent / "reference")
    app.connect("autodoc-process-docstring", _process)


def _process(_app, _what, _name, _obj, _options, lines):
    lines[:] = _to_rst(lines)


def _to_rst(lines: list[str]) -> list[str]:
    """Markdown of a docstring as reStructuredText: `code`, [links](…), lists and indented or fenced blocks of code."""
    out: list[str] = []
    fenced = block = False
    for line in lines:
        if line.lstrip().startswith("```"):
            fenced = not fenced
            out += ["", "::", ""] if fenced else [""]
            continue
        if fenced:
            out.append(f"    {line}")
            continue
        indented = line.startswith("    ")
        if indented and not block and out and not out[-1].strip():
            block = True
            out += ["::", ""]
        elif line.strip() and not indented:
            block = False
            if (
                re.match(r"([-*]|\d+\.) ", line)
                and out
                and out[-1].strip()
                and not re.match(r"([-*]|\d+\.) |  ", out[-1])
            ):
                out.append("")
        if block or line.lstrip().startswith(".. "):
            out.append(line)
            continue
        line = re.sub(r"\[([^\]]+)\]\((https?://[^)]+)\)", r"`\1 <\2>`__", line)
        line = re.sub(r"(?<![`\w\\])`([^`<]+)`(?![`_])", r"``\1``", line)
        line = re.sub(r"(?<![\w*`])\*(?=[\w.])(?![^*`]*\*)", r"\\*", line)
        out.append(line)
    return out
