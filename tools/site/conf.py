"""Sphinx's settings for the pages that build.py puts together."""

from __future__ import annotations

import sys
from pathlib import Path

import unimem

sys.path.insert(0, str(Path(__file__).parent))

project = "unimem"
author = copyright = "The unimem authors"
version = release = unimem.__version__

extensions = """
    myst_parser sphinx.ext.autodoc sphinx.ext.autosummary numpydoc
    stub_signatures c_headers command_help
""".split()
html_theme = "furo"
html_title = f"unimem {release}"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))

# Headings are targets of links, as they are where the documents are read in a repository.
myst_heading_anchors = 4

# Docstrings write code in single backticks.
default_role = "code"
autodoc_default_options = {"members": True, "inherited-members": True, "member-order": "bysource"}
autodoc_typehints = "none"  # the sections of the docstrings say them
# The hook for signatures works with these only.
autodoc_use_legacy_class_based = True
# What is large, or needs a device.
autodoc_mock_imports = ["cupy", "ray", "torch", "transformers", "vllm", "lmcache", "sglang"]
numpydoc_show_class_members = False
