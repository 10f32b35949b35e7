"""Escapes from limits, and processes that outlive their call. Each bomb is small, and ends by itself.

A bomb gets through when it holds more than its limit for a while and is still there to say so: what checks sums checks
them now and then, and a bomb may overshoot for that long.
"""

from __future__ import annotations

from typing import Any

from tests.system.escapes.escape import Escape, Limits, Scene, says

__all__ = ["ESCAPES"]

_HOLD = "\ntime.sleep(1)\nsay()"
_SUM = "no step of a wall: what a principal's programs use together is measured and ended by its quotas"
_ALL = ("linux-both", "linux-namespaces", "linux-landlock", "bwrap", "podman")
_SUMMED = dict.fromkeys(_ALL, _SUM)
_COUNTED = dict.fromkeys(("linux-both-root", "linux-namespaces-root", "linux-landlock", "podman-user"), _SUM)
_TIGHT = Limits(
    memory_bytes=128 << 20,
    processes=24,
    open_files=64,
    file_bytes=4 << 20,
    disk_bytes=8 << 20,
    cpu_s=1,
    timeout_s=40.0,
)


def _bomb(name: str, program: str, **more: Any) -> Escape:
    """A program that has more than it may, and holds it."""
    return Escape(
        name=name,
        subject="bombs",
        program=program + _HOLD,
        judge=says,
        alone=True,
        **({"limits": _TIGHT} | more),
    )


def _lingers(scene: Scene) -> bool:
    return bool(scene.stage.end_marked(scene.name))


def _daemon(name: str, program: str, **more: Any) -> Escape:
    """A process that outlives its call: it is found outside by its mark, and ended."""
    return Escape(name=name, subject="outliving a call", program=program, judge=_lingers, alone=True, **more)


_MARKED = "['sh', '-c', 'for i in 1 2 3 4 5 6 7 8 9 10; do sleep 3; done', at.mark]"

ESCAPES = (
    _bomb(
        "forks-without-end",
        "for _ in range(120):\n    if os.fork() == 0:\n        time.sleep(4); os._exit(0)",
        known=_COUNTED,
    ),
    _bomb(
        "forks-from-its-children",
        "read, write = os.pipe()\n"
        "def grow(depth):\n"
        "    for _ in range(2 if depth else 0):\n"
        "        if os.fork() == 0: os.write(write, b'x'); grow(depth - 1); time.sleep(12); os._exit(0)\n"
        "try: grow(6)\n"
        "except OSError: time.sleep(12); os._exit(0)\n"
        "born, until = 0, time.monotonic() + 10\n"
        "while born <= 60 and time.monotonic() < until:\n"
        "    if select.select([read], [], [], 0.2)[0]: born += len(os.read(read, 999))\n"
        "assert born > 60",
        known=_COUNTED,
    ),
    _bomb(
        "starts-threads-without-end",
        "for _ in range(120): threading.Thread(target=time.sleep, args=(4,), daemon=True).start()",
    ),
    _bomb("takes-memory", "held = bytearray(256 << 20)"),
    _bomb(
        "takes-memory-in-many-processes",
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        held = bytearray(b'x') * (64 << 20)\n        time.sleep(4); os._exit(0)",
        known=_SUMMED,
    ),
    _bomb(
        "takes-memory-by-memfds",
        "chunk = bytes(4 << 20)\nfor _ in range(48): os.write(os.memfd_create('bomb'), chunk)",
        known=dict.fromkeys(("linux-both", "linux-namespaces", "linux-landlock", "bwrap", "podman-user"), _SUM),
    ),
    _bomb(
        "takes-memory-by-system-v-segments",
        "libc.shmat.restype = ctypes.c_void_p\n"
        "made = []\n"
        "for _ in range(4):\n"
        "    shm = call('shmget', 0, 48 << 20, 0o1600)\n    made.append(shm)\n"
        "    where = libc.shmat(shm, None, 0)\n"
        "    ctypes.memset(where, 1, 48 << 20)\n"
        "    libc.shmdt(ctypes.c_void_p(where))\n"
        "time.sleep(1)\nsay()\nfor shm in made: call('shmctl', shm, 0, None)",
    ),
    _bomb(
        "takes-memory-by-files-in-shm",
        "chunk = bytes(4 << 20)\nmade = []\n"
        "try:\n"
        "    for n in range(48):\n"
        "        path = f'/dev/shm/{at.mark}-{n}'\n        open(path, 'wb').write(chunk); made.append(path)\n"
        "    time.sleep(1); say()\n"
        "finally:\n"
        "    for path in made: os.unlink(path)",
    ),
    _bomb(
        "takes-memory-by-files-in-tmp",
        "chunk = bytes(4 << 20)\nmade = []\n"
        "try:\n"
        "    for n in range(48):\n"
        "        path = f'/tmp/{at.mark}-{n}'\n        open(path, 'wb').write(chunk); made.append(path)\n"
        "    time.sleep(1); say()\n"
        "finally:\n"
        "    for path in made: os.unlink(path)",
    ),
    _bomb(
        "takes-memory-by-pipes",
        "filled, full = os.pipe()\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0:\n"
        "        for _ in range(26):\n"
        "            read, write = os.pipe()\n            fcntl.fcntl(write, 1031, 1 << 20)\n"
        "            os.set_blocking(write, False); os.write(write, bytes(1 << 20))\n"
        "        os.write(full, b'x'); time.sleep(4); os._exit(0)\n"
        "os.close(full)\n"
        "for _ in range(8):\n"
        "    if not os.read(filled, 1): raise OSError('no pipes')",
        needs="root",
    ),
    _bomb("takes-descriptors", "held = [os.open('/dev/null', os.O_RDONLY) for _ in range(200)]"),
    Escape(
        name="keeps-descriptors-in-flight",
        subject="bombs",
        # beyond the server's own limit, the kernel refuses the server's messages with descriptors, too
        program=(
            "most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))\n"
            "given = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0] * 253))]\n"
            "held, sent = [], 0\n"
            "while sent <= at.descriptors:\n"
            "    near, far = socket.socketpair()\n"
            "    near.setblocking(False); held += [near, far]\n"
            "    try:\n"
            "        while sent <= at.descriptors: near.sendmsg([b'x'], given); sent += 253\n"
            "    except BlockingIOError: pass\n"
            "say()"
        ),
        judge=says,
        alone=True,
        limits=Limits(open_files=1 << 20),
    ),
    _bomb("takes-processor-time", "until = time.process_time() + 1.5\nwhile time.process_time() < until: pass"),
    _bomb(
        "writes-a-large-file", "open('large', 'wb').write(bytes(8 << 20))\nassert os.stat('large').st_size == 8 << 20"
    ),
    _bomb("stretches-a-file", "os.truncate(os.open('sparse', os.O_CREAT | os.O_WRONLY), 1 << 40)"),
    _bomb("reserves-a-file", "os.posix_fallocate(os.open('reserved', os.O_CREAT | os.O_WRONLY), 0, 8 << 20)"),
    _bomb(
        "fills-the-disk",
        "for n in range(10): open(f'part-{n}', 'wb').write(bytes(4 << 20))",
        known=_SUMMED,
    ),
    _bomb(
        "fills-the-disk-with-files-without-a-name",
        "held = [os.open('.', os.O_TMPFILE | os.O_RDWR) for _ in range(10)]\n"
        "for fd in held: os.write(fd, bytes(4 << 20))",
        known=_SUMMED,
    ),
    _daemon("leaves-a-child", f"subprocess.Popen({_MARKED})"),
    _daemon(
        "leaves-a-daemon",
        f"if os.fork() == 0:\n"
        f"    os.setsid()\n"
        f"    if os.fork() == 0: os.execvp('sh', {_MARKED})\n"
        f"    os._exit(0)\n"
        f"os.wait()",
    ),
    _daemon(
        "leaves-a-daemon-that-ignores-signals",
        "for n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)\n"
        f"if os.fork() == 0:\n    os.setsid()\n    os.execvp('sh', {_MARKED})",
    ),
    _daemon("leaves-a-stopped-process", f"child = subprocess.Popen({_MARKED})\nos.kill(child.pid, signal.SIGSTOP)"),
    _daemon(
        "leaves-a-daemon-by-nohup", "nohup setsid sh -c 'sleep 30; :' \"$MARK\" >/dev/null 2>&1 &", language="shell"
    ),
    _daemon(
        "leaves-a-daemon-without-its-environment",
        "env -i setsid sh -c 'sleep 30; :' \"$MARK\" </dev/null >/dev/null 2>&1 &",
        language="shell",
    ),
    _daemon(
        "leaves-a-process-when-killed",
        f"if os.fork() == 0:\n    os.setsid()\n    os.execvp('sh', {_MARKED})\nos.kill(os.getpid(), signal.SIGKILL)",
    ),
    _daemon(
        "leaves-a-process-and-stops-its-first",
        "try:\n"
        "    os.kill(1, signal.SIGSTOP) if at.walled else None\n"
        "    os.kill(1, signal.SIGKILL) if at.walled else None\n"
        "except OSError: pass\n"
        f"subprocess.Popen({_MARKED}, start_new_session=True)",
    ),
    _daemon(
        "keeps-forking-while-it-ends",
        "if os.fork() == 0:\n    os.setsid()\n"
        "    until = time.monotonic() + 20\n"
        "    while time.monotonic() < until:\n"
        "        if os.fork(): os._exit(0)\n"
        "        os.setsid()\n"
        "        time.sleep(0.3)",
    ),
)
