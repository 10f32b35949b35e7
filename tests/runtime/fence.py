"""A fence around programs that multiply. It holds though nobody kills them.

It is read as text into programs that find no package of ours, so it needs the standard library only.
"""

import os
import resource
import sys

PROCESSES = 250
"""How many processes a program may be at once, with the dead that nobody has waited for."""

LIFE_S = 25.0
"""When a program that multiplies ends by itself, in seconds after its start."""


def own_user() -> int:
    """The user that a program of root changes to: nobody else's, as far as numbers of users go in a container."""
    return 50_000 + os.getpid() % 10_000


def processes_of(user: int, living_only: bool = False) -> int:
    """How many threads a user has, zombies too, as the kernel counts them for the limit; or only the living."""
    count = 0
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/status") as file:
                status = dict(line.split(":", 1) for line in file if ":" in line)
        except OSError:
            continue
        if int(status["Uid"].split()[0]) == user and not (living_only and status["State"].strip().startswith("Z")):
            count += int(status.get("Threads", 1))
    return count


def put_up_fence(processes: int = PROCESSES) -> None:
    """Let this program never be more than so many processes. The kernel sees to it, for good.

    The limit does not hold for root, who becomes a user of its own. It exits where it cannot.
    """
    try:
        if os.geteuid() == 0:
            user = own_user()
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        else:
            processes += processes_of(os.geteuid())
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    except OSError as error:
        sys.exit(f"no bomb without a fence: {error}")
