"""A confined script has no way out of its namespaces but those that it was given: no odd sockets, no shared keys."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest

from holdfast.tools.sandbox.sandbox import Network, Sandbox
from tests.tools.sandbox.walled import ALL_LAYERS, reason_against, run_walled

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


@pytest.mark.parametrize("network", ["none", "all"])
@pytest.mark.parametrize("layers", ALL_LAYERS)
def test_no_socket_leaves_the_network_and_no_key_is_left_for_the_next_script(
    tmp_path: Path, network: Network, layers: tuple[str, ...]
) -> None:
    if (reason := reason_against(layers)) is not None:
        pytest.skip(reason)
    if layers == ("landlock",) and network == "all":
        pytest.skip("network access needs namespaces")
    argv = [sys.executable, "-I", "-S", "-c", ATTACK]
    ended = run_walled(argv, folder=tmp_path, sandbox=Sandbox(network=network), layers=layers)
    assert ended.returncode == 0, ended
    told = json.loads(ended.output)
    assert set(told.pop("families")) <= {1, 2, 10, 16}  # Unix, IPv4, IPv6, and netlink, which tells of interfaces
    assert set(told.values()) <= {"ENOSYS", "EAFNOSUPPORT", "EACCES"}, told
    assert platform.machine() in ("x86_64", "aarch64", "riscv64")
