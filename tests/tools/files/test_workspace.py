"""A workspace: no path leads out of it, whatever it is made of and whoever changes things meanwhile."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigurationError, ToolFailed
from holdfast.tools.files import workspace as workspace_module
from holdfast.tools.files.entries import Place, link_target, version
from holdfast.tools.files.workspace import FileChanged, Workspace


def nothing() -> None:
    """No interrupt."""


def read(workspace: Workspace, path: str) -> bytes:
    with workspace.open_file(path) as (file, _):
        return file.read()


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("outside")
    (tmp_path / "beside").mkdir()
    root = tmp_path / "root"
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "file").write_text("inside")
    (root / "sub" / "file").write_text("below")
    links: dict[str, str | Path] = {
        "absolute-out": tmp_path / "secret",
        "relative-out": "../secret",
        "folder-out": "..",
        "sub/up-and-out": "../../secret",
        "sub/deep/long-way-out": "../../sub/../../secret",
        "root-prefix": f"{root}-evil/secret",
        "loop": "loop",
        "loop-a": "loop-b",
        "loop-b": "sub/../loop-a",
        "proc": "/proc/self/root",
        "absolute-in": root / "sub" / "file",
        "relative-in": "sub/deep/../file",
        "link-to-link": "relative-in",
        "folder-in": "sub",
        "dangling": "nothing-there",
        "to-root": ".",
    }
    for name, target in links.items():
        (root / name).symlink_to(target)
    (tmp_path / "root-evil").mkdir()
    (tmp_path / "root-evil" / "secret").write_text("outside")
    return root


OUTSIDE = [
    "..",
    "../secret",
    "sub/../../secret",
    "/etc/passwd",
    "absolute-out",
    "relative-out",
    "folder-out/secret",
    "sub/up-and-out",
    "sub/deep/long-way-out",
    "root-prefix",
    "proc/etc/passwd",
    "to-root/folder-out/secret",
    "./sub/./..//../secret",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_no_path_leads_out(inside: Path, path: str) -> None:
    workspace = Workspace(inside)
    with pytest.raises(ToolFailed, match="outside the workspace"):
        read(workspace, path)
    with pytest.raises(ToolFailed, match="outside the workspace"):
        workspace.replace(path, b"x", check=nothing)
    with pytest.raises(ToolFailed, match="outside the workspace"):
        workspace.folder(path)
    with pytest.raises(ToolFailed, match="outside the workspace"):
        list(workspace.walk(path))
    assert (inside.parent / "secret").read_text() == "outside"
    assert not list((inside.parent / "beside").iterdir())


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("file", b"inside"),
        ("./sub//file", b"below"),
        ("sub/deep/../../file", b"inside"),
        ("absolute-in", b"below"),
        ("link-to-link", b"below"),
        ("folder-in/file", b"below"),
        ("to-root/to-root/file", b"inside"),
    ],
)
def test_what_is_inside_is_reached(inside: Path, path: str, content: bytes) -> None:
    workspace = Workspace(inside)
    assert read(workspace, path) == content
    assert read(workspace, str(inside / path)) == content


def test_a_root_that_is_a_link_is_one_folder_all_the_same(inside: Path) -> None:
    (inside.parent / "link").symlink_to(inside)
    workspace = Workspace(inside.parent / "link")
    assert read(workspace, "absolute-in") == b"below"
    assert workspace.folder("sub/deep/..") == inside / "sub"
    assert workspace.folder("to-root") == inside


@pytest.mark.parametrize(
    "path", ["loop", "loop-a", "a\0b", "a\nb", "\ud800", "sub/" + "x" * 300, "x/" * 3000, "file/x"]
)
def test_what_is_no_path_is_refused(inside: Path, path: str) -> None:
    workspace = Workspace(inside)
    for use in (lambda: read(workspace, path), lambda: list(workspace.walk(path)), lambda: workspace.folder(path)):
        with pytest.raises(ToolFailed) as refused:
            use()
        str(refused.value).encode()


def test_pipes_sockets_devices_and_folders_are_no_files(inside: Path) -> None:
    os.mkfifo(inside / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(inside / "socket"))
        cases = {"pipe": "a named pipe", "socket": "a socket", "sub": "a folder"}
        try:
            os.mknod(inside / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            cases["null"] = "a device"
        except PermissionError:
            pass
        workspace = Workspace(inside)
        for name, told in cases.items():
            with pytest.raises(ToolFailed, match=f"{name} is {told}, not a file"):
                read(workspace, name)
            with pytest.raises(ToolFailed, match=f"{name} is {told}, not a file"):
                workspace.replace(name, b"x", check=nothing)
    finally:
        listener.close()
    assert stat.S_ISFIFO((inside / "pipe").lstat().st_mode)


def test_a_write_appears_whole_keeps_the_mode_and_follows_links_inside(inside: Path) -> None:
    workspace = Workspace(inside)
    (inside / "file").chmod(0o751)
    assert workspace.replace("file", b"new", check=nothing) == "file"
    assert (inside / "file").read_bytes() == b"new"
    assert stat.S_IMODE((inside / "file").stat().st_mode) == 0o751
    assert workspace.replace("link-to-link", b"through", check=nothing) == "sub/file"
    assert (inside / "link-to-link").is_symlink() and (inside / "sub" / "file").read_bytes() == b"through"
    assert workspace.replace("a/b/c", b"deep", check=nothing) == "a/b/c"
    assert workspace.replace("dangling", b"now there", check=nothing) == "nothing-there"
    assert read(workspace, "dangling") == b"now there"


def test_a_write_that_is_stopped_leaves_nothing(inside: Path) -> None:
    class Stop(BaseException):
        pass

    workspace = Workspace(inside)
    before = sorted(os.listdir(inside))
    for last in range(3):  # before the first piece, before the second one, before the rename
        calls = iter(range(10))

        def check(last: int = last, calls: Any = calls) -> None:
            if next(calls) == last:
                raise Stop

        with pytest.raises(Stop):
            workspace.replace("file", b"x" * ((1 << 20) + 1), check=check)
        assert (inside / "file").read_text() == "inside"
        assert sorted(os.listdir(inside)) == before


def test_a_write_over_a_change_that_was_not_seen_is_refused(inside: Path) -> None:
    workspace = Workspace(inside)
    seen = version((inside / "file").stat())
    workspace.replace("file", b"other", check=nothing)
    with pytest.raises(FileChanged):
        workspace.replace("file", b"mine", check=nothing, expected=seen)
    with pytest.raises(FileChanged):
        workspace.replace("sub/file", b"mine", check=nothing, expected=None)
    assert workspace.replace("new", b"mine", check=nothing, expected=None) == "new"
    assert (inside / "file").read_bytes() == b"other"


def test_limits_and_permissions_are_told(inside: Path) -> None:
    workspace = Workspace(inside, file_limit_bytes=10)
    with pytest.raises(ToolFailed, match="11 bytes exceed the file size limit"):
        workspace.replace("file", b"x" * 11, check=nothing)
    with pytest.raises(ToolFailed, match=r"itself, not a file|is a folder"):
        workspace.replace(".", b"x", check=nothing)
    with pytest.raises(ToolFailed, match="no such file: missing"):
        read(workspace, "missing")
    with pytest.raises(ToolFailed, match="no such file or folder: missing/file"):
        read(workspace, "missing/file")
    if os.getuid() != 0:
        (inside / "file").chmod(0o400)
        with pytest.raises(ToolFailed, match="read-only"):
            workspace.replace("file", b"x", check=nothing)


def test_a_file_that_may_not_be_read_is_told(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who may read everything: so the system's answer is put in its place."""
    opened = os.open

    def refusing(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if path == "file":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(ToolFailed, match="sub/file: permission denied"):
        read(Workspace(inside), "sub/file")


def test_a_root_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for root in (tmp_path / "file", tmp_path / "file" / "below", "a\0b"):
        with pytest.raises(ConfigurationError, match="workspace"):
            Workspace(root)


def test_a_link_that_is_swapped_in_at_any_moment_leads_nowhere(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at a name and its opening somebody puts a link there; tried at each opening of the walk."""
    outside = inside.parent / "beside"
    (outside / "file").write_text("outside")
    original = link_target
    for swapped in ("sub", "sub/file"):
        (inside / "sub").mkdir(exist_ok=True)
        (inside / "sub" / "file").write_text("below")

        def look(name: str, folder: int, swapped: str = swapped) -> str | None:
            found = original(name, folder)
            if name == swapped.rpartition("/")[2]:
                (inside / swapped).rename(inside / f"moved-{name}")
                (inside / swapped).symlink_to(outside / "file" if name == "file" else outside)
            return found

        monkeypatch.setattr(workspace_module, "link_target", look)
        with pytest.raises(ToolFailed):
            read(Workspace(inside), "sub/file")
        (inside / swapped).unlink()
        (inside / f"moved-{swapped.rpartition('/')[2]}").rename(inside / swapped)
        with pytest.raises(ToolFailed):
            Workspace(inside).replace("sub/file", b"overwritten", check=nothing)
        (inside / swapped).unlink()
        monkeypatch.setattr(workspace_module, "link_target", original)
        (inside / f"moved-{swapped.rpartition('/')[2]}").rename(inside / swapped)
    assert (outside / "file").read_text() == "outside"
    assert sorted(os.listdir(outside)) == ["file"]


def test_a_link_or_pipe_that_is_swapped_in_after_the_look_is_not_opened(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Place.status
    for make in (lambda path: path.symlink_to(inside.parent / "secret"), os.mkfifo):

        def swapping(place: Place, make: Any = make) -> os.stat_result | None:
            found = look(place)
            (inside / "file").unlink()
            make(inside / "file")
            return found

        (inside / "file").unlink()
        (inside / "file").write_text("inside")
        monkeypatch.setattr(Place, "status", swapping)
        with pytest.raises(ToolFailed):
            read(Workspace(inside), "file")
        monkeypatch.setattr(Place, "status", look)


def test_links_swapped_by_a_racing_thread_never_show_or_change_what_is_outside(inside: Path) -> None:
    outside = inside.parent / "beside"
    (outside / "file").write_text("outside")
    (inside / "real").mkdir()
    (inside / "real" / "file").write_text("below")
    (inside / "there").symlink_to("real")
    (inside / "out").symlink_to(outside)
    over = False

    def swap() -> None:
        while not over:
            for source in ("real", str(outside)):
                temporary = inside / "temporary"
                temporary.symlink_to(source)
                temporary.rename(inside / "there")

    racing = threading.Thread(target=swap)
    racing.start()
    workspace = Workspace(inside)
    seen = set()
    try:
        for number in range(300):
            try:
                seen.add(read(workspace, "there/file") if number % 2 else b"")
                workspace.replace("there/other", b"written", check=nothing)
            except ToolFailed:
                continue
    finally:
        over = True
        racing.join()
    assert b"outside" not in seen
    assert sorted(os.listdir(outside)) == ["file"]


def test_no_descriptor_is_left(inside: Path) -> None:
    workspace = Workspace(inside)
    before = len(os.listdir("/proc/self/fd"))
    for path in (*OUTSIDE, "loop", "missing", "sub/missing/x", "file/x", "a\0b"):
        for use in (
            lambda path=path: read(workspace, path),
            lambda path=path: workspace.folder(path),
            lambda path=path: list(workspace.walk(path)),
        ):
            with pytest.raises(ToolFailed):
                use()
    for entry in workspace.walk("."):
        if entry.path == "sub/deep":
            break
    del entry
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_walk_follows_no_link_and_shows_names_that_can_be_shown(inside: Path) -> None:
    (inside / "sub" / "bad\nname").write_text("x")
    with open(os.fsencode(inside / "sub") + b"/\xff", "wb"):
        pass
    found = {entry.path: entry.line() for entry in Workspace(inside).walk(".")}
    assert found["folder-out"] == "folder-out -> .."
    assert not [path for path in found if path.startswith(("folder-in/", "to-root/", "proc/"))]
    assert "sub/bad\ufffdname" in found and "sub/\ufffd" in found
    assert found["file"] == "file  6 bytes" and found["sub"] == "sub/"
    assert [entry.path for entry in Workspace(inside).walk("sub", depth=1) if entry.name == "file"] == ["sub/file"]


def test_a_workspace_named_below_the_data_folder_leaves_that_folder_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Workspace(".holdfast/workspaces")
    assert stat.S_IMODE((tmp_path / ".holdfast").stat().st_mode) == 0o700
