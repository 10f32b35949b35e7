"""Which commands a person should see before they are run: those that destroy, reach out, or change the machine.

It looks at the text of the command. That is a seat belt against a model's slip, and no wall: who wants to get around it
can. Where that matters, ask for every call.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["is_dangerous", "is_dangerous_call"]

_PROGRAMS = (
    # other rights, the machine, its disks and its services
    "sudo|doas|su|pkexec|mkfs|mkfs\\.\\w+|dd|shred|wipefs|fdisk|parted|mount|umount|shutdown|reboot|halt|poweroff|"
    "systemctl|service|crontab|at|iptables|nft|useradd|usermod|passwd|visudo|"
    # other processes, and what outlives the command
    "kill|killall|pkill|nohup|setsid|disown|"
    # other machines
    "ssh|scp|sftp|rsync|nc|ncat|telnet|ftp|"
    # owners and contents of files
    "chown|chattr|truncate"
)
_READABLE = 4_000
"""Characters; nobody can tell what a longer command does, and the patterns would take their time."""
_STARTS = (
    r"(?:^|[;&|(`{!\n]|\b(?:then|do|else|eval)\s['\"]?"
    r"|\b(?:xargs|env|exec|time|timeout|nice|command|busybox) (?:(?:-\S+|\d\S*) ){0,8}"
    r"|\b(?:ba|z|da|k)?sh (?:-\S+ ){0,8}?-\w*c\s['\"]?)"
    r"\s?(?:\w+=[^\s;&|]* ){0,8}\\?(?:[\w.~+/-]*/)?"
)
"""Where a program is named: at the start of a command, also of one that a shell or a program before it is given."""
_SHELL = re.compile(r"\b(?:ba|z|da|k)?sh\b")
_BLANKS = re.compile(r"\s+")
_DANGERS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"{_STARTS}(?:{_PROGRAMS})(?:[\s'\"]|$)",
        rf"{_STARTS}rm\s(?:.*\s)?-(?:-recursive|-force|-no-preserve-root|[a-zA-Z]*[rRf])",
        rf"{_STARTS}chmod\s(?:.*\s)?-(?:-recursive|[a-zA-Z]*R)",
        rf"{_STARTS}find\b.*\s-(?:delete|exec|execdir|ok)\b",
        rf"{_STARTS}git\b.*\s(?:push|clean|filter-branch|--hard|--force|-f)\b",
        rf"{_STARTS}(?:apt|apt-get|dnf|yum|pacman|brew|snap)\s+(?:.*\s)?(?:install|remove|purge|upgrade|-[SR]\w*)\b",
        rf"{_STARTS}(?:pip3?|uv|npm|pnpm|yarn|cargo|gem|go)\s+(?:.*\s)?(?:install|uninstall|publish|add|remove|i)\b",
        rf"{_STARTS}(?:docker|podman|kubectl|terraform|aws|gcloud|az)\s",
        rf"{_STARTS}(?:curl|wget)\b.*\s(?:-X|-d|-F|-T|--data\S*|--form|--request|--upload-file|--post-\S+)(?:\s|=|$)",
        r"\|\s*(?:\S*/)?(?:ba|z|da|k)?sh\b",
        r"\|\s*(?:\S*/)?(?:python[\d.]*|perl|ruby|node)\b",
        r">\s*(?:~|/(?!dev/(?:null|stdout|stderr)\b|tmp/))",
        r":\s*\(\s*\)\s*\{",
    )
)


def is_dangerous(command: str | list[str]) -> bool:
    """Whether a person should see the command first.

    Parameters:
        command: a shell command line, or a program and its arguments.
    """
    text = command if isinstance(command, str) else " ".join(command)
    if len(text) > _READABLE:
        return True
    text = _BLANKS.sub(lambda found: "\n" if "\n" in found[0] else " ", text)  # runs of them would take their time
    return any(danger.search(text) for danger in _DANGERS)


def is_dangerous_call(arguments: dict[str, Any]) -> bool:
    """`is_dangerous` of a call's ``command``, and of the ``stdin`` of a shell: an `Approval`."""
    command = arguments.get("command", "")
    text = command if isinstance(command, str) else " ".join(map(str, command))
    stdin = arguments.get("stdin")
    return is_dangerous(text) or (isinstance(stdin, str) and bool(_SHELL.search(text)) and is_dangerous(stdin))
