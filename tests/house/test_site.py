"""The site shows what a reader needs to copy, and the Python reference has every public name."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import holdfast

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

PAGE = """# A page

With `--wait`, and also --wait without quotes, this page "shows" & tells what it does, which takes it more than the two
hundred characters that a preview has room for, and so the last of these words are left out of it, all of them.

| option | what it does |
|---|---|
| `--all` | With --wait: everything. |

<!-- file: shop.py -->
```python
import holdfast
```

<!-- serve: shop:agent -->
```sh
holdfast serve shop:agent
```

<!-- not run: it is an example -->
```sh
holdfast chat
```

```text
output
```
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of one page, built with the settings of the docs."""
    from sphinx.application import Sphinx

    folder = tmp_path_factory.mktemp("site")
    (folder / "pages").mkdir()
    (folder / "pages" / "index.md").write_text(PAGE, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        built = folder / "html"
        Sphinx(folder / "pages", DOCS, built, folder / "trees", "html", status=None, warningiserror=True).build()
    return built


@pytest.fixture(scope="module")
def html(site: Path) -> str:
    return (site / "index.html").read_text("utf-8")


class Blocks(HTMLParser):
    """The code blocks of a page: caption, language and text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[str]] = []
        self._caption = ""
        self._into: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = dict(attrs).get("class") or ""
        if "caption-text" in classes:
            self._into = "caption"
        elif language := re.search(r"highlight-(\w+)", classes):
            self.found.append([self._caption, language[1], ""])
            self._caption = ""
        elif tag == "pre":
            self._into = "text"

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre" or (tag == "span" and self._into == "caption"):
            self._into = None

    def handle_data(self, data: str) -> None:
        if self._into == "caption":
            self._caption += data
        elif self._into == "text":
            self.found[-1][2] += data


def test_a_flag_on_the_site_can_be_copied(html: str) -> None:
    assert html.count("--wait") >= 3
    assert re.findall("–[a-z]+", html) == []
    assert '"shows"' in html or "&quot;shows&quot;" in html


def test_a_block_shows_its_file_or_its_terminal(html: str) -> None:
    blocks = Blocks()
    blocks.feed(html)
    assert blocks.found == [
        ["shop.py", "python", "import holdfast\n"],
        ["first terminal; leave it open", "sh", "holdfast serve shop:agent\n"],
        ["", "sh", "holdfast chat\n"],
        ["", "text", "output\n"],
    ]


def test_captions_leave_every_line_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    changed = importlib.import_module("_site").add_captions(PAGE)
    assert changed.count("\n") == PAGE.count("\n")
    assert "<!-- not run: it is an example -->" in changed


def test_code_has_copy_buttons_and_output_has_none(site: Path, html: str) -> None:
    assert "copybutton.js" in html
    script = (site / "_static" / "copybutton.js").read_text("utf-8")
    selector = re.search(r"const COPYBUTTON_SELECTOR = '(.*?)'", script)
    assert selector
    assert "div.highlight-sh pre" in selector[1]
    assert "div.highlight-text" not in selector[1]


def test_a_page_has_an_icon_an_owner_and_a_preview(html: str) -> None:
    assert 'href="_static/favicon.svg"' in html
    assert "2026, The Holdfast developers" in html
    assert '<meta property="og:title" content="A page" />' in html
    descriptions = re.findall(r'<meta (?:name|property)="(?:og:)?description" content="(.*?)" />', html)
    assert len(descriptions) == 2
    for text in descriptions:
        assert text.startswith("With --wait, and also --wait without quotes, this page &quot;shows&quot; &amp; tells")
        assert text.endswith(" …")


def test_the_search_ranks_with_the_scorer_of_the_docs(site: Path) -> None:
    scorer = (DOCS / "_static" / "scorer.js").read_text("utf-8").strip()
    assert any(scorer in path.read_text("utf-8") for path in (site / "_static").glob("*.js"))


# The Python reference


@pytest.fixture(scope="module")
def pages() -> Iterator[dict[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        yield importlib.import_module("_api").python_pages()


def headings(page: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)


def named(page: str) -> set[str]:
    """The names that a page describes, and those for which it leads to another page."""
    return {*headings(page), *re.findall(r"^\| \[`(\w+)`\]", page, re.MULTILINE)}


def test_every_name_of_a_public_module_is_in_the_reference(pages: dict[str, str]) -> None:
    for file, page in pages.items():
        module = importlib.import_module(file.removesuffix(".md"))
        values = {name for name in module.__all__ if not isinstance(getattr(module, name), type(importlib))}
        assert values - named(page) == set(), file
    assert len(pages) > 20


def test_every_module_that_users_import_has_a_page(pages: dict[str, str]) -> None:
    overview = (DOCS / "generated" / "python.md").read_text("utf-8")
    public = re.findall(r"^\| \[`(holdfast\.[\w.]+)`\]", overview, re.MULTILINE)
    assert len(public) == len(pages)
    assert {f"{name}.md" for name in public} == set(pages)


def test_a_name_is_described_once(pages: dict[str, str]) -> None:
    for file, page in pages.items():
        found = headings(page)
        assert [name for name in found if found.count(name) > 1] == [], file
    holders = [file for file, page in pages.items() if "RunStarted" in headings(page)]
    assert holders == ["holdfast.events.md"]


def test_links_to_names_lead_to_their_headings(pages: dict[str, str]) -> None:
    overview = (DOCS / "generated" / "python.md").read_text("utf-8")
    assert {name for name in holdfast.__all__ if f"[`{name}`]" not in overview} == set()
    for text in (overview, *pages.values()):
        for file, anchor in re.findall(r"\(/reference/python/([\w.]+)#(\w+)\)", text):
            assert anchor in [heading.lower() for heading in headings(pages[file])]


def test_types_in_signatures_are_written_as_in_code(pages: dict[str, str]) -> None:
    for file, page in pages.items():
        assert re.findall(r"ForwardRef|typing\.| at 0x", page) == [], file


def heads(path: Path) -> Iterator[list[str]]:
    """The heads of a page's tables."""
    for row in re.findall(r"^(\|.*\|)\n\|(?:[ :]*-+[ :]*\|)+$", path.read_text("utf-8"), re.MULTILINE):
        yield [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def test_every_column_of_a_table_has_a_head() -> None:
    """The corner of a table whose rows have heads, too, may be empty, except in the reference."""
    pages = [path for path in DOCS.rglob("*.md") if not {"_build", "python"} & set(path.parts)]
    empty = [
        (path.relative_to(DOCS).as_posix(), head)
        for path in pages
        for head in heads(path)
        if "" in head[0 if path.parent.name in ("generated", "reference") else 1 :]
    ]
    assert sum(1 for path in pages for _ in heads(path)) > 50
    assert empty == []
