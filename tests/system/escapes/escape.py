"""One escape: a program that a wall must hold, and a judge that decides from outside whether it got through.

Without a wall the same program succeeds: an escape that fails there, too, proves nothing. Where the machine is the
reason (no such device, no such right), the escape says so in `needs` or `may_fail` and counts as not applicable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tests.system.escapes.stage import Stage
    from tests.system.escapes.walls import Wall

__all__ = ["Escape", "Judge", "Limits", "Scene", "harms", "reaches", "reads", "says", "types", "writes"]

Judge = Callable[["Scene"], bool]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits that a walled program gets; small, so that a bomb hurts nobody, even where nothing holds it.

    Parameters:
        memory_bytes: memory of all its processes.
        processes: its processes and threads.
        open_files: descriptors of each process.
        file_bytes: size of a file.
        disk_bytes: what its workspace may hold.
        scratch_bytes: size of its ``/tmp``, and of its ``/dev/shm``.
        cpu_s: CPU time of each process.
        connections: open connections of its network.
        network_bytes: what its network sends and receives.
        timeout_s: then it is stopped.
    """

    memory_bytes: int = 1 << 30
    processes: int = 64
    open_files: int = 256
    file_bytes: int = 64 << 20
    disk_bytes: int = 256 << 20
    scratch_bytes: int = 64 << 20
    cpu_s: int = 60
    connections: int = 256
    network_bytes: int = 64 << 20
    timeout_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Escape:
    """A program and its judge.

    Parameters:
        name: says what it tries, as in ``reads-the-store``; also what it sends and says where it got through.
        subject: the class that it belongs to.
        program: its text.
        language: of the program.
        judge: whether it got through.
        needs: ``root`` if an ordinary user cannot do that, walled or not.
        may_fail: why it may fail without a wall on some machines; empty means that it must succeed there.
        alone: it gets a start of its own, as it stops or starves what runs beside it.
        target: a process of the host that it tries to harm is started for it.
        proxied: it needs the network's proxy, and is left out behind a wall without a network.
        limits: for those that run alone.
        known: the walls that do not hold it, by their names with or without the user, and why that is so; a network
            makes no difference.
    """

    name: str
    subject: str
    program: str
    judge: Judge
    language: Literal["python", "shell"] = "python"
    needs: Literal["", "root", "user"] = ""
    may_fail: str = ""
    alone: bool = False
    target: bool = False
    proxied: bool = False
    limits: Limits = field(default_factory=Limits)
    known: Mapping[str, str] = field(default_factory=dict)

    def is_for(self, wall: Wall) -> bool:
        """Whether it is tried behind a wall: its user can do that, and there is a proxy if it needs one."""
        return self.needs in ("", wall.user) and (wall.has_proxy or not self.proxied)

    def reason(self, wall: Wall) -> str:
        """Why a wall does not hold it; empty if it must. An open network makes nothing that is known worse."""
        names = (str(wall), wall.name, f"{wall.base}-{wall.user}", wall.base)
        return next((self.known[name] for name in names if name in self.known), "")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is there when an escape has ended.

    Parameters:
        stage: everything outside of the wall.
        name: of the escape.
        output: what it wrote.
        returncode: how it ended; None for one that ran beside others.
    """

    stage: Stage
    name: str
    output: str
    returncode: int | None


def reads(scene: Scene) -> bool:
    """A secret of the host, or of another principal, is in the output."""
    return scene.stage.secret in scene.output


def writes(scene: Scene) -> bool:
    """Something of the server, or of another principal, is not as it was."""
    return scene.stage.is_changed(scene.name)


def reaches(scene: Scene) -> bool:
    """A socket of the host, or of another principal, saw the escape's name."""
    return f"{scene.name};" in scene.stage.heard()


def harms(scene: Scene) -> bool:
    """The process that was started for it is dead, stopped, or runs otherwise than before."""
    return scene.stage.is_harmed(scene.name)


def types(scene: Scene) -> bool:
    """The escape's name stands on a terminal of the host."""
    return f"{scene.name};" in scene.stage.typed()


def says(scene: Scene) -> bool:
    """The kernel did what was asked. For acts that leave no trace outside, as the escape undoes them."""
    return f"through {scene.name};" in scene.output
