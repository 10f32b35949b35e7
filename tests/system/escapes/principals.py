"""Escapes from one principal to another: both are walled, both run at the same time, neither finds the other."""

from __future__ import annotations

from typing import Any

from tests.system.escapes.escape import Escape, Judge, Scene, reaches, reads, says, writes

__all__ = ["ESCAPES"]

_SUBJECT = "two principals"


def _try(name: str, judge: Judge, program: str, **more: Any) -> Escape:
    return Escape(name=name, subject=_SUBJECT, program=program, judge=judge, **more)


def _harms(target: str) -> Judge:
    def judge(scene: Scene) -> bool:
        return scene.stage.is_neighbour_harmed(target)

    return judge


ESCAPES = (
    _try("reads-a-file-of-its-neighbour", reads, "show(at.neighbour_folder + '/secret')"),
    _try("reads-the-arguments-of-its-neighbour", reads, "show(f'/proc/{at.neighbour}/cmdline')"),
    _try("reads-the-folder-of-its-neighbour", reads, "show(f'/proc/{at.neighbour}/cwd/secret')"),
    _try("reads-by-the-root-of-its-neighbour", reads, "show(f'/proc/{at.neighbour}/root{at.neighbour_folder}/secret')"),
    _try(
        "reads-the-memory-of-its-neighbour",
        reads,
        "with open(f'/proc/{at.neighbour}/mem', 'rb') as file:\n"
        "    file.seek(at.neighbour_held)\n    print(file.read(at.neighbour_held_bytes).decode())",
    ),
    _try(
        "reads-its-neighbour-by-process-vm-readv",
        reads,
        "held = ctypes.create_string_buffer(at.neighbour_held_bytes)\n"
        "here = struct.pack('PN', ctypes.addressof(held), at.neighbour_held_bytes)\n"
        "there = struct.pack('PN', at.neighbour_held, at.neighbour_held_bytes)\n"
        "call('process_vm_readv', at.neighbour, here, 1, there, 1, 0)\nprint(held.raw.decode())",
    ),
    _try("reads-the-tmp-of-its-neighbour", reads, "show(at.neighbour_scratch)"),
    _try("reads-the-shared-memory-of-its-neighbour", reads, "show(at.neighbour_shared)"),
    _try(
        "reads-the-tmp-of-its-neighbour-by-its-root", reads, "show(f'/proc/{at.neighbour}/root{at.neighbour_scratch}')"
    ),
    _try(
        "reads-the-system-v-memory-of-its-neighbour",
        reads,
        "shm = call('shmget', at.neighbour_shm_key, 0, 0)\n"
        "print(ctypes.string_at(call('shmat', shm, None, 0o10000), 64).decode())",
    ),
    _try(
        "reads-the-queue-of-its-neighbour",
        reads,
        "queue = call('mq_open', at.neighbour_queue.encode(), os.O_RDONLY | os.O_NONBLOCK, 0, None)\n"
        "held = ctypes.create_string_buffer(256)\ncall('mq_timedreceive', queue, held, 256, None, None)\n"
        "print(held.value.decode())",
    ),
    _try(
        "speaks-to-the-abstract-socket-of-its-neighbour",
        reaches,
        "knock(socket.AF_UNIX, socket.SOCK_STREAM, '\\0' + at.neighbour_sockets['abstract'])",
    ),
    _try(
        "speaks-to-the-tmp-socket-of-its-neighbour",
        reaches,
        "knock(socket.AF_UNIX, socket.SOCK_STREAM, at.neighbour_sockets['scratch'])",
    ),
    _try(
        "speaks-to-the-workspace-socket-of-its-neighbour",
        reaches,
        "os.symlink(at.neighbour_folder, 'n')\nknock(socket.AF_UNIX, socket.SOCK_STREAM, 'n/neighbour.sock')",
    ),
    _try(
        "reaches-the-loopback-of-its-neighbour",
        reaches,
        "knock(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', at.neighbour_sockets['loopback']))",
    ),
    _try("sees-the-programs-of-its-neighbour", says, "str(at.neighbour) in os.listdir('/proc') and say()"),
    _try("kills-a-program-of-its-neighbour", _harms("kill"), "os.kill(at.neighbour_targets['kill'], signal.SIGKILL)"),
    _try("stops-a-program-of-its-neighbour", _harms("stop"), "os.kill(at.neighbour_targets['stop'], signal.SIGSTOP)"),
    _try(
        "traces-a-program-of-its-neighbour",
        _harms("trace"),
        "call('ptrace', 0x4206, at.neighbour_targets['trace'], 0, 0x00100000)",
    ),
    _try(
        "slows-a-program-of-its-neighbour",
        _harms("slow"),
        "os.sched_setscheduler(at.neighbour_targets['slow'], os.SCHED_BATCH, os.sched_param(0))",
    ),
    _try("writes-a-file-of-another-principal", writes, "open(at.others + '/planted', 'w').write('x')"),
    _try(
        "reads-another-principal-by-a-link-it-left",
        reads,
        "os.symlink(at.neighbour_folder + '/secret', 'theirs')\nshow('theirs')",
    ),
    _try(
        "reads-another-principal-by-a-hard-link",
        reads,
        "os.link(at.neighbour_folder + '/secret', 'hard')\nshow('hard')",
    ),
    _try(
        "leaves-a-key-for-its-neighbour",
        says,
        "key = call('add_key', b'user', at.name.encode(), b'left', 4, -3)\nsay()",
        may_fail="the kernel has no keyrings",
    ),
)
