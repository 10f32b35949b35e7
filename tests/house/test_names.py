"""Names: `__all__` is a contract, the root is small, one word has one meaning, and the words are those of the field."""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

import holdfast

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "holdfast"
FILES = sorted(SOURCE.rglob("*.py"))
MODULES = sorted(
    ".".join(("holdfast", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    for path in FILES
    # The storm's agent is an entry point: it reads its environment as it is imported.
    if path.name not in ("__main__.py", "served.py")
)

SAYS_NOTHING = re.compile(r"(?:^|_|(?<=[a-z]))(managers?|helpers?|utils?|misc)(?![a-z])", re.IGNORECASE)

COINED_FILES = frozenset(
    (
        "active",
        "actor",
        "answered",
        "answering",
        "attaching",
        "calls",
        "carried",
        "cell",
        "cells",
        "chatting",
        "checking",
        "choosers",
        "compacting",
        "conduct",
        "covered",
        "doing",
        "editing",
        "enclosure",
        "ending",
        "exploring",
        "forked",
        "joining",
        "keyring",
        "lanes",
        "looking",
        "lookout",
        "migrating",
        "once",
        "outside",
        "past",
        "patience",
        "placing",
        "prying",
        "refusal",
        "resting",
        "scheduling",
        "sending",
        "serving",
        "slash",
        "starting",
        "strands",
        "surroundings",
        "suspending",
        "swapped",
        "timed",
        "torment",
        "upkeep",
        "verbs",
        "victim",
    )
)
"""Files that the change of words renamed. Their names do not come back."""

COINED_NAMES = frozenset(
    (
        "ActiveRun",
        "Branches",
        "Carried",
        "Cell",
        "Cells",
        "CellsStatistics",
        "Doing",
        "Enclosure",
        "FileGate",
        "Hops",
        "Incidents",
        "JoiningProtocol",
        "KeptState",
        "Lanes",
        "LeftBehind",
        "Leftover",
        "Lines",
        "Living",
        "Lookout",
        "Membership",
        "Once",
        "ParkedRuns",
        "Past",
        "Patience",
        "RunSurroundings",
        "ScheduleLike",
        "SessionActor",
        "SessionLike",
        "Slash",
        "Strand",
        "Strands",
        "Surroundings",
        "Upkeep",
        "Wanted",
        "check_chain",
        "divided",
        "leave_off",
        "line_up",
        "made_way",
        "past_end",
        "patiently",
        "read_past",
        "run_rests",
        "says_again",
        "told_briefly",
        "torment",
        "was_begun_by",
        "with_summary",
    )
)
"""Classes and functions that the change of words renamed. Their names do not come back."""

SAME_CLASS = frozenset(("Restorer", "ToolFailed"))
"""Public classes that may share their name with another. This list only gets shorter."""

GERUNDS = frozenset(
    (
        "host/run_accounting.py",
        "proof/checker/stopping.py",
        "proof/storm/killing.py",
        "protocol/stopping.py",
        "testing/suites/store_housekeeping.py",
    )
)
"""Files whose name may end in "ing". This list only gets shorter."""

TWINS = frozenset(
    (
        ("cli/store", "storm"),
        ("proof/nemesis/disk", "disks"),
        ("proof/storm/served", "server"),
        ("server/router", "routes"),
    )
)
"""Files of one folder whose names may differ by one letter. This list only gets shorter."""

NOUNS_IN_ING = frozenset(("patching", "shrinking", "testing", "write_coalescing"))
"""Names in "ing" that are nouns of the field."""


def public(module: str) -> list[str]:
    return list(getattr(importlib.import_module(module), "__all__", ()))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def place(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def stems() -> Iterator[tuple[Path, str]]:
    """Each file and folder of the package, with its name."""
    for path in FILES:
        yield (path, path.parent.name) if path.name == "__init__.py" else (path, path.stem)


def definitions(path: Path) -> Iterator[str]:
    """Names of all classes and functions of a file."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name


def classes_of(path: Path) -> Iterator[str]:
    """Names of all classes of a file."""
    return (node.name for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef))


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
def test_every_module_says_what_it_is_for(module: str) -> None:
    assert (importlib.import_module(module).__doc__ or "").strip()


def test_dir_of_the_root_shows_the_public_names() -> None:
    assert set(holdfast.__all__) <= set(dir(holdfast))


def test_no_name_is_a_word_that_says_nothing() -> None:
    files = [place(path) for path, stem in stems() if SAYS_NOTHING.search(stem)]
    classes = [f"{place(path)} {name}" for path in FILES for name in classes_of(path) if SAYS_NOTHING.search(name)]
    assert files + classes == []


def test_coined_words_do_not_come_back() -> None:
    files = [place(path) for path, stem in stems() if stem in COINED_FILES]
    names = [f"{place(path)} {name}" for path in FILES for name in definitions(path) if name in COINED_NAMES]
    assert files + names == []


def test_a_file_is_a_noun() -> None:
    gerunds = {place(path) for path, stem in stems() if stem.endswith("ing") and stem not in NOUNS_IN_ING}
    assert gerunds == GERUNDS


def test_no_two_files_of_a_folder_differ_by_one_letter() -> None:
    folders: dict[Path, set[str]] = defaultdict(set)
    for path, stem in stems():
        folders[path.parent.parent if path.name == "__init__.py" else path.parent].add(stem)
    found = {
        (f"{place(folder)}/{one}", other)
        for folder, names in folders.items()
        for one, other in combinations(sorted(names), 2)
        if _differ_by_one_letter(one, other)
    }
    assert found == TWINS


def _differ_by_one_letter(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    if len(long) == len(short):
        return sum(a != b for a, b in zip(short, long, strict=True)) == 1
    return any(long[:at] + long[at + 1 :] == short for at in range(len(long)))


def test_no_two_modules_have_a_public_class_of_the_same_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(place(path))
    shared = {name: files for name, files in homes.items() if len(files) > 1}
    assert {name: files for name, files in shared.items() if name not in SAME_CLASS} == {}
    assert set(shared) >= SAME_CLASS, "a name on the list is no longer shared: take it off"


def test_each_term_of_the_glossary_has_one_meaning() -> None:
    lines = (ROOT / "docs" / "reference" / "glossary.md").read_text("utf-8").splitlines()
    at = [number for number, line in enumerate(lines) if line.startswith(": ")]
    terms = [lines[number - 1] for number in at]
    assert len(terms) > 20
    assert [term for term, times in Counter(terms).items() if times > 1] == []
    assert terms == sorted(terms)
    assert {"cell", "lane", "lookout", "shape", "strand", "surroundings"} & set(terms) == set()
    meanings = [" ".join(lines[start:end]) for start, end in zip(at, [*at[1:], len(lines)], strict=True)]
    assert [meaning for meaning in meanings if "; also " in meaning] == []
