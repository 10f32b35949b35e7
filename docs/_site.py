"""Changes to pages on their way to the site: captions of code blocks, and descriptions for previews."""

from __future__ import annotations

import html
import re
import textwrap

MARKED_BLOCK = re.compile(r"^<!-- ?(file|serve): ?(.*?) ?-->\n```(\w+)\n", re.MULTILINE)
DESCRIPTION_LENGTH = 200


def add_captions(markdown: str) -> str:
    """Give each block after a comment ``file:`` or ``serve:`` a caption: the file's name, or which terminal it is for.

    The number of lines stays the same.
    """

    def captioned(found: re.Match[str]) -> str:
        word, value, language = found.groups()
        caption = value if word == "file" else "first terminal; leave it open"
        return f"```{{code-block}} {language}\n:caption: {caption}\n"

    return MARKED_BLOCK.sub(captioned, markdown)


def card(title: str, text: str) -> str:
    """Return the HTML tags that describe a page to search engines and link previews.

    Parameters:
        title: the page's title, as HTML.
        text: the page's first paragraph.
    """
    description = textwrap.shorten(text, DESCRIPTION_LENGTH, placeholder=" …")
    tags = {
        'name="description"': description,
        'property="og:type"': "website",
        'property="og:site_name"': "Holdfast",
        'property="og:title"': html.unescape(re.sub(r"<[^>]*>", "", title)),
        'property="og:description"': description,
    }
    return "".join(f'<meta {name} content="{html.escape(text)}" />\n' for name, text in tags.items())
