"""A confined script has no way out of its namespaces but those that it was given: no odd sockets, no shared keys."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.tools.sandbox.environment import clean_environment
from holdfast.tools.sandbox.sandbox import Sandbox, find_isolation
from holdfast.tools.sandbox.system_call_filter import system_call_filter

pytestmark = pytest.mark.skipif(
    find_isolation().kind == "none" or system_call_filter() is None,
    reason=f"this machine confines nothing: {find_isolation().reason}",
)

ATTACK = r"""
import ctypes, errno, json, platform, socket
libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
SOCKET, ADD_KEY, KEYCTL, FAULTS = (41, 248, 250, 323) if X86 else (198, 217, 219, 282)

def call(*words):
    ctypes.set_errno(0)
    made = libc.syscall(*words)
    return "done" if made >= 0 else errno.errorcode[ctypes.get_errno()]

families = [n for n in range(50) for kind in (1, 2, 3, 5) if call(SOCKET, n, kind, 0) == "done"]
print(json.dumps({
    "families": families,
    "high bits": call(SOCKET, ctypes.c_ulong(40 | 1 << 40), 1, 0),
    "leave a key": call(ADD_KEY, b"user", b"left", b"by another user", 15, -3),
    "find the keyring": call(KEYCTL, 0, -3, 1),
    "faults": call(FAULTS, 1),
}))
"""


@pytest.mark.parametrize("network", ["deny", "allow"])
def test_no_socket_leaves_the_network_and_no_key_is_left_for_the_next_script(tmp_path: Path, network: str) -> None:
    sandbox = Sandbox(network="deny" if network == "deny" else "allow")
    argv = sandbox.command(
        [sys.executable, "-I", "-S", "-c", ATTACK], isolation=find_isolation(), directory=tmp_path, writable=[tmp_path]
    )
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=clean_environment(), check=False)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert set(told.pop("families")) <= {1, 2, 10, 16}  # Unix, IPv4, IPv6, and netlink, which tells of interfaces
    assert set(told.values()) <= {"ENOSYS", "EAFNOSUPPORT"}, told
    assert platform.machine() in ("x86_64", "aarch64", "riscv64")
