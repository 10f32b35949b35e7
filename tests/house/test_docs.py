"""The docs say what the code does: nothing generated is stale, and nothing that users meet is left out."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import holdfast
from holdfast import errors, failpoints
from holdfast.cli import app
from holdfast.cli.exit_codes import Exit
from holdfast.host import PROMISES
from holdfast.protocol.events import EVENT_KINDS
from holdfast.server.routes import ROUTES
from holdfast.settings import describe

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WRITTEN_AT_BUILD = "/reference/python/"
"""Pages that are not committed; test_site.py checks the links to them."""


def page(name: str) -> str:
    """A page with what it includes."""
    path = DOCS / name
    return re.sub(
        r"```\{include\} (\S+)\n```", lambda found: (path.parent / found[1]).read_text("utf-8"), path.read_text("utf-8")
    )


def all_errors(parent: type[errors.HoldfastError] = errors.HoldfastError) -> list[type[errors.HoldfastError]]:
    return [parent, *(error for child in parent.__subclasses__() for error in all_errors(child))]


def test_nothing_that_is_generated_is_stale() -> None:
    result = subprocess.run(
        [sys.executable, DOCS / "_generate.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_setting_is_documented_with_its_default() -> None:
    text = page("reference/settings.md")
    assert [row.name for row in describe() if f"`{row.name}`" not in text or f"`{row.default}`" not in text] == []


def test_every_event_kind_is_documented() -> None:
    text = page("reference/events.md")
    assert [kind for kind in EVENT_KINDS if f"`{kind}`" not in text] == []


def test_every_error_and_code_is_documented() -> None:
    text = page("reference/errors.md")
    assert [e.__name__ for e in all_errors() if f"`{e.__name__}`" not in text or f"`{e.code}`" not in text] == []


def test_error_codes_are_unique() -> None:
    codes = [error.code for error in all_errors()]
    assert sorted(codes) == sorted(set(codes))


def test_every_operation_of_the_server_is_documented() -> None:
    text = page("reference/http.md")
    found = ROUTES
    assert len(found) > 20
    assert [o.path for o in found if f"### `{o.method} {o.path}`" not in text] == []
    assert [q.name for o in found for q in o.query if f"`{q.name}`" not in text] == []


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, below in getattr(command, "commands", {}).items():
        yield f"{path} {name}", below
        yield from commands(below, f"{path} {name}")


def test_every_command_and_option_is_documented() -> None:
    text = page("reference/cli.md")
    found = list(commands(typer.main.get_command(app), "holdfast"))
    assert {"holdfast serve", "holdfast chat", "holdfast doctor", "holdfast keys create"} <= {path for path, _ in found}
    for path, command in found:
        start = text.index(f"### `{path}`\n")
        section = text[start : text.find("### `", start + 1)]
        options = [
            option
            for p in command.params
            if p.name != "help" and not getattr(p, "hidden", False)
            for option in (*p.opts, *p.secondary_opts)
        ]
        assert [option for option in options if option.startswith("-") and f"{option}" not in section] == [], path


def test_every_exit_code_is_documented() -> None:
    text = page("reference/cli.md")
    assert [member.value for member in Exit if f"| `{member.value}` |" not in text] == []


def test_every_failpoint_is_documented() -> None:
    for module in pkgutil.walk_packages(holdfast.__path__, "holdfast."):
        if not module.name.startswith(("holdfast.__main__", "holdfast.testing.", "holdfast.proof.")):
            importlib.import_module(module.name)
    text = page("reference/failpoints.md")
    assert len(failpoints.names()) > 20
    assert [name for name in failpoints.names() if f"`{name}`" not in text] == []


def test_every_metric_and_counter_is_documented() -> None:
    text = page("reference/statistics.md")
    assert [number for number in PROMISES if f"`{number}`" not in text] == []


def test_every_promise_names_its_counter_and_tests() -> None:
    text = page("explanation/promises.md")
    for number in (*range(1, 15), 16):
        row = re.search(rf"^\| \[P{number} .*$", text, re.MULTILINE)
        assert row, f"P{number}"
        tests = re.findall(r"`((?:[a-z]+/)+test_\w+\.py)`", row[0])
        assert tests
        assert [test for test in tests if not (ROOT / "tests" / test).exists()] == []
        assert f"`P{number}`" in row[0]


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")], ids=str)
def test_a_link_to_a_file_leads_somewhere(path: Path) -> None:
    if "_build" in path.parts:
        return
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)(?:#[^)]*)?\)", path.read_text("utf-8"))
    base = path.parent
    links = [link for link in links if not link.startswith(WRITTEN_AT_BUILD)]
    assert [link for link in links if not any((base / (link + end)).exists() for end in ("", ".md"))] == []
