"""How the documentation is built: ``sphinx-build -W -b html docs docs/_build/html``. No step needs a network."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the gallery runs scripts on small tensors
os.environ.setdefault("MPLBACKEND", "Agg")

project = "bda_optim"
author = "The bda_optim authors"
copyright = f"2026, {author}"
release = re.search(r'^version = "(.+?)"', (HERE.parent / "pyproject.toml").read_text("utf-8"), re.MULTILINE)[1]
version = release

extensions = [
    "myst_parser",
    "recorded",  # docs/_ext/recorded.py
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
    "sphinx-mathjax-offline",
]
exclude_patterns = ["_build", "gallery/*.ipynb", "gallery/*.py", "gallery/*.md5", "gallery/*.json"]
suppress_warnings = ["config.cache"]  # sphinx-gallery's settings hold functions, which Sphinx cannot store

# --- text -------------------------------------------------------------------------------------------------------------

myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
default_role = "py:obj"  # `name` in a docstring: a link where the name is public, code elsewhere
highlight_language = "python"

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings describe the arguments
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# --- the examples to copy, run when the pages are built ---------------------------------------------------------------

sphinx_gallery_conf = {
    "examples_dirs": str(HERE.parent / "examples" / "start"),
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "image_scrapers": ("matplotlib",),
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "remove_config_comments": True,
}

# --- appearance -------------------------------------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = "bda_optim"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_sourcelink = False
html_copy_source = False
html_context = {"default_mode": "light"}
html_sidebars = {"index": [], "experiments": []}
html_theme_options = {
    "logo": {"text": f"bda_optim {version}"},
    "header_links_before_dropdown": 6,
    "navbar_persistent": ["search-button"],
    "navigation_with_keys": False,
    "show_prev_next": True,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
