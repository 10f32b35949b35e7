"""Sphinx settings of the docs. `docs/_generate.py` writes docs/generated first; the build needs no network."""

import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
sys.path.insert(0, str(HERE))

project = "Holdfast"
author = "The Holdfast developers"
version = release = PROJECT["version"]
html_title = f"Holdfast {version}"

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
exclude_patterns = ["_build", "generated/*.md", "measured/*.md"]
suppress_warnings: list[str] = []
nitpicky = True
root_doc = "index"

html_theme = "furo"
html_show_sourcelink = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
