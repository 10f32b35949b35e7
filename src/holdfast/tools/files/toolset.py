"""Tools that read, write, edit, list and search the files of a workspace."""

from __future__ import annotations

import contextlib
import fnmatch
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import IO

from holdfast.agents.run import Call
from holdfast.agents.tool import Approval, Tool, Toolset, ToolsetContext, tool
from holdfast.errors import Interrupted, ToolFailed
from holdfast.runtime import check_interrupt, current_scope
from holdfast.tools.files.change_rule import change_rule
from holdfast.tools.files.changes import REPEAT_AND_ASK, WorkspaceChange, change_workspace
from holdfast.tools.files.entries import is_binary, version
from holdfast.tools.files.private_paths import private_paths
from holdfast.tools.files.search import search
from holdfast.tools.files.workspace import FileChanged, Workspace
from holdfast.tools.plain_text import readable

__all__ = ["Files"]

_SEARCH_S = 15.0
_SEARCH_MARGIN_S = 5.0
_LINE_BYTES = 4_000
_PIECE_BYTES = 1 << 20
_SCAN_BYTES = 512_000_000
_LISTED = 500
_EDIT_ATTEMPTS = 5
_LOOK_EVERY = 256


class Files(Toolset):
    """File tools for a model: ``read_file``, ``write_file``, ``edit_file``, ``list_files`` and ``search_files``.

    A path never leads out of the workspace, not even through links. Files are replaced atomically; a call that is
    stopped before the replacement writes nothing.

    Parameters:
        workspace: workspace, or path of its root; None uses the default root of `Workspace`.
        read_bytes: number of bytes after which ``read_file`` returns no further lines.
        approval: whether a person must approve each file change, or a predicate that decides from the arguments.

    Raises:
        ConfigurationError: if `Workspace` rejects the folder.
    """

    executes = True

    def __init__(
        self,
        workspace: Workspace | str | os.PathLike[str] | None = None,
        *,
        read_bytes: int = 48_000,
        approval: Approval = False,
    ) -> None:
        self._workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace)
        self._read_bytes = read_bytes
        looking = tool(idempotent=True)
        changing = tool(approval=approval, access=change_rule(self._workspace))
        self._tools = (
            looking(self.read_file),
            changing(self.write_file),
            changing(self.edit_file),
            looking(self.list_files),
            tool(idempotent=True, timeout_s=_SEARCH_S + 4 * _SEARCH_MARGIN_S)(self.search_files),
        )

    @contextlib.asynccontextmanager
    async def lifespan(self, home: ToolsetContext) -> AsyncIterator[None]:
        """Keep the records of what sessions made while the host runs."""
        self._workspace.keep_records(home.data_dir)
        yield

    def folders(self) -> Sequence[Path]:
        """Return the root of the workspace."""
        return (self._workspace.root,)

    def tools(self) -> Sequence[Tool]:
        """Return the five file tools."""
        return self._tools

    def _of(self, call: Call) -> Workspace:
        return self._workspace.of(call.run)

    def read_file(self, call: Call, path: str, first_line: int = 1, lines: int = 2000) -> str:
        """Read a text file of the workspace, or a part of it.

        Parameters:
            path: relative to the workspace.
            first_line: line to start at, counted from 1.
            lines: maximum number of lines.
        """
        kept: list[bytes] = []
        room = self._read_bytes
        number = max(first_line, 1) - 1
        wanted = max(lines, 1)
        with self._of(call).open_file(path) as (file, place):
            if is_binary(file.read(8192)):
                size = os.fstat(file.fileno()).st_size
                raise ToolFailed(f"{place.path} is a binary file of {size:,} bytes; use a program to inspect it")
            file.seek(0)
            at = 0
            while at < number and _skip_line(file):
                at += 1
                if not at % _LOOK_EVERY:
                    check_interrupt()
                if file.tell() > _SCAN_BYTES:
                    raise ToolFailed(f"line {first_line:,} of {place.path} is beyond the read limit; use a program")
            while len(kept) < wanted and room > 0:
                check_interrupt()
                line = file.readline(_LINE_BYTES)
                if not line:
                    break
                if len(line) == _LINE_BYTES and not line.endswith(b"\n"):
                    line += f" [… {_skip_line(file):,} bytes of this line omitted]\n".encode()
                kept.append(line)
                room -= len(line)
            more = bool(file.read(1))
        if not kept:
            return f"[{place.path} has {at:,} lines]" if at or number else f"[{place.path} is empty]"
        text = readable(b"".join(kept))
        if number == 0 and not more:
            return text
        last = number + len(kept)
        rest = f"; more follows from line {last + 1}" if more else ", the end"
        return f"{text}{'' if text.endswith(chr(10)) else chr(10)}[lines {number + 1} to {last} of {place.path}{rest}]"

    async def write_file(self, call: Call, path: str, content: str, ask: bool = False) -> str:
        """Write a text file of the workspace. Missing folders are created; existing content is replaced.

        Parameters:
            path: relative to the workspace.
            content: the complete new content.
            ask: ask a person for permission first, for a file that this session did not make.
        """
        data = _encoded(content)

        def write(change: WorkspaceChange) -> str:
            return change.replace(path, data)

        saved = await change_workspace(call, self._workspace, write, advice=REPEAT_AND_ASK)
        return f"{saved} now has {len(data):,} bytes"

    async def edit_file(self, call: Call, path: str, old: str, new: str, every: bool = False, ask: bool = False) -> str:
        """Replace text in a file of the workspace.

        Parameters:
            path: relative to the workspace.
            old: the exact text to replace, with enough context to be unique.
            new: the replacement.
            every: replace all occurrences.
            ask: ask a person for permission first, for a file that this session did not make.
        """
        if not old:
            raise ToolFailed("old is empty; use write_file to write a whole file")
        before, after = _encoded(old), _encoded(new)

        def edit(change: WorkspaceChange) -> str:
            return _edit(change, path, before, after, every=every)

        return await change_workspace(call, self._workspace, edit, advice=REPEAT_AND_ASK)

    def list_files(self, call: Call, path: str = ".", pattern: str = "*", recursive: bool = False) -> str:
        """List the files and folders in a folder of the workspace, with the size of each file.

        Parameters:
            path: the folder, relative to the workspace.
            pattern: pattern of the names to list, such as *.py.
            recursive: include all subfolders.
        """
        lines: list[str] = []
        more = False
        with contextlib.closing(self._of(call).walk(path, depth=None if recursive else 1)) as entries:
            for entry in entries:
                check_interrupt()
                if fnmatch.fnmatchcase(entry.name, pattern):
                    if len(lines) == _LISTED:
                        more = True
                        break
                    lines.append(entry.line())
        if more:
            lines.append(f"[more than {_LISTED} entries; choose a subfolder or a narrower pattern]")
        return "\n".join(lines) or "[no matches]"

    async def search_files(
        self, call: Call, pattern: str, path: str = ".", files: str = "*", ignore_case: bool = False
    ) -> str:
        """Search files of the workspace for lines that match a regular expression.

        Parameters:
            pattern: a regular expression in Python syntax, matched against each line.
            path: the file or folder to search, relative to the workspace.
            files: pattern for the names of the files to search, such as *.py.
            ignore_case: match case-insensitively.
        """
        around = current_scope()
        assert around is not None, "tools run in a scope"
        workspace = self._of(call)
        workspace.check_root()
        root = os.fspath(workspace.root)
        scope = around.child("search", deadline_s=_SEARCH_S + _SEARCH_MARGIN_S, grace_s=0.0)
        try:
            async with scope:
                values = (root, pattern, path, files, ignore_case, _SEARCH_S, private_paths())
                found = await scope.spawn(search, *values, on="process", name="search_files")
        except Interrupted as interrupted:
            if interrupted.cause.kind == "deadline" and not around.interrupt.triggered:
                raise ToolFailed(
                    f"the search took longer than {_SEARCH_S + _SEARCH_MARGIN_S:g} s and was killed; the pattern"
                    " takes too long on some line: avoid nested repetition such as (a+)+"
                ) from None
            raise
        return found


def _edit(change: WorkspaceChange, path: str, before: bytes, after: bytes, *, every: bool) -> str:
    """Replace text in a file, and return what was done. Raises `ToolFailed` if the file does not allow it."""
    workspace = change.workspace
    for _ in range(_EDIT_ATTEMPTS):
        with workspace.open_file(path) as (file, place):
            seen = version(os.fstat(file.fileno()))
            data = file.read(workspace.file_limit_bytes + 1)
        if len(data) > workspace.file_limit_bytes:
            raise ToolFailed(
                f"{place.path} has more than {workspace.file_limit_bytes:,} bytes; use a program to edit it"
            )
        if is_binary(data[:8192]):
            raise ToolFailed(f"{place.path} is a binary file; use a program to change it")
        piece, instead = before, after
        if piece not in data and b"\r\n" in data:
            piece, instead = _with_crlf(before), _with_crlf(after)
        count = data.count(piece)
        if not count:
            raise ToolFailed(f"{place.path} does not contain this text; read the file and copy the text exactly")
        if count > 1 and not every:
            raise ToolFailed(
                f"{place.path} contains this text {count} times, {_lines_of(piece, data)}; include more context"
                ", or set every"
            )
        try:
            change.replace(path, data.replace(piece, instead), expected=seen)
        except FileChanged:
            continue
        return f"{count} replacement{'' if count == 1 else 's'} in {place.path}, {_lines_of(piece, data)}"
    raise ToolFailed(f"{path} keeps changing concurrently; nothing was written")


def _skip_line(file: IO[bytes]) -> int:
    """Skip the rest of a line and return the number of skipped bytes, which is 0 at the end of the file."""
    skipped = 0
    while piece := file.readline(_PIECE_BYTES):
        skipped += len(piece)
        if piece.endswith(b"\n") or skipped > _SCAN_BYTES:
            break
        check_interrupt()
    return skipped


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ToolFailed("the text contains lone surrogates, which UTF-8 cannot encode") from None


def _with_crlf(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")


def _lines_of(piece: bytes, data: bytes) -> str:
    """Return the line numbers of the first few occurrences of `piece` in `data`."""
    lines: list[int] = []
    at = data.find(piece)
    while at >= 0 and len(lines) < 6:
        lines.append(data.count(b"\n", 0, at) + 1)
        at = data.find(piece, at + len(piece))
    named = ", ".join(map(str, lines[:5])) + (" …" if len(lines) > 5 else "")
    return f"line {named}" if len(lines) == 1 else f"lines {named}"
