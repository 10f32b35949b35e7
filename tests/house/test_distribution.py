"""The distribution is `holdfast-agents`: `holdfast` on the package index is another project."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import MissingExtra

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = "|".join(PROJECT["optional-dependencies"])
ANOTHER_PROJECT = re.compile(
    # An extra, with or without the backslash of a pattern; f-strings of hints too.
    rf"\bholdfast\\?\[(?:{EXTRAS}|all|\{{)"
    # A command that installs, and a requirement with a version.
    r"|\b(?:pip|pipx|uv|uvx|poetry|pdm|conda)\b[^\n]*[ '\"]holdfast(?![\w./-])(?=['\"\s]*(?:$|[\[=<>~!;`]))"
    r"|\bholdfast *(?:==|~=|>=|<=)"
    # What asks the metadata.
    r"|\b(?:version|metadata|distribution|requires|files)\(['\"]holdfast['\"]\)"
    # What pip's resolver wrote down.
    r"|\bholdfast \(pyproject\.toml\)",
    re.MULTILINE,
)


def tracked() -> list[Path]:
    """The files of the repository; all below its folders where this is no checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    folders = ("src", "tests", "docs", "examples", "benchmarks", "requirements")
    return [*ROOT.glob("*.*"), *(path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())]


@pytest.mark.parametrize(
    "line",
    [
        "pip install 'holdfast[models]'",
        "pip install holdfast",
        "uv pip install 'holdfast'",
        '`pip install "holdfast"`',
        r"match=r'holdfast\[models\]'",
        "install them: pip install 'holdfast[{extra}]'",
        "holdfast==0.1.0",
        "holdfast>=0.1",
        "version('holdfast')",
        'version("holdfast")',
        "    #   holdfast (pyproject.toml)",
    ],
)
def test_the_search_finds_each_form_of_the_other_project(line: str) -> None:
    assert ANOTHER_PROJECT.search(line)


@pytest.mark.parametrize(
    "line",
    [
        "pip install 'holdfast-agents[models]'",
        "pip install holdfast-agents",
        "`.venv/bin/pip install -e .`, then `holdfast serve`",
        "holdfast-agents==0.1.0",
        "version('holdfast-agents')",
        "import holdfast",
        "uvx mcp-server-time holdfast serve",
    ],
)
def test_the_search_passes_our_own_name(line: str) -> None:
    assert not ANOTHER_PROJECT.search(line)


def test_no_line_of_the_repository_installs_or_asks_for_another_project() -> None:
    found = []
    for path in tracked():
        if path == Path(__file__):
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {hit[0]!r}" for hit in ANOTHER_PROJECT.finditer(text)]
    assert found == []


def test_the_metadata_is_ours_and_has_the_version_of_the_package() -> None:
    assert PROJECT["name"] == "holdfast-agents"
    assert importlib.metadata.version("holdfast-agents") == holdfast.__version__ == PROJECT["version"]
    assert PROJECT["scripts"] == {"holdfast": "holdfast.cli:main"}


@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"]))
def test_a_hint_names_the_distribution(extra: str) -> None:
    assert MissingExtra("this part", extra=extra).hint == f"install them: pip install 'holdfast-agents[{extra}]'"
