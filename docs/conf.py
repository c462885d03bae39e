"""Configures Sphinx, which builds the documentation: `make docs`. Warnings are errors. `make reference` writes the
reference pages from the code."""

from pathlib import Path

import palaestra

project = "Palaestra"
author = "The Palaestra contributors"
release = version = palaestra.__version__

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_fence_as_directive = []
smartquotes = False  # they turn `--flag` in a plain sentence into a dash
suppress_warnings = ["misc.highlighting_failure"]  # transcripts hold both commands and their output

html_theme = "furo"
html_title = "Palaestra"
html_search_scorer = str(Path(__file__).parent / "search.js")
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["llms.txt"]
html_show_copyright = False
html_show_sphinx = False
