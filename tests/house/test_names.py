"""Public names: `__all__` is a contract, the root is small, and the words are those of the glossary."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import holdfast

SOURCE = Path(__file__).parents[2] / "src" / "holdfast"
MODULES = sorted(
    ".".join(("holdfast", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    # The storm's agent is an entry point: it reads its environment as it is imported.
    if path.name not in ("__main__.py", "served.py")
)
BANNED = re.compile(r"(Manager|Helper|Utils?|Service|Processor|Engine|Worker|Job|Checkpoint|Turn)(?![a-z])")


def public(module: str) -> list[str]:
    return list(getattr(importlib.import_module(module), "__all__", ()))


def test_the_root_hands_out_at_most_30_names() -> None:
    assert 5 <= len(holdfast.__all__) <= 30


@pytest.mark.parametrize("module", MODULES)
def test_all_is_sorted_and_every_name_in_it_is_there(module: str) -> None:
    names = public(module)
    assert len(names) == len(set(names))
    loaded = importlib.import_module(module)
    assert [name for name in names if not hasattr(loaded, name)] == []
    constants_first = sorted(names, key=lambda name: (not name.isupper(), not name[:1].isupper(), name))
    assert names in (constants_first, sorted(names))


@pytest.mark.parametrize("module", MODULES)
def test_no_name_is_one_of_the_words_to_avoid(module: str) -> None:
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    named = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert [name for name in named if BANNED.search(name)] == []
    assert not BANNED.search(module.rpartition(".")[2].title())


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is_for(module: str) -> None:
    assert (importlib.import_module(module).__doc__ or "").strip()


def test_dir_of_the_root_shows_the_public_names() -> None:
    assert set(holdfast.__all__) <= set(dir(holdfast))
