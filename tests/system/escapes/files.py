"""Escapes that read and write the files of the server and of another principal: by name, link, handle and race."""

from __future__ import annotations

from typing import Any

from tests.system.escapes.escape import Escape, reads, says, writes

__all__ = ["ESCAPES"]

LANDLOCK_SEES_NO_METADATA = "Landlock judges what is opened, made, moved and removed, not what is only looked at"


def _reads(name: str, program: str, **more: Any) -> Escape:
    return Escape(name=name, subject="reading files", program=program, judge=reads, **more)


def _writes(name: str, program: str, **more: Any) -> Escape:
    return Escape(name=name, subject="writing files", program=program, judge=writes, **more)


def _links(name: str, program: str, **more: Any) -> Escape:
    return Escape(name=name, subject="links and races", program=program, judge=reads, **more)


_READING = (
    _reads("reads-the-store", "show(at.store)"),
    _reads("reads-the-local-token", "show(at.token)"),
    _reads("reads-the-settings", "show(at.settings)"),
    _reads("reads-the-code-of-the-agent", "show(at.code)"),
    _reads("reads-the-env-file", "show(at.dotenv)"),
    _reads("reads-another-workspace", "show(at.notes)"),
    _reads("reads-by-dot-dot", "show('../../../' + at.place + '/store.db')"),
    _reads("reads-by-many-dot-dots", "show('../' * 40 + at.store)"),
    _reads("reads-by-proc-self-root", "show('/proc/self/root' + at.store)"),
    _reads("reads-by-proc-thread-root", "show('/proc/thread-self/root' + at.store)"),
    _reads("reads-by-proc-self-cwd", "show('/proc/self/cwd/../../../' + at.place + '/store.db')"),
    _reads(
        "reads-by-the-root-of-each-process",
        "for root in glob.glob('/proc/[0-9]*/root')[:3000]:\n"
        "    try: show(root + at.store); break\n"
        "    except OSError: pass",
    ),
    _reads(
        "reads-by-the-root-of-process-1",
        "show('/proc/1/root' + at.store)",
        needs="root",
        may_fail="process 1 is closed to root, too",
    ),
    _reads("reads-by-the-root-of-the-server", "show(f'/proc/{at.starter}/root' + at.store)"),
    _reads("reads-by-the-folder-of-a-process", "show(f'/proc/{at.victim}/cwd/held')"),
    _reads("reads-a-descriptor-of-a-process", "show(f'/proc/{at.victim}/fd/{at.gone}')"),
    _reads("reads-a-memfd-of-a-process", "show(f'/proc/{at.victim}/fd/{at.anonymous}')"),
    _reads(
        "reads-by-a-folder-descriptor",
        "fd = os.open('.', os.O_PATH | os.O_DIRECTORY)\n"
        "for step in ('..', '..', '..', *at.place.split('/')):\n"
        "    fd = os.open(step, os.O_PATH | os.O_DIRECTORY, dir_fd=fd)\n"
        "print(os.read(os.open('store.db', os.O_RDONLY, dir_fd=fd), 4096).decode())",
    ),
    _reads(
        "reads-by-openat2",
        "fd = call('openat2', AT_FDCWD, at.store.encode(), struct.pack('QQQ', os.O_RDONLY, 0, 0), 24)\n"
        "print(os.read(fd, 4096).decode())",
    ),
    _reads(
        "reads-by-its-handle",
        "handle = bytes.fromhex(at.handle)\n"
        "for where in ('.', '/', '/tmp', '/usr', '/proc/self/exe', '/dev'):\n"
        "    try: mount = os.open(where, os.O_RDONLY)\n"
        "    except OSError: continue\n"
        "    try: fd = call('open_by_handle_at', mount, handle, os.O_RDONLY)\n"
        "    except OSError as error: print(where, error); continue\n"
        "    print(os.read(fd, 4096).decode()); break",
        needs="root",
    ),
    _reads(
        "reads-by-searching-upwards",
        'cd "$(dirname "$ROOT")"; grep -rs secret- "$(basename "$ROOT")"',
        language="shell",
    ),
    _reads("reads-by-a-copy", 'cp "$STORE" copy; cat copy', language="shell"),
    _reads("reads-by-an-archive", 'tar -cf - -C "$OUTSIDE" . | cat', language="shell"),
    _reads("reads-by-a-here-document", 'cat <<EOF\n$(cat "$STORE")\nEOF', language="shell"),
    _reads("reads-by-an-error-message", 'sort "--files0-from=$STORE"; grep -f "$STORE" -n "$STORE"', language="shell"),
    _reads("reads-by-tracing-a-shell", 'set -x; while read -r line; do : "$line"; done < "$STORE"', language="shell"),
    Escape(
        name="sees-how-large-the-store-is",
        subject="reading files",
        program="os.stat(at.store).st_size and say()",
        judge=says,
        known={"linux-landlock": LANDLOCK_SEES_NO_METADATA},
    ),
    Escape(
        name="lists-the-folder-of-the-server",
        subject="reading files",
        program="os.listdir(at.outside) and say()",
        judge=says,
    ),
    Escape(
        name="watches-the-folder-of-the-server",
        subject="reading files",
        program="fd = call('inotify_init1', 0)\ncall('inotify_add_watch', fd, at.outside.encode(), 0x100)\nsay()",
        judge=says,
    ),
    Escape(
        name="watches-the-whole-machine",
        subject="reading files",
        program="call('fanotify_init', 4, 0)\nsay()",
        judge=says,
        needs="root",
    ),
    Escape(
        name="locks-the-store",
        subject="reading files",
        program="fcntl.flock(os.open(at.store, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)\nsay()",
        judge=says,
    ),
    Escape(
        name="enters-the-folder-of-the-server",
        subject="reading files",
        program="os.chdir(at.outside)\nsay()",
        judge=says,
        known={"linux-landlock": LANDLOCK_SEES_NO_METADATA},
    ),
    Escape(
        name="asks-whether-the-token-is-there",
        subject="reading files",
        program="os.access(at.token, os.F_OK) and say()",
        judge=says,
        known={"linux-landlock": LANDLOCK_SEES_NO_METADATA},
    ),
)

_WRITING = (
    _writes("writes-the-store", "open(at.store, 'w').write('forged')"),
    _writes("appends-to-the-settings", "open(at.settings, 'a').write('jwt_secret = \"mine\"')"),
    _writes("truncates-the-store", "os.truncate(at.store, 0)"),
    _writes("maps-the-store-and-writes", "fd = os.open(at.store, os.O_RDWR)\nmmap.mmap(fd, 4)[:] = b'HACK'"),
    _writes("removes-the-store", "os.unlink(at.store)"),
    _writes("removes-the-folder-of-the-server", 'rm -rf "$OUTSIDE"', language="shell"),
    _writes("renames-the-store", "os.rename(at.store, at.store + '.old')"),
    _writes("moves-the-token-into-its-workspace", "os.rename(at.token, 'token')"),
    _writes("moves-a-file-over-the-store", "open('forged', 'w').write('forged')\nos.rename('forged', at.store)"),
    _writes(
        "swaps-the-store-with-a-file",
        "open('forged', 'w').write('forged')\ncall('renameat2', AT_FDCWD, b'forged', AT_FDCWD, at.store.encode(), 2)",
    ),
    _writes("renames-the-folder-of-the-server", "os.rename(at.outside, at.outside + '-elsewhere')"),
    _writes("writes-by-the-root-of-the-server", "open(f'/proc/{at.starter}/root' + at.store, 'w').write('forged')"),
    _writes("writes-another-workspace", "open(at.notes, 'w').write('forged')"),
    _writes("makes-a-file-in-another-workspace", "open(at.others + '/new', 'w').write('hello')"),
    _writes("links-the-store", "os.link(at.store, at.store + '.copy')"),
    _writes("makes-a-fifo-beside-the-store", "os.mkfifo(at.outside + '/fifo')"),
    _writes("makes-a-socket-beside-the-store", "socket.socket(socket.AF_UNIX).bind(at.outside + '/socket')"),
    _writes(
        "makes-an-unnamed-file-and-names-it",
        "fd = os.open(at.outside, os.O_TMPFILE | os.O_WRONLY)\nnamed(fd, at.outside + '/named')",
    ),
    _writes("opens-the-token-to-everybody", "os.chmod(at.token, 0o666)"),
    _writes("closes-the-store-to-the-server", "os.chmod(at.store, 0)"),
    _writes("gives-the-store-away", "os.chown(at.store, 1, 1)", needs="root"),
    _writes("sets-the-times-of-the-store", "os.utime(at.store, (1, 1))"),
    _writes("sets-an-attribute-of-the-store", "os.setxattr(at.store, 'user.mine', b'1')"),
    _writes(
        "writes-by-sqlite",
        "import sqlite3\n"
        "connection = sqlite3.connect(at.outside + '/other.db')\n"
        "connection.execute('create table mine(x)')\n"
        "connection.commit()",
    ),
    _writes("writes-by-dd", 'echo forged | dd of="$STORE" conv=notrunc', language="shell"),
    _writes("writes-by-tee", 'echo forged | tee -a "$SETTINGS"', language="shell"),
    _writes("writes-by-tar", 'echo x > x; tar -cf x.tar x; tar -xf x.tar -C "$OUTSIDE"', language="shell"),
    _writes("writes-by-git", 'cd "$OUTSIDE" && git init -q .', language="shell"),
)

_LINKING = (
    _links("reads-by-a-symbolic-link", "os.symlink(at.store, 'link')\nshow('link')"),
    _links("reads-by-a-link-to-the-folder", "os.symlink(at.outside, 'folder')\nshow('folder/store.db')"),
    _links("reads-by-a-link-through-proc", "os.symlink('/proc/self/root' + at.store, 'through')\nshow('through')"),
    _links(
        "reads-by-a-chain-of-links", "os.symlink(at.root, 'a')\nos.symlink('a/' + at.place, 'b')\nshow('b/store.db')"
    ),
    _links("reads-by-a-hard-link", "os.link(at.store, 'hard')\nshow('hard')"),
    _links(
        "reads-by-a-hard-link-to-a-descriptor",
        "call('linkat', AT_FDCWD, f'/proc/{at.victim}/fd/{at.unnamed}'.encode(), AT_FDCWD, b'hard', 0x400)\n"
        "show('hard')",
        needs="root",
    ),
    _links(
        "reads-by-a-swapped-link",
        "os.mkdir('real'); open('real/store.db', 'w').write('mine')\nos.symlink(at.outside, 'fake')\n"
        "def swap():\n"
        "    while True: call('renameat2', AT_FDCWD, b'real', AT_FDCWD, b'fake', 2)\n"
        "threading.Thread(target=swap, daemon=True).start()\n"
        "for _ in range(3000):\n"
        "    try: text = open('real/store.db').read()\n"
        "    except OSError: continue\n"
        "    if 'mine' not in text: print(text); break",
    ),
    _links(
        "reads-by-a-dot-dot-race",
        "os.makedirs('deep/a/b/c')\n"
        "def move():\n"
        "    while True:\n"
        "        os.rename('deep/a/b/c', 'c'); os.rename('c', 'deep/a/b/c')\n"
        "threading.Thread(target=move, daemon=True).start()\n"
        "for _ in range(3000):\n"
        "    for path in ('c/../../../../', 'deep/a/b/c/../../../../../../../'):\n"
        "        try: show(path + at.place + '/store.db'); os._exit(0)\n"
        "        except OSError: pass",
    ),
    _links(
        "reads-after-its-folder-was-moved",
        "os.makedirs('x/y'); fd = os.open('x/y', os.O_PATH)\nos.rename('x/y', 'y')\nos.fchdir(fd)\n"
        "show('../../../../' + at.place + '/store.db')",
    ),
    _links(
        "reads-from-a-folder-that-is-gone",
        "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')\n"
        "for up in range(1, 9):\n"
        "    try: show('../' * up + at.store.lstrip('/')); break\n"
        "    except OSError: pass\n"
        "show(at.store)",
    ),
    _writes("moves-another-workspace", "os.rename(at.others, at.others + '-moved')"),
    Escape(
        name="moves-its-workspace",
        subject="links and races",
        program="folder = os.path.dirname(at.own)\nos.rename(folder, folder + '-moved')\n"
        "os.rename(folder + '-moved', folder)\nsay()",
        judge=says,
        alone=True,
    ),
)

ESCAPES = (*_READING, *_WRITING, *_LINKING)
