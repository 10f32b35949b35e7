"""Escapes by system calls that change the machine or open the kernel's depths.

None of them does harm where it is let through: what is passed is empty, not there, or what is so already. The kernel
looks at a caller's rights before it looks at that, so an error about the argument means that the call was let through.
"""

from __future__ import annotations

from typing import Any

from tests.system.escapes.escape import Escape, says

__all__ = ["ESCAPES"]


def _says(name: str, program: str, **more: Any) -> Escape:
    return Escape(name=name, subject="the kernel", program=program, judge=says, **more)


def _passes(name: str, call: str, **more: Any) -> Escape:
    """A call that fails for its argument only where the caller would have been allowed to make it."""
    program = (
        f"got = refused({call})\nprint(errno.errorcode.get(got))\n"
        "got in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP) or say()"
    )
    return _says(name, program, **more)


ESCAPES = (
    _says(
        "opens-a-ring",
        "os.close(call('io_uring_setup', 4, ctypes.create_string_buffer(256)))\nsay()",
        may_fail="io_uring is off",
    ),
    _says(
        "loads-a-program-of-the-kernel",
        "code = ctypes.create_string_buffer(struct.pack('<BBhiBBhi', 0xB7, 0, 0, 0, 0x95, 0, 0, 0))\n"
        "license = ctypes.create_string_buffer(b'GPL')\n"
        "asked = ctypes.create_string_buffer(struct.pack('IIQQ', 1, 2, ctypes.addressof(code), "
        "ctypes.addressof(license)) + bytes(100))\n"
        "os.close(call('bpf', 5, asked, 100))\n"
        "say()",
        may_fail="only root may load programs",
    ),
    _says(
        "makes-a-map-of-the-kernel",
        "os.close(call('bpf', 0, ctypes.create_string_buffer(struct.pack('IIIII', 2, 4, 4, 1, 0) + bytes(80)), 72))\n"
        "say()",
        may_fail="only root may make maps",
    ),
    _says(
        "counts-events",
        "os.close(call('perf_event_open', ctypes.create_string_buffer(struct.pack('IIQQQQQ', 1, 112, 0, "
        "0, 0, 0, 1 << 5 | 1 << 6) + bytes(64)), 0, -1, -1, 0))\n"
        "say()",
        may_fail="only root may count events",
    ),
    _says(
        "counts-events-of-a-process",
        "os.close(call('perf_event_open', ctypes.create_string_buffer(struct.pack('IIQQQQQ', 1, 112, 0, "
        "0, 0, 0, 1 << 5 | 1 << 6) + bytes(64)), at.victim, -1, -1, 0))\n"
        "say()",
        may_fail="only root may count events",
    ),
    _says("handles-page-faults", "os.close(call('userfaultfd', 1))\nsay()", may_fail="userfaultfd is off"),
    _passes("loads-a-kernel", "'kexec_load', 0, 0, None, 0", needs="root", may_fail="the kernel has no kexec"),
    _passes("loads-a-module", "'init_module', b'', 0, b''", needs="root", may_fail="the kernel has no modules"),
    _passes(
        "loads-a-module-of-a-file", "'finit_module', -1, b'', 0", needs="root", may_fail="the kernel has no modules"
    ),
    _passes(
        "unloads-a-module",
        "'delete_module', b'holdfast-zoo', os.O_NONBLOCK",
        needs="root",
        may_fail="the kernel has no modules",
    ),
    _passes("reboots", "'reboot', 0, 0, 0, None", needs="root"),
    _passes("swaps-to-a-file", "'swapon', b'/nonexistent', 0", needs="root", may_fail="the kernel has no swap"),
    _passes("accounts-to-a-file", "'acct', b'/nonexistent'", needs="root", may_fail="the kernel has no accounting"),
    _passes(
        "quotas",
        "'quotactl', 0x800001 << 8, b'/nonexistent', 0, None",
        needs="root",
        may_fail="the kernel has no quotas",
    ),
    _says(
        "names-the-host",
        "name = socket.gethostname().encode()\ncall('sethostname', name, len(name))\nsay()",
        needs="root",
    ),
    _says(
        "names-the-domain",
        "held = open('/proc/sys/kernel/domainname').read().strip().encode()\n"
        "call('setdomainname', held, len(held))\n"
        "say()",
        needs="root",
    ),
    _says(
        "reads-the-kernels-log",
        "call('syslog', 3, ctypes.create_string_buffer(4096), 4096) >= 0 and say()",
        may_fail="only root may read the kernel's log",
    ),
    _says(
        "sizes-the-kernels-log",
        "call('syslog', 10, None, 0) >= 0 and say()",
        may_fail="only root may size the kernel's log",
    ),
    _says("uses-the-ports", "call('iopl', 3)\nsay()", needs="root", may_fail="the processor has no ports"),
    _says("uses-a-port", "call('ioperm', 0x80, 1, 1)\nsay()", needs="root", may_fail="the processor has no ports"),
    _passes(
        "sets-the-clock", "'adjtimex', ctypes.create_string_buffer(struct.pack('I', 0x4000) + bytes(252))", needs="root"
    ),
    _says(
        "traces-a-child-that-was-filtered",
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    call('ptrace', 0, 0, 0, 0)\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    os._exit(0)\n"
        "_, status = os.waitpid(pid, os.WUNTRACED)\n"
        "stopped = os.WIFSTOPPED(status)\n"
        "call('ptrace', 8, pid, 0, 0)\n"
        "stopped and say()",
    ),
    _says(
        "advises-on-memory-of-a-process",
        "held = struct.pack('PN', at.held & ~4095, 4096)\n"
        "call('process_madvise', call('pidfd_open', at.victim, 0), held, 1, 20, 0) and say()",
        needs="root",
    ),
    _says(
        "moves-pages-of-a-process",
        "held = ctypes.c_ulong(1)\n"
        "call('migrate_pages', at.victim, 8, ctypes.byref(held), ctypes.byref(held)) >= 0 and say()",
        may_fail="the kernel has no memory policies",
    ),
    _says(
        "opens-by-a-handle",
        "handle = ctypes.create_string_buffer(struct.pack('I', 128) + bytes(132))\n"
        "mount = ctypes.c_int()\n"
        "call('name_to_handle_at', AT_FDCWD, b'.', handle, ctypes.byref(mount), 0)\n"
        "os.close(call('open_by_handle_at', os.open('.', os.O_RDONLY), handle, os.O_RDONLY))\n"
        "say()",
        needs="root",
    ),
    _says(
        "hangs-up-its-terminal",
        "got = refused(153 if platform.machine() == 'x86_64' else 58)\ngot == 0 and say()",
        needs="root",
    ),
)
