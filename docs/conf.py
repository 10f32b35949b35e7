"""Sphinx settings of the docs. `docs/_generate.py` writes the generated pages first; the build needs no network."""

import sys
import tomllib
from pathlib import Path

from docutils import nodes

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
sys.path.insert(0, str(HERE))

from _site import add_captions, card  # noqa: E402  # the folder of this file is not on the path before

project = "Holdfast"
author = "The Holdfast developers"
copyright = f"2026, {author}"
version = release = PROJECT["version"]
html_title = f"Holdfast {version}"

extensions = ["myst_parser", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
exclude_patterns = ["_build", "generated/*.md", "measured/*.md"]
suppress_warnings: list[str] = []
nitpicky = True
smartquotes = False  # they turn --flag into –flag
root_doc = "index"

html_theme = "furo"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_search_scorer = str(HERE / "_static" / "scorer.js")
pygments_style = "friendly"
pygments_dark_style = "monokai"

copybutton_exclude = ".linenos, .gp, .go"
copybutton_selector = ", ".join(f"div.highlight-{name} pre" for name in ("python", "sh", "toml", "json"))  # no output


def setup(app):
    """Change pages on their way to the site."""

    def on_source_read(app, name, source):
        source[0] = add_captions(source[0])

    def on_page_context(app, name, template, context, page):
        paragraph = page.next_node(nodes.paragraph) if page is not None else None
        if paragraph is not None:
            context["metatags"] = context.get("metatags", "") + card(context["title"], paragraph.astext())

    app.connect("source-read", on_source_read)
    app.connect("html-page-context", on_page_context)
