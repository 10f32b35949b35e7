"""Convert web content to text: decode it, and render HTML as the visible text with its links."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from html import unescape
from urllib.parse import urljoin

from holdfast.runtime import check_interrupt

__all__ = ["decoded", "html_text", "is_text"]

_LOOK_EVERY = 1000
_TITLE_LIMIT = 300
_META_BYTES = 2048
_META = re.compile(rb"<meta[^>]{0,200}?charset\s{0,10}=\s{0,10}[\"']?\s{0,10}([a-zA-Z0-9_:.-]{1,40})", re.IGNORECASE)
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_NO_CHARSET = frozenset({"idna", "punycode", "raw_unicode_escape", "unicode_escape", "undefined", "utf-7"})
_TEXT = re.compile(r"text/|application/(?:[\w.+-]*\+)?(?:json|xml|javascript|ecmascript|yaml|toml|x-ndjson|x-sh|sql)\b")
_HIDDEN = frozenset({"script", "style", "template", "noscript", "svg", "math", "iframe", "object", "head"})
_RAW = frozenset({"script", "style", "textarea", "title", "iframe", "noembed", "xmp"})
"""Elements whose content is raw text, even if it looks like tags."""
_HEADINGS = frozenset({"h1", "h2", "h3", "h4", "h5", "h6"})
_APART = _HEADINGS | {"p", "ul", "ol", "table", "pre", "blockquote"}
_BLOCKS = _APART | {
    "address",
    "article",
    "aside",
    "dd",
    "details",
    "dialog",
    "div",
    "dl",
    "dt",
    "fieldset",
    "figcaption",
}
_BLOCKS |= {"figure", "footer", "form", "header", "hr", "li", "main", "nav", "section", "summary", "tr"}
_SPACES = re.compile(r"\s+")


def is_text(media_type: str, data: bytes) -> bool:
    """Return whether data is text, judged by the media type, or by the content if the type is missing or generic."""
    if media_type and media_type != "application/octet-stream":
        return _TEXT.match(media_type) is not None
    return not data or (b"\0" not in data[:4096] and data[:4096].decode("utf-8", "ignore") != "")


def decoded(data: bytes, charset: str | None, *, html: bool) -> str:
    """Decode bytes to text.

    Parameters:
        data: bytes to decode. If the charset is unknown, an incomplete UTF-8 character at the end is dropped.
        charset: charset that the server specified; None if it specified no charset.
        html: whether to look for a charset declaration in `data` when `charset` was not specified.
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return data.decode(encoding, "replace")
    named: str | None = charset
    if named is None and html and (found := _META.search(data[:_META_BYTES])):
        named = found[1].decode()
    if named is not None and (name := _known(named)) is not None:
        return data.decode(name, "replace")
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return data.decode("cp1252", "replace")


def _known(charset: str) -> str | None:
    try:
        name = codecs.lookup(charset).name
        "".encode(name)
    except (LookupError, UnicodeError):
        return None
    if name in _NO_CHARSET:
        return None
    return "cp1252" if name in ("iso8859-1", "ascii") else name  # as browsers do


def html_text(source: str, base: str) -> tuple[str, str]:
    """Return the title and the text of an HTML page.

    Headings, lists, links and images are written as in Markdown; scripts are left out. Call this function in a
    thread; it checks for interrupts. The run time is linear in the page size for any input.

    Parameters:
        source: the HTML source of the page.
        base: URL that relative links are resolved against.
    """
    reader = _Reader(base)
    for number, (kind, value, attributes) in enumerate(_tokens(source)):
        if number % _LOOK_EVERY == 0:
            check_interrupt()
        match kind:
            case "text":
                reader.data(value)
            case "open":
                reader.open(value, attributes)
            case _:
                reader.close(value)
    return reader.title, reader.text()


_OPEN = re.compile(r"<([a-zA-Z][^\s/>]*)")
_ATTRIBUTE = re.compile(r"""[\s/]*([^\s=>/]+)(?:\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>]+)))?""")
_TAG_END = re.compile(r"[\s/=]*>?")


def _tokens(source: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield texts, opening tags and closing tags, reading each character a bounded number of times."""
    position = 0
    raw = ""
    while position < len(source):
        if raw:
            end = re.compile(f"</{raw}", re.IGNORECASE).search(source, position)
            stop = end.start() if end is not None else len(source)
            yield "text", _characters(source[position:stop]), {}
            position, raw = stop, ""
            continue
        stop = source.find("<", position)
        if stop != position:
            stop = len(source) if stop < 0 else stop
            yield "text", _characters(source[position:stop]), {}
            position = stop
        elif source.startswith("<!--", position):
            position = _after(source, "-->", position + 4)
        elif source.startswith(("<!", "<?"), position):
            position = _after(source, ">", position)
        elif source.startswith("</", position):
            after = _after(source, ">", position)
            yield "close", source[position + 2 : after].rstrip(">").strip().lower()[:20], {}
            position = after
        elif (found := _OPEN.match(source, position)) is not None:
            name = found[1].lower()
            attributes: dict[str, str] = {}
            position = found.end()
            while (one := _ATTRIBUTE.match(source, position)) is not None:
                attributes.setdefault(one[1].lower(), _characters(one[2] or one[3] or one[4] or ""))
                position = one.end()
            end = _TAG_END.match(source, position)
            position = end.end() if end is not None else position
            yield "open", name, attributes
            raw = name if name in _RAW else ""
        else:
            yield "text", "<", {}
            position += 1


def _after(source: str, mark: str, position: int) -> int:
    found = source.find(mark, position)
    return len(source) if found < 0 else found + len(mark)


def _characters(text: str) -> str:
    try:
        return unescape(text) if "&" in text else text
    except ValueError:  # a character reference with thousands of digits
        return text


class _Reader:
    """Builder of a page's lines of text from HTML tokens."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._lines: list[str] = []
        self._line: list[str] = []
        self._hidden = ""
        self._depth = 0
        self._pre = 0
        self._link: tuple[str, int] | None = None
        self._in_title = False
        self.title = ""

    def open(self, tag: str, attributes: dict[str, str]) -> None:
        """Handle an opening tag."""
        if tag == "title" and not self.title:
            self._in_title = True
        if self._hidden == "head" and tag == "body":  # an unclosed head
            self._hidden = ""
        if self._hidden:
            self._depth += tag == self._hidden
            return
        if tag in _HIDDEN or tag == "title":
            self._hidden, self._depth = tag, 1
        elif tag == "br":
            self._break()
        elif tag in ("td", "th"):
            self._line.append(" | ")
        elif tag == "img":
            if alt := attributes.get("alt", "").strip():
                self._line.append(f"![{alt}]")
        elif tag == "a":
            self._link = (self._target(attributes.get("href", "")), len(self._line))
        if tag in _BLOCKS:
            self._break()
            if tag in _APART:
                self._blank()
            if tag in _HEADINGS:
                self._line.append("#" * int(tag[1:]) + " ")
            elif tag == "li":
                self._line.append("- ")
            self._pre += tag == "pre"

    def close(self, tag: str) -> None:
        """Handle a closing tag."""
        if tag == "title":
            self._in_title = False
        if self._hidden:
            self._depth -= tag == self._hidden
            if not self._depth:
                self._hidden = ""
            return
        if tag == "a" and self._link is not None:
            target, start = self._link
            self._link = None
            text = _SPACES.sub(" ", "".join(self._line[start:])).strip()
            if text and target:
                self._line[start:] = [f"[{text}]({target})"]
        if tag in _BLOCKS:
            self._break()
            self._pre -= tag == "pre" and self._pre > 0

    def data(self, text: str) -> None:
        """Handle characters."""
        if self._in_title:
            self.title = _SPACES.sub(" ", text[:_TITLE_LIMIT]).strip()
        elif not self._hidden:
            if not self._pre:
                self._line.append(text)
                return
            first, *more = text.split("\n")
            self._line.append(first)
            for line in more:
                self._break()
                self._line.append(line)

    def _target(self, href: str) -> str:
        if not href or href.startswith(("#", "javascript:", "data:")):
            return ""
        try:
            return urljoin(self._base, href.strip())
        except ValueError:
            return ""

    def _break(self) -> None:
        line = "".join(self._line)
        line = line.rstrip() if self._pre else _SPACES.sub(" ", line).strip(" |")
        if line and line.strip("-# "):
            self._lines.append(line)
        self._line.clear()
        if self._link is not None:
            self._link = (self._link[0], 0)

    def _blank(self) -> None:
        if self._lines and self._lines[-1]:
            self._lines.append("")

    def text(self) -> str:
        """Return the page's whole text."""
        self._break()
        return "\n".join(self._lines).strip()
