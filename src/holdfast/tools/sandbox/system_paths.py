"""Paths of the system and of this interpreter that every walled program may read, and no secrets.

Folders of keys are never listed: ``/etc/ssl/private``, ``/etc/pki/tls/private``, ``/etc/shadow`` and the like. So are
the folders that contain them.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.tools.sandbox.plan import WallPlan

__all__ = ["SYSTEM_PATHS", "interpreter_paths", "visible_paths"]

SYSTEM_PATHS = (
    "/bin",
    "/lib",
    "/lib32",
    "/lib64",
    "/sbin",
    "/usr",
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/ca-certificates.conf",
    "/etc/group",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/pki/ca-trust",
    "/etc/pki/tls/cert.pem",
    "/etc/pki/tls/certs",
    "/etc/protocols",
    "/etc/resolv.conf",
    "/etc/services",
    "/etc/ssl/cert.pem",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/timezone",
)
_INTERPRETER = ("bin", "include", "lib", "lib64", "pyvenv.cfg")
_INSTALLATION = ("libexec", "share", "ssl")


def interpreter_paths() -> list[str]:
    """Return the parts of this interpreter's installation that a script needs.

    The other contents of the installation's folder are left out, because it may be a project folder, with settings,
    workspaces and other files.
    """
    own = [os.path.join(sys.prefix, part) for part in _INTERPRETER]
    return own + [os.path.join(sys.base_prefix, part) for part in (*_INTERPRETER, *_INSTALLATION)]


def visible_paths(plan: WallPlan) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the real readable paths that exist, and the symbolic links of the visible file system with their targets.

    Paths that the plan makes writable are left out. Blocks for file system calls.
    """
    interpreter = [*interpreter_paths(), os.path.realpath(sys.executable)] if plan.interpreter else []
    present = [path for path in (*SYSTEM_PATHS, *interpreter, *plan.readable) if os.path.lexists(path)]
    plain = [path for path in present if os.path.realpath(os.path.dirname(path)) == os.path.dirname(path)]
    links = dict(plan.links) | {path: os.readlink(path) for path in plain if os.path.islink(path)}
    real = {os.path.realpath(path) for path in present} - set(plan.writable)
    return sorted(path for path in real if os.path.exists(path)), sorted(links.items())
