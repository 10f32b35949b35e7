"""README, docs and examples import from `holdfast` or from a module that the Python reference lists."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast import events
from holdfast.protocol.events import EVENT_KINDS, EventBase

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
IMPORT = re.compile(
    r"^[ \t]*from holdfast(?:\.[\w.]+)? import (?:\([^)]*\)|.+)$|^[ \t]*import holdfast(?:\.[\w.]+)?$", re.MULTILINE
)


def documented_modules() -> set[str]:
    page = (DOCS / "generated" / "python.md").read_text("utf-8")
    importable = page[: page.index("\n## ")]
    return {"holdfast", *re.findall(r"^\| \[`(holdfast\.[\w.]+)`\]", importable, re.MULTILINE)}


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each import of Holdfast as a module and a name; the name is empty for ``import holdfast``."""
    for found in IMPORT.finditer(path.read_text("utf-8")):
        for node in ast.parse(textwrap.dedent(found[0])).body:
            if isinstance(node, ast.ImportFrom):
                yield from ((node.module or "", alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names)


@pytest.mark.parametrize("path", [*PAGES, *EXAMPLES], ids=lambda path: str(path.relative_to(ROOT)))
def test_users_import_only_from_documented_modules(path: Path) -> None:
    known = documented_modules()
    assert [(module, name) for module, name in imports_of(path) if module not in known] == []


@pytest.mark.parametrize("module", sorted(documented_modules()))
def test_documented_module_exports_every_name_that_users_import(module: str) -> None:
    wanted = {name for path in (*PAGES, *EXAMPLES) for found, name in imports_of(path) if found == module and name}
    assert wanted - set(importlib.import_module(module).__all__) == set()


def test_every_name_of_the_root_is_used_or_documented() -> None:
    texts = [path.read_text("utf-8") for path in (*PAGES, *EXAMPLES)]
    imported = {name for path in (*PAGES, *EXAMPLES) for module, name in imports_of(path) if module == "holdfast"}
    mentioned = {name for text in texts for name in re.findall(r"\bholdfast\.(\w+)|`(\w+)`", text) for name in name}
    assert sorted(set(holdfast.__all__) - imported - mentioned) == []


def test_every_kind_of_event_can_be_imported_from_holdfast_events() -> None:
    found = [getattr(events, name) for name in events.__all__]
    kinds = {one.__struct_config__.tag for one in found if isinstance(one, type) and issubclass(one, EventBase)}
    assert kinds == set(EVENT_KINDS)
