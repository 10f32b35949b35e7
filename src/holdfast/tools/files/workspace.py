"""A folder that tools work in; no path leads outside the folder.

Invariants
- A path is resolved one name at a time from the root. Each name is opened relative to its parent folder and never
  through a symbolic link; the target of a link is read and resolved by the same rule. So no link leads out of the
  root, not even a link that is created while the path is being resolved.
- Only regular files are opened, so a pipe or device can neither block a tool nor be affected by a tool.
- A file is replaced atomically by a rename, after a final interrupt check. A call that is stopped before the rename
  changes nothing, even if its thread was abandoned.
- No path leads to a store of this process's hosts or to a store's companion files, such as the local token. The same
  holds for settings files, Holdfast folders and files of secrets, even if they are created later. A root that
  contains such files of the host is refused when the `Workspace` is created, and again when the host starts
  (`holdfast.tools.files.workspace_guard`).
- A session's folder is never reused: a later session with the same key gets a new folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from holdfast import ids
from holdfast.agents.run import Run
from holdfast.agents.tool import SessionIdentity
from holdfast.errors import ConfigurationError, ToolFailed
from holdfast.protocol.access import is_covered
from holdfast.protocol.messages import Access
from holdfast.settings import CONFIG_FILE, DATA_FOLDER, data_folder
from holdfast.storage.sqlite.private_file import prepare_folder
from holdfast.tools.files.entries import (
    DEPTH_LIMIT,
    LIST_FOLDER,
    UNFIT,
    DirectoryEntry,
    Place,
    Version,
    kind,
    link_target,
    open_regular,
    version,
    walk_folder,
)
from holdfast.tools.files.made_entries import MadeEntries, made_entries
from holdfast.tools.files.private_paths import private_paths
from holdfast.tools.files.workspace_guard import WORKSPACES, check_folder

__all__ = ["ChangeGuard", "FileChanged", "Workspace"]

_LINKS_LIMIT = 40
_CHUNK_BYTES = 1 << 20
_LOCK_S = 10.0
_OPEN_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
_CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_NEVER = frozenset((CONFIG_FILE, DATA_FOLDER, ".env"))
"""Names that are off limits to tools everywhere: they control the host or hold its secrets."""

_UNFINISHED = ".unfinished"
"""Name of a session's folder while the files of the template are copied into it."""

_template_lock = threading.Lock()
"""Lock held while the files of a template are copied."""

_locks = tuple(threading.Lock() for _ in range(64))
"""Locks held from the last check of a file to the rename that replaces it; a file's location selects its lock."""


class Workspace:
    """A root folder and its file operations.

    All methods are thread-safe. The methods block, so call them from worker threads.

    Parameters:
        root: path of the root folder, which is created if missing. If None, the root is ``.holdfast/workspaces``
            beside the settings file; it is created with the first session's folder, and `per_session` is always on.
        per_session: whether each session gets its own folder below the root. Sessions then see only their own folder,
            both through file tools and through walled programs.
        owner: principal whose sessions work in the root. Each session of another principal gets its own folder in
            ``.holdfast/workspaces``. None means that the sessions of all principals share the root, and see its files.
        file_limit_bytes: maximum size in bytes of a file that is written or edited.
        template: small folder whose files are copied into each new folder of a session, or into the root if it is empty
            when it is first used, by the call that uses it first. Links are copied as links; files of the host, such as
            ``.env``, are left out. None means that the folders begin empty.
        protect_existing: whether a session's programs and file tools must ask a person before they change what the
            session did not make (see `holdfast.tools.files.made_entries`). It has no effect if the operator chose that
            programs run without a wall.

    Raises:
        ConfigurationError: if the root is not a folder and cannot be created, if the root contains or lies in the
            host's settings, store, code or Python environment, or if `template` is not a folder apart from the root.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        per_session: bool = False,
        owner: str | None = None,
        file_limit_bytes: int = 10_000_000,
        template: str | os.PathLike[str] | None = None,
        protect_existing: bool = True,
    ) -> None:
        if template is not None and not os.path.isdir(template):
            raise ConfigurationError(
                f"the workspace template {os.fspath(template)!r} is not a folder", hint="choose a folder with files"
            )
        self.per_session = per_session or root is None
        self.file_limit_bytes = file_limit_bytes
        self.protect_existing = protect_existing
        self._records: Path | None = None
        self._template: Path | None = None
        self._charged: Path | None = None
        self._owner = owner
        self._of_others: Workspace | None = None
        """The workspace of principals other than the owner."""
        if owner is not None and root is not None:
            self._of_others = Workspace(
                file_limit_bytes=file_limit_bytes, template=template, protect_existing=protect_existing
            )
        if root is None:
            self.root = data_folder().absolute() / WORKSPACES
            self._template = _template_of(template, self.root)
            return
        try:
            check_folder(root)
            for folder in Path(os.path.realpath(root)).parents:
                if folder.name == DATA_FOLDER:
                    prepare_folder(os.fspath(folder))
            os.makedirs(root, exist_ok=True)
            self.root = Path(root).resolve(strict=True)
        except (OSError, ValueError) as error:
            raise _unusable(root, error) from error
        self._template = _template_of(template, self.root)

    @property
    def charged(self) -> Path:
        """The folder whose size counts for the principal: that of all its sessions, or a root that is shared."""
        return self._charged or self.root

    @property
    def shared(self) -> bool:
        """Whether the folder also has files that are not of the principal's sessions: of others, or of its owner."""
        return self._charged is None

    def of(self, run: Run) -> Workspace:
        """Return the workspace of the run's session: this workspace, or the session's own folder."""
        if self._of_others is not None and run.principal != self._owner:
            return self._of_others.of(run)
        if not self.per_session:
            self._fill_root()
            return self
        own = self.location_of(run)
        try:
            if self.root.parent.name == DATA_FOLDER:
                prepare_folder(os.fspath(self.root.parent))
            for folder in (self.root, own.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            self._make_own(own)
            found = Workspace.__new__(Workspace)  # covered by the check of this root
            found.per_session = False
            found.file_limit_bytes = self.file_limit_bytes
            found.protect_existing = self.protect_existing
            found._records = self._records
            found._charged = own.parent.resolve(strict=True)
            found._template = None
            found._owner = None
            found._of_others = None
            found.root = own.resolve(strict=True)
        except OSError as error:
            raise _unusable(own, error) from error
        return found

    def location_of(self, session: SessionIdentity) -> Path:
        """Return the root of a session's workspace, which need not exist yet."""
        if self._of_others is not None and session.principal != self._owner:
            return self._of_others.location_of(session)
        if not self.per_session:
            return self.root
        return self.root / _folder_name(session.principal) / _folder_name(session.session_key, session.session_id)

    def keep_records(self, data_dir: Path | None) -> None:
        """Keep the records of what sessions made in a folder of the host; None keeps them in memory."""
        self._records = None if data_dir is None else data_dir / "made"
        if self._of_others is not None:
            self._of_others.keep_records(data_dir)

    def made_by(self, session: SessionIdentity) -> MadeEntries:
        """Return what a session made in this workspace, which is the workspace that `of` returned for the session."""
        name = "\0".join((session.principal, session.session_key, session.session_id))
        return made_entries(self.root, name, folder=self._records)

    def _make_own(self, folder: Path) -> None:
        """Create a session's folder with the files of the template, unless the folder exists."""
        template = self._template
        if template is None:
            folder.mkdir(mode=0o700, exist_ok=True)
            return
        if folder.is_dir():
            return
        with _template_lock:
            if folder.is_dir():
                return
            unfinished = folder.with_name(_UNFINISHED)
            shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed
            try:
                unfinished.mkdir(mode=0o700)
                _copy_files(template, unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)

    def _fill_root(self) -> None:
        """Copy the files of the template into the root when it is first used, if it is empty."""
        template = self._template
        if template is None:
            return
        with _template_lock:
            if self._template is not template:
                return
            try:
                if not os.listdir(self.root):
                    _copy_files(template, self.root)
            except OSError as error:
                for entry in self.root.iterdir():
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
                raise _unusable(self.root, error) from error
            self._template = None

    # ── paths ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _parts(self, path: str) -> tuple[bool, list[str]]:
        """Return whether a path starts at the root, and the parts of the path.

        Raises:
            ToolFailed: if the path is invalid, or is absolute and not below the root.
        """
        if UNFIT.search(path):
            raise ToolFailed(f"{path!r} is not a valid path: it contains control characters or lone surrogates")
        if os.path.isabs(path):
            try:
                relative = Path(path).relative_to(self.root)
            except ValueError:
                raise _outside(path) from None
            return True, [part for part in relative.parts if part != "."]
        return False, [part for part in path.split("/") if part not in ("", ".")]

    @contextlib.contextmanager
    def place(self, path: str, *, make_folders: bool = False, guard: ChangeGuard | None = None) -> Iterator[Place]:
        """Resolve a path inside the root. The target need not exist; its folder must, unless `make_folders` is true.

        Parameters:
            path: path relative to the root, or an absolute path below the root.
            make_folders: whether to create missing folders on the path.
            guard: guard that is asked before a folder is created and before the path is yielded; None allows changes.

        Raises:
            ToolFailed: if the path is invalid or private, leads out of the root or through a non-folder, or follows too
                many links, or if a folder on the path is missing or inaccessible.
        """
        parts = deque(self._parts(path)[1])
        folders: list[int] = []
        names: list[str] = []
        last = "."
        links = 0
        self.check_root()
        try:
            folders.append(_open_folder(os.fspath(self.root), None))
            while parts:
                part = parts.popleft()
                if part == "..":
                    if not names:
                        raise _outside(path)
                    names.pop()
                    os.close(folders.pop())
                    continue
                target = link_target(part, folders[-1])
                if target is not None:
                    links += 1
                    if links > _LINKS_LIMIT:
                        raise ToolFailed(f"{path}: too many levels of symbolic links")
                    try:
                        from_root, more = self._parts(target)
                    except ToolFailed:
                        raise _outside(path) from None
                    if from_root:
                        names.clear()
                        while len(folders) > 1:
                            os.close(folders.pop())
                    parts.extendleft(reversed(more))
                elif parts:
                    self._check_private("/".join([*names, part]))
                    if make_folders:
                        with contextlib.suppress(FileExistsError):
                            _make_folder(part, folders[-1], "/".join([*names, part]), guard)
                    folders.append(_open_folder(part, folders[-1]))
                    names.append(part)
                else:
                    last = part
            shown = "/".join(names if last == "." else [*names, last]) or "."
            self._check_private(shown)
            if last == "." and names:  # the path ended with '..'
                last = names.pop()
                os.close(folders.pop())
            if guard is not None:
                guard.check(shown)
            yield Place(folder=folders[-1], name=last, path=shown)
        except OSError as error:
            raise refusal(error, path) from error
        finally:
            for fd in folders:
                os.close(fd)

    def check_root(self) -> None:
        """Check that the root is a folder. Raises `ToolFailed` if it was removed or replaced."""
        try:
            os.close(_open_folder(os.fspath(self.root), None))
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise ToolFailed(
                f"the workspace cannot be opened: {reason}. Tell the user that the operator must restore its folder."
            ) from error

    def _is_private(self, shown: str) -> bool:
        """Return whether a path from the root, without links, is private or lies below a private path."""
        if any(name.casefold() in _NEVER for name in shown.split("/")):
            return True
        private = private_paths()
        if not private:
            return False
        whole = os.path.join(self.root, shown)
        return any(whole == path or whole.startswith(f"{path}/") for path in private)

    def _check_private(self, shown: str) -> None:
        if self._is_private(shown):
            raise ToolFailed(f"{shown} belongs to the host and is off limits to tools")

    def folder(self, path: str) -> Path:
        """Return the real path of a folder inside the root, to be used as a program's working directory.

        Raises:
            ToolFailed: if no such folder exists inside the root.
        """
        with self.place(path) as place:
            status = place.status()
            if status is None:
                raise ToolFailed(f"no such folder: {place.path}")
            if not stat.S_ISDIR(status.st_mode):
                raise ToolFailed(f"{place.path} is {kind(status.st_mode)}, not a folder")
            return self.root / place.path

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def open_file(self, path: str) -> Iterator[tuple[IO[bytes], Place]]:
        """Open a regular file for reading.

        Raises:
            ToolFailed: if no such file exists inside the root, or the file is unreadable or not a regular file.
        """
        with self.place(path) as place:
            with os.fdopen(open_regular(place), "rb") as file:
                yield file, place

    def replace(
        self,
        path: str,
        data: bytes,
        *,
        check: Callable[[], object],
        expected: Version | Literal["any"] = "any",
        guard: ChangeGuard | None = None,
    ) -> str:
        """Write a file atomically, create missing folders, and return the file's path relative to the root.

        Parameters:
            path: path of the file; a symbolic link inside the root is followed and kept.
            data: the complete new content.
            check: called without arguments before each chunk and right before the rename; if `check` raises an
                exception, the file stays unchanged.
            expected: `Version` that the file must still have; ``"any"`` accepts any version.
            guard: guard that decides what may be changed; None allows all changes.

        Raises:
            ToolFailed: if the path is unusable, the file is read-only or not a regular file, `data` is larger than
                `file_limit_bytes`, or the write fails.
            FileChanged: if the file's version is not `expected`.
        """
        if len(data) > self.file_limit_bytes:
            raise ToolFailed(f"{path}: {len(data):,} bytes exceed the file size limit ({self.file_limit_bytes:,})")
        with self.place(path, make_folders=True, guard=guard) as place:
            before = place.status()
            if before is not None:
                if not stat.S_ISREG(before.st_mode):
                    raise ToolFailed(f"{place.path} is {kind(before.st_mode)}, not a file")
                if not os.access(place.name, os.W_OK, dir_fd=place.folder):
                    raise ToolFailed(f"{place.path} is read-only")
            elif place.name == ".":
                raise ToolFailed("the path is the workspace itself, not a file")
            temporary = f".{place.name[:40]}.{ids.secret('')[:10]}.part"
            with contextlib.nullcontext() if guard is None else guard.made.creating(place.folder, temporary):
                fd = os.open(temporary, _CREATE_FILE, 0o666, dir_fd=place.folder)
            try:
                with os.fdopen(fd, "wb", 0) as file:
                    if before is not None:
                        os.fchmod(fd, before.st_mode & 0o777)  # never keep a set-uid bit on a model's content
                    rest = memoryview(data)
                    while rest:
                        check()
                        rest = rest[file.write(rest[:_CHUNK_BYTES]) :]
                with _held(place):
                    check()
                    if expected != "any" and version(place.status()) != expected:
                        raise FileChanged(f"{place.path} changed in the meantime")
                    os.rename(temporary, place.name, src_dir_fd=place.folder, dst_dir_fd=place.folder)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=place.folder)
                raise
            return place.path

    def walk(
        self, path: str, *, depth: int | None = None, unsearched: Collection[str] = ()
    ) -> Generator[DirectoryEntry, None, None]:
        """Yield the entries in and below a folder, sorted by name; if `path` is a file, yield only that file.

        Links below `path` are not followed. Private entries, entries removed during the walk, and the contents of
        unreadable subfolders are left out.

        Parameters:
            path: path of the folder or file.
            depth: number of folder levels to list; 1 lists only the folder's own entries, None means `DEPTH_LIMIT`.
            unsearched: names of folders to skip.

        Raises:
            ToolFailed: if no such file or folder exists inside the root, or if a folder has too many entries.
        """
        with self.place(path) as place:
            status = place.status()
            if status is None:
                raise ToolFailed(f"no such file or folder: {place.path}")
            if stat.S_ISREG(status.st_mode):
                yield DirectoryEntry(folder=place.folder, name=place.name, path=place.path, status=status)
            elif stat.S_ISDIR(status.st_mode):
                folder = os.open(place.name, LIST_FOLDER, dir_fd=place.folder)
                above = "" if place.path == "." else f"{place.path}/"
                for entry in walk_folder(folder, above, DEPTH_LIMIT if depth is None else depth, unsearched):
                    if not self._is_private(entry.path):
                        yield entry
            else:
                raise ToolFailed(f"{place.path} is {kind(status.st_mode)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeGuard:
    """Decides what a file tool may change in a workspace.

    Parameters:
        made: what the session made.
        root: root of the workspace.
        granted: access that the call has from people.
        advice: what to do about a file that must not be changed.
    """

    made: MadeEntries
    root: Path
    granted: Access
    advice: str

    def check(self, shown: str) -> None:
        """Check that a path from the root, without links, may be changed.

        Raises:
            ToolFailed: if the session did not make it, and no person granted it.
        """
        top = shown.split("/", 1)[0]
        if top == "." or self.made.is_made(top):
            return
        if not is_covered(Access(write=(os.path.join(self.root, shown),)), self.granted):
            what = f"{top}, which contains {shown}," if top != shown else shown
            raise ToolFailed(f"{what} was not made by this session, so {shown} is read-only; {self.advice}")


class FileChanged(Exception):
    """The file changed after it was read, so nothing was written."""


def refusal(error: OSError, path: str) -> ToolFailed:
    """Convert an operating system error to an error for the model."""
    match error:
        case FileNotFoundError():
            return ToolFailed(f"no such file or folder: {path}")
        case PermissionError():
            return ToolFailed(f"{path}: permission denied")
        case NotADirectoryError():
            return ToolFailed(f"{path}: a part of the path is not a folder")
        case IsADirectoryError():
            return ToolFailed(f"{path} is a folder")
        case _:
            return ToolFailed(f"{path}: {os.strerror(error.errno) if error.errno else error}")


def _outside(path: str) -> ToolFailed:
    return ToolFailed(f"{path} is outside the workspace; use paths relative to its root")


def _make_folder(name: str, above: int, shown: str, guard: ChangeGuard | None) -> None:
    if guard is None:
        os.mkdir(name, dir_fd=above)
        return
    with contextlib.suppress(FileNotFoundError):
        os.stat(name, dir_fd=above, follow_symlinks=False)
        return
    guard.check(shown)
    with guard.made.creating(above, name):
        os.mkdir(name, dir_fd=above)


def _open_folder(name: str, above: int | None) -> int:
    return os.open(name, _OPEN_FOLDER, dir_fd=above)


def _template_of(template: str | os.PathLike[str] | None, root: Path) -> Path | None:
    """Return the real path of a template. Raises `ConfigurationError` if it cannot be copied into the root."""
    if template is None:
        return None
    found, root = Path(os.path.realpath(template)), Path(os.path.realpath(root))
    if found == root or found in root.parents or root in found.parents:
        raise ConfigurationError(
            f"the workspace template {os.fspath(template)!r} contains the workspaces, or lies in them",
            hint="choose a folder apart from them, such as one with only the files to copy",
        )
    return found


def _copy_files(template: Path, folder: Path) -> None:
    """Copy the files of a template into an empty folder, which keeps its mode. Raises `OSError` if one fails."""
    mode = folder.stat().st_mode
    shutil.copytree(
        template,
        folder,
        symlinks=True,
        dirs_exist_ok=True,
        ignore=lambda _, names: [name for name in names if name.casefold() in _NEVER],
    )
    folder.chmod(mode & 0o777)


@contextlib.contextmanager
def _held(place: Place) -> Iterator[None]:
    folder = os.fstat(place.folder)
    lock = _locks[hash((folder.st_dev, folder.st_ino, place.name)) % len(_locks)]
    if not lock.acquire(timeout=_LOCK_S):
        raise ToolFailed(f"{place.path}: another write is still in progress; try again")
    try:
        yield
    finally:
        lock.release()


def _unusable(root: str | os.PathLike[str], error: Exception) -> ConfigurationError:
    return ConfigurationError(f"unusable workspace {os.fspath(root)!r}: {error}", hint="choose a writable folder")


def _folder_name(key: str, number: str = "") -> str:
    """Return a unique folder name for a key and number, even on a case-insensitive file system.

    The digest covers both the key and the number. The readable part never contains a dot or a slash, so no key leads
    to another folder.
    """
    digest = hashlib.sha256(f"{number}/{key}".encode("utf-8", "surrogatepass")).hexdigest()
    parts = [re.sub("[^A-Za-z0-9_-]", "_", key)[:40], *([number] if number else []), digest[:20]]
    return "-".join(parts)
