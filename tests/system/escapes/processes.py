"""Escapes that read the memory and environments of processes of the host, or signal, slow and steer them."""

from __future__ import annotations

from typing import Any

from tests.system.escapes.escape import Escape, harms, reads, says

__all__ = ["ESCAPES"]


def _reads(name: str, program: str, **more: Any) -> Escape:
    return Escape(name=name, subject="memory and environments", program=program, judge=reads, **more)


def _harms(name: str, program: str, **more: Any) -> Escape:
    return Escape(name=name, subject="signals and control", program=program, judge=harms, target=True, **more)


_READING = (
    _reads("reads-the-environment-of-a-process", "show(f'/proc/{at.victim}/environ')"),
    _reads("reads-the-arguments-of-a-process", "show(f'/proc/{at.victim}/cmdline')"),
    _reads("reads-the-arguments-by-ps", "ps axww -o args", language="shell"),
    _reads(
        "reads-every-environment",
        "for path in glob.glob('/proc/[0-9]*/environ')[:3000]:\n"
        "    try: text = open(path, 'rb').read()\n"
        "    except OSError: continue\n"
        "    if b'PROVIDER_API_KEY=secret-' in text: print(text.decode('utf-8', 'replace'))",
    ),
    _reads(
        "reads-the-memory-of-a-process",
        "with open(f'/proc/{at.victim}/mem', 'rb') as file:\n"
        "    file.seek(at.held)\n"
        "    print(file.read(at.held_bytes).decode())",
    ),
    _reads(
        "reads-memory-by-process-vm-readv",
        "held = ctypes.create_string_buffer(at.held_bytes)\n"
        "here = struct.pack('PN', ctypes.addressof(held), at.held_bytes)\n"
        "there = struct.pack('PN', at.held, at.held_bytes)\n"
        "call('process_vm_readv', at.victim, here, 1, there, 1, 0)\n"
        "print(held.raw.decode())",
    ),
    _reads(
        "reads-memory-by-ptrace",
        "call('ptrace', 0x4206, at.victim, 0, 0)\n"
        "with open(f'/proc/{at.victim}/mem', 'rb') as file:\n"
        "    file.seek(at.held)\n"
        "    print(file.read(at.held_bytes).decode())",
    ),
    _reads(
        "takes-a-descriptor-by-pidfd-getfd",
        "fd = call('pidfd_getfd', call('pidfd_open', at.victim, 0), at.anonymous, 0)\n"
        "print(os.pread(fd, 4096, 0).decode())",
    ),
    _reads(
        "takes-a-socket-by-pidfd-getfd",
        "fd = call('pidfd_getfd', call('pidfd_open', at.victim, 0), at.line, 0)\n"
        "print(socket.socket(fileno=fd).recv(4096, socket.MSG_PEEK | socket.MSG_DONTWAIT).decode())",
    ),
    _reads("reads-its-own-environment", "env", language="shell"),
    _reads("reads-the-environment-of-its-parent", "show(f'/proc/{os.getppid()}/environ')"),
    _reads(
        "reads-the-environment-of-process-1",
        "for pid in (1, at.starter):\n    try: show(f'/proc/{pid}/environ')\n    except OSError: pass",
    ),
    _reads(
        "reads-the-descriptors-it-inherits",
        "for fd in range(3, 256):\n"
        "    try: print(os.pread(fd, 4096, 0).decode())\n"
        "    except (OSError, UnicodeDecodeError): pass",
    ),
    _reads(
        "leaves-by-a-folder-it-inherits",
        "for fd in range(3, 256):\n    try: os.fchdir(fd); show('held'); break\n    except OSError: pass",
    ),
    Escape(
        name="inherits-a-socket",
        subject="memory and environments",
        program="for fd in range(3, 256):\n"
        "    try: stat.S_ISSOCK(os.fstat(fd).st_mode) and say()\n"
        "    except OSError: pass",
        judge=says,
    ),
    Escape(
        name="takes-a-socket-of-the-process-that-starts-it",
        subject="memory and environments",
        program="first = call('pidfd_open', 1 if at.walled else at.starter, 0)\n"
        "for fd in range(64):\n"
        "    try: stat.S_ISSOCK(os.fstat(call('pidfd_getfd', first, fd, 0)).st_mode) and say()\n"
        "    except OSError as error: print(fd, error.errno)",
        judge=says,
    ),
    Escape(
        name="writes-the-memory-of-a-process",
        subject="memory and environments",
        program="with open(f'/proc/{at.victim}/mem', 'r+b', buffering=0) as file:\n"
        "    file.seek(at.held)\n"
        "    file.write(b'held') == 4 and say()",
        judge=says,
    ),
    Escape(
        name="writes-memory-by-process-vm-writev",
        subject="memory and environments",
        program="forged = ctypes.create_string_buffer(b'held', 4)\n"
        "here = struct.pack('PN', ctypes.addressof(forged), 4)\n"
        "call('process_vm_writev', at.victim, here, 1, struct.pack('PN', at.held, 4), 1, 0) == 4 and say()",
        judge=says,
    ),
    Escape(
        name="sees-the-processes-of-the-host",
        subject="memory and environments",
        program="str(at.victim) in os.listdir('/proc') and say()",
        judge=says,
    ),
    Escape(
        name="sees-where-memory-of-a-process-lies",
        subject="memory and environments",
        program="'stack' in open(f'/proc/{at.victim}/maps').read() and say()",
        judge=says,
    ),
    Escape(
        name="compares-itself-with-a-process",
        subject="memory and environments",
        program="call('kcmp', os.getpid(), at.victim, 1, 0, 0) >= 0 and say()",
        judge=says,
        may_fail="the kernel has no kcmp",
    ),
    Escape(
        name="follows-a-process-by-pidfd",
        subject="memory and environments",
        program="call('pidfd_open', at.victim, 0)\nsay()",
        judge=says,
        known={"linux-landlock": "a pid file descriptor alone gives nothing: signals and descriptors are refused"},
    ),
)

_HARMING = (
    _harms("kills-a-process", "os.kill(at.target, signal.SIGKILL)"),
    _harms("stops-a-process", "os.kill(at.target, signal.SIGSTOP)"),
    _harms("kills-a-group", "os.killpg(os.getpgid(at.target), 0); os.kill(at.target, signal.SIGTERM)"),
    _harms("kills-by-tgkill", "call('tgkill', at.target, at.target, signal.SIGKILL)"),
    _harms("kills-by-tkill", "call('tkill', at.target, signal.SIGKILL)"),
    _harms("kills-by-pidfd", "call('pidfd_send_signal', call('pidfd_open', at.target, 0), signal.SIGKILL, None, 0)"),
    _harms(
        "kills-by-sigqueue",
        "call('rt_sigqueueinfo', at.target, signal.SIGTERM, struct.pack('iii', signal.SIGTERM, 0, -1) + bytes(116))",
    ),
    _harms("kills-by-the-shell", 'kill -9 "$TARGET"', language="shell"),
    _harms(
        "kills-by-an-owned-descriptor",
        "read, write = os.pipe()\n"
        "fcntl.fcntl(read, fcntl.F_SETOWN, at.target)\n"
        "fcntl.fcntl(read, 10, signal.SIGKILL)\n"
        "fcntl.fcntl(read, fcntl.F_SETFL, fcntl.fcntl(read, fcntl.F_GETFL) | os.O_ASYNC)\n"
        "os.write(write, b'x'); time.sleep(0.1)",
    ),
    _harms("kills-by-ptrace", "call('ptrace', 0x4206, at.target, 0, 0x00100000)"),
    _harms(
        "slows-a-process",
        "os.sched_setscheduler(at.target, os.SCHED_BATCH, os.sched_param(0))\n"
        "os.setpriority(os.PRIO_PROCESS, at.target, 19)",
    ),
    _harms(
        "limits-a-process",
        "hard = resource.prlimit(at.target, resource.RLIMIT_NOFILE)[1]\n"
        "resource.prlimit(at.target, resource.RLIMIT_NOFILE, (7, hard))",
    ),
    _harms("binds-a-process-to-a-processor", "os.sched_setaffinity(at.target, {max(os.sched_getaffinity(0))})"),
    _harms("offers-a-process-to-the-killer", "open(f'/proc/{at.target}/oom_score_adj', 'w').write('900')"),
    Escape(
        name="protects-itself-from-the-killer",
        subject="signals and control",
        program="open('/proc/self/oom_score_adj', 'w').write('-900')\nsay()",
        judge=says,
        needs="root",
        known={"podman-root": "root may lower its score if the engine lacks CAP_SYS_RESOURCE; its memory is bounded"},
    ),
    Escape(
        name="raises-its-priority",
        subject="signals and control",
        program="os.setpriority(os.PRIO_PROCESS, 0, -5)\nsay()",
        judge=says,
        needs="root",
    ),
    Escape(
        name="raises-its-limits",
        subject="signals and control",
        program="resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 4096))\n"
        "say()",
        judge=says,
        needs="root",
        may_fail="root may not raise limits here",
    ),
    Escape(
        name="runs-in-real-time",
        subject="signals and control",
        program="os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))\n"
        "os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))\nsay()",
        judge=says,
        needs="root",
    ),
)

ESCAPES = (*_READING, *_HARMING)
