"""The lock: everything pinned and hashed, and nothing in it says where to load it from."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))


def pins(lock: Path) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9._-]+)(?:\[[a-z, ]+\])?==(\S+)", lock.read_text(), re.MULTILINE))


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return match[0].lower().replace("_", "-")


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_a_lock_names_no_place(lock: Path) -> None:
    text = lock.read_text()
    assert not re.search(r"https?:|file:|@ |--(index|find|extra|trusted)", text)
    assert not re.search(r"(^|[\s=\"'])/", text), "a path of some machine"


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_pin_has_hashes(lock: Path) -> None:
    entries = re.split(r"^(?=[a-z0-9])", lock.read_text(), flags=re.MULTILINE)
    entries = [entry for entry in entries if not entry.startswith("#") and entry.strip()]
    assert entries
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_the_server_lock_holds_what_the_package_asks_for_and_builds_with() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = package["project"]["dependencies"] + package["build-system"]["requires"]
    assert {name_of(requirement) for requirement in asked} <= pins(ROOT / "requirements/serve.txt").keys()


# Programs that run in an environment made for them, and the plugin that only pytest loads.
ELSEWHERE = ("proof/check/adapters/", "testing/pytest_plugin.py")


def imports_of(folder: str) -> set[str]:
    """The top names of all foreign modules that the code in a folder imports."""
    found: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        if any(part in path.as_posix() for part in ELSEWHERE):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").partition(".")[0])
            elif isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
    own = {path.stem for path in (*ROOT.rglob(f"{folder}/**/*.py"), *(ROOT / "docs").glob("*.py"))}
    return found - sys.stdlib_module_names - own - {"holdfast", "tests", "benchmarks", "examples"}


# Modules that are imported beside the package of an extra, and which package brings them.
COMES_WITH = {
    "anyio": "mcp",
    "jwt": "pyjwt",
    "langchain-core": "langgraph",
    "mcp-types": "mcp",
    "nats": "nats-py",
    "pydantic-ai": "pydantic-ai-slim",
}


def test_what_the_package_imports_is_what_it_asks_for() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = {name_of(requirement) for requirement in package["project"]["dependencies"]}
    extras = {name_of(asked) for extra in package["project"]["optional-dependencies"].values() for asked in extra}
    names = {name.replace("_", "-") for name in imports_of("src")}
    foreign = {COMES_WITH.get(name, name) for name in names} - extras
    # What uvicorn and zoneinfo take up when it is there, and nobody imports by name.
    assert foreign | {"httptools", "tzdata"} == asked


@pytest.mark.parametrize("folder", ["tests", "examples", "docs", "benchmarks"])
def test_what_else_is_imported_is_in_the_developers_lock(folder: str) -> None:
    homes = importlib.metadata.packages_distributions()
    locked = pins(ROOT / "requirements/dev.txt").keys() | pins(ROOT / "requirements/bench.txt").keys()
    missing = {
        name: homes.get(name)
        for name in imports_of(folder)
        if not {home.lower().replace("_", "-") for home in homes.get(name, [name])} & locked
    }
    assert missing == {}, "add it to requirements/dev.in and run 'make lock'"


def test_the_developers_lock_contains_the_servers_at_the_same_versions() -> None:
    serve, dev = pins(ROOT / "requirements/serve.txt"), pins(ROOT / "requirements/dev.txt")
    assert {name: dev.get(name) for name in serve} == serve


@pytest.mark.parametrize("source", sorted((ROOT / "requirements").glob("*.in")), ids=lambda path: path.name)
def test_what_a_source_asks_for_is_in_its_lock(source: Path) -> None:
    lock = {"build": "serve"}.get(source.stem, source.stem)
    asked = {name_of(line) for line in source.read_text().splitlines() if line and not line.startswith("#")}
    assert asked <= pins(ROOT / f"requirements/{lock}.txt").keys(), "run 'make lock'"
