"""What sealing costs where the kernel refuses it."""

from __future__ import annotations

import errno
import platform
import subprocess
import sys

import pytest

from holdfast.runtime.processes import procfs

pytestmark = pytest.mark.skipif(
    not procfs.supported() or platform.machine() != "x86_64", reason="the refusal is written for one machine"
)

REFUSED = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 317), (0x06, 0, 0, 0x50000 | {number}), (0x06, 0, 0, 0x7FFF0000)]
program = b"".join(struct.pack("=HBBI", *one) for one in code)
buffer = ctypes.create_string_buffer(program, len(program))
header = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(buffer)))
if libc.prctl(22, 2, header, 0, 0) != 0:
    print("no filter")
    raise SystemExit
from holdfast.runtime.processes.seal import seal
sealed = seal()
print(sealed.sealed, sealed.gave_up_privileges, libc.prctl(39, 0, 0, 0, 0))
"""


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EINVAL])
def test_no_privilege_is_given_up_for_a_seal_that_is_refused_anyway(number: int) -> None:
    said = subprocess.run(
        [sys.executable, "-c", REFUSED.format(number=number)], capture_output=True, text=True, check=True
    ).stdout.strip()
    if said == "no filter":
        pytest.skip("only root refuses it so")
    assert said == "False False 0"
