"""Search for a pattern in a workspace's files, in a separate process because a bad pattern may run forever."""

from __future__ import annotations

import fnmatch
import re

from holdfast.clock import system_clock
from holdfast.errors import ToolFailed
from holdfast.tools.files.entries import is_binary
from holdfast.tools.files.private_paths import kept_private
from holdfast.tools.files.workspace import Workspace

__all__ = ["search"]

_FILE_BYTES = 20_000_000
_LINE_CHARACTERS = 10_000
_SHOWN_CHARACTERS = 300
_RESULT_CHARACTERS = 40_000
_RESULTS = 200
_LOOK_EVERY = 1024
_UNSEARCHED = (".git",)


def search(
    root: str, pattern: str, path: str, files: str, ignore_case: bool, budget_s: float, private: tuple[str, ...]
) -> str:
    """Return the matching lines as ``path:number: line``, followed by a summary line.

    Parameters:
        root: root of the workspace.
        pattern: a regular expression, matched against each line.
        path: file or folder to search.
        files: pattern for the names of the files to search, such as ``*.py``.
        ignore_case: whether to match case-insensitively.
        budget_s: time limit in seconds, after which the matches found so far are returned.
        private: paths that are private in the calling process.

    Raises:
        ToolFailed: if the pattern is invalid or the path is unusable.
    """
    with kept_private(private):
        return _search(root, pattern, path, files, ignore_case, budget_s)


def _search(root: str, pattern: str, path: str, files: str, ignore_case: bool, budget_s: float) -> str:
    try:
        matches = re.compile(pattern, re.IGNORECASE if ignore_case else 0).search
    except (re.error, RecursionError, OverflowError) as error:
        raise ToolFailed(f"invalid regular expression: {error}") from None
    workspace = Workspace(root)
    until = system_clock.monotonic() + budget_s
    found: list[str] = []
    size = searched = skipped = 0
    why = ""
    for entry in workspace.walk(path, unsearched=_UNSEARCHED):
        if system_clock.monotonic() > until:
            why = f"it took longer than {budget_s:g} s"
            break
        if not entry.is_file or not fnmatch.fnmatchcase(entry.name, files):
            continue
        try:
            data = entry.read(_FILE_BYTES + 1)
        except (OSError, ToolFailed):  # unreadable, or no longer a file
            skipped += 1
            continue
        if len(data) > _FILE_BYTES or is_binary(data):
            skipped += 1
            continue
        searched += 1
        for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
            if matches(line[:_LINE_CHARACTERS]):
                text = f"{entry.path}:{number}: {line.strip()[:_SHOWN_CHARACTERS]}"
                found.append(text)
                size += len(text)
                if len(found) >= _RESULTS or size > _RESULT_CHARACTERS:
                    why = "there may be more"
                    break
            if not number % _LOOK_EVERY and system_clock.monotonic() > until:
                why = f"it took longer than {budget_s:g} s"
                break
        if why:
            break
    told = f"{len(found)} line{'' if len(found) == 1 else 's'} found; files searched: {searched}"
    if skipped:
        told += f"; skipped (binary, large or unreadable): {skipped}"
    if why:
        told += f"; the search ended early: {why}; narrow it down"
    return "\n".join([*found, f"[{told}]"])
