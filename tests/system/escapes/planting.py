"""Escapes that leave something that the host trusts later: beside the store, where programs start, in a home."""

from __future__ import annotations

from typing import Any

from tests.system.escapes.escape import Escape, says, writes

__all__ = ["ESCAPES"]


def _plants(name: str, program: str, **more: Any) -> Escape:
    return Escape(name=name, subject="what the host trusts later", program=program, judge=writes, **more)


def _may_write(name: str, program: str, **more: Any) -> Escape:
    return Escape(name=name, subject="what the host trusts later", program=program, judge=says, **more)


def _folder(name: str, path: str, **more: Any) -> Escape:
    """A folder in which a file could be made; none is: it has no name and is closed again."""
    return _may_write(name, f"os.close(os.open({path}, os.O_TMPFILE | os.O_WRONLY))\nsay()", **more)


def _file(name: str, path: str, **more: Any) -> Escape:
    """A file that could be written; nothing is."""
    return _may_write(name, f"os.close(os.open({path}, os.O_WRONLY))\nsay()", **more)


ESCAPES = (
    _plants(
        "plants-a-rollback-journal",
        "open(at.store + '-journal', 'wb').write(b'\\xd9\\xd5\\x05\\xf9\\x20\\xa1\\x63\\xd7')",
    ),
    _plants("plants-a-write-ahead-log", "open(at.store + '-wal', 'wb').write(b'\\x37\\x7f\\x06\\x82')"),
    _plants("plants-a-journal-by-a-link", "os.symlink(at.outside, 'o')\nopen('o/store.db-journal', 'wb').write(b'x')"),
    _plants(
        "plants-sitecustomize",
        "os.mkdir(at.outside + '/site-packages')\n"
        "open(at.outside + '/site-packages/sitecustomize.py', 'w').write('import os')",
    ),
    _plants(
        "plants-a-pth-file",
        "os.mkdir(at.outside + '/site-packages')\nopen(at.outside + '/site-packages/mine.pth', 'w').write('import os')",
    ),
    _plants(
        "plants-compiled-code",
        "os.mkdir(at.outside + '/__pycache__')\nopen(at.outside + '/__pycache__/agent.pyc', 'wb').write(b'x')",
    ),
    _plants("plants-a-module-beside-the-agent", "open(at.outside + '/json.py', 'w').write('import os')"),
    _plants("plants-a-conftest", "open(at.outside + '/conftest.py', 'w').write('import os')"),
    _plants("plants-an-env-file", "open(at.dotenv, 'a').write('PROVIDER_BASE_URL=http://mine')"),
    _plants(
        "plants-a-git-hook",
        "os.makedirs(at.outside + '/git/hooks')\n"
        "open(at.outside + '/git/hooks/pre-commit', 'w').write('#!/bin/sh'); os.chmod(at.outside + "
        "'/git/hooks/pre-commit', 0o755)",
    ),
    _plants("plants-a-git-config", "os.mkdir(at.home)\nopen(at.home + '/.gitconfig', 'w').write('[core]')"),
    _plants(
        "plants-a-shell-rc",
        "os.mkdir(at.home)\n"
        "for name in ('.bashrc', '.profile', '.zshenv'): open(f'{at.home}/{name}', 'a').write('true')",
    ),
    _plants(
        "plants-an-ssh-key",
        "os.makedirs(at.home + '/.ssh'); open(at.home + '/.ssh/authorized_keys', 'w').write('ssh-ed25519 A')",
    ),
    _plants("plants-user-site-packages", "os.makedirs(at.home + '/.local/lib/python3/site-packages')"),
    _plants("plants-a-service", "os.makedirs(at.home + '/.config/systemd/user')"),
    _plants("plants-in-another-workspace", "os.makedirs(at.others + '/.git/hooks')"),
    _file("may-write-the-standard-library", "os.__file__", needs="root"),
    _file("may-write-the-programs-of-the-machine", "'/usr/bin/tee'", needs="root"),
    _file("may-write-the-users-of-the-machine", "'/etc/passwd'", needs="root"),
    _file("may-write-the-resolver", "'/etc/resolv.conf'", needs="root", may_fail="the file belongs to somebody else"),
    _file("may-write-the-package-of-the-server", "at.package", needs="root"),
    _folder("may-make-files-in-the-package-of-the-server", "os.path.dirname(at.package)", needs="root"),
    _folder("may-make-files-in-etc", "'/etc'", needs="root"),
    _folder("may-make-files-in-the-path", "'/usr/local/bin'", needs="root"),
    _folder("may-make-files-in-the-timetable", "'/etc/cron.d'", needs="root", may_fail="there is no cron"),
    _folder("may-make-files-beside-libraries", "'/usr/lib'", needs="root"),
    _folder("may-make-files-in-the-home-of-root", "'/root'", needs="root"),
)
