"""How Sphinx builds these pages: `make docs`."""
# ruff: noqa: INP001 - of no package

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

project = "tuned"
author = "the tuned contributors"
copyright = "the tuned contributors, Apache-2.0"  # noqa: A001 - Sphinx's name
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = "tuned"
exclude_patterns = ["decisions/*.json"]
suppress_warnings = [
    "myst.xref_missing",  # links to files of the checkout, which are no pages
    "toc.not_included",  # of decisions, which their own page lists
]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have shapes, dtypes and devices
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
