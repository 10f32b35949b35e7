"""Approvals at the terminal of ``holdfast serve``: show pending calls and read the typed answers.

An answer identifies a call by the short hash that was shown with the call, so that the answer applies to the call that
the person has read. No credential is required, because an agent's program can reach the terminal only in the ways that
`docs/explanation/limits.md` describes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

from holdfast.cli.approvals import whole
from holdfast.cli.output import visible
from holdfast.errors import HoldfastError
from holdfast.host import Answerer

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.host import Host
    from holdfast.storage.port import DueQuestion

__all__ = ["ApprovalTerminal", "has_terminal"]

_LOOK_EVERY_S = 1.0
_SHORT = 8


def has_terminal() -> bool:
    """Return whether stdin and stdout are terminals, and this process is in the foreground of its terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty() and _in_foreground()


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


class ApprovalTerminal:
    """Terminal that shows calls waiting for approval and reads ``approve HASH`` and ``deny HASH REASON``.

    Use the object only on the host's loop.

    Parameters:
        host: host whose calls are shown; must be started.
        say: called with each line to write to the terminal.
    """

    def __init__(self, host: Host, say: Callable[[str], None]) -> None:
        self._host = host
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._shown: dict[tuple[str, ...], DueQuestion] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._typed = b""

    def start(self) -> None:
        """Start polling for calls and reading answers."""
        self._loop.add_reader(0, self._read)
        self._look_later(0.0)

    def close(self) -> None:
        """Stop polling and reading."""
        self._loop.remove_reader(0)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ── open calls ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _look_later(self, delay_s: float) -> None:
        self._timer = self._loop.call_later(delay_s, self._begin_look)

    def _begin_look(self) -> None:
        self._timer = None
        if not self._host.draining:
            self._host.start_task(self._look(), "approvals at the terminal")

    async def _look(self) -> None:
        """Show new calls, and forget calls that no longer wait for approval."""
        try:
            waiting: dict[tuple[str, ...], DueQuestion] = {}
            for asked in await self._host.open_questions():
                question = asked.question
                if question.kind == "approval":
                    waiting[asked.principal, asked.key, question.question_id, question.call_hash] = asked
            for name in self._shown.keys() - waiting.keys():
                del self._shown[name]
            for name, asked in waiting.items():
                if name not in self._shown:
                    self._shown[name] = asked
                    self._show(asked)
        except HoldfastError:
            pass  # the store is busy or closed; the next poll tries again
        finally:
            if not self._host.draining:
                self._look_later(_LOOK_EVERY_S)

    def _show(self, asked: DueQuestion) -> None:
        self._say(f"session {visible(asked.key)} of {visible(asked.principal)} asks: {whole(asked.question)}")
        short = asked.question.call_hash[:_SHORT]
        self._say(f"  type: approve {short}   or: deny {short} REASON")

    # ── typed answers ────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self) -> None:
        if not _in_foreground():
            self._loop.remove_reader(0)  # a read would stop the process
            return
        try:
            chunk = os.read(0, 4096)
        except OSError:
            chunk = b""
        if not chunk:
            self._loop.remove_reader(0)
        *lines, self._typed = (self._typed + chunk).split(b"\n")
        for line in lines:
            self.take(line.decode("utf-8", "replace").strip())

    def take(self, line: str) -> None:
        """Process a line that was typed at the terminal."""
        word, _, rest = line.partition(" ")
        short, _, reason = rest.strip().partition(" ")
        if not line:
            return
        if word not in ("approve", "deny") or len(short) < _SHORT:
            self._say("  type approve or deny, followed by the short hash of a call shown here")
            return
        short = short.lower()
        found = [asked for asked in self._shown.values() if asked.question.call_hash.startswith(short)]
        if len(found) != 1:
            self._say(f"  {len(found) or 'no'} open calls match {visible(short)}; type a hash shown here")
            return
        self._host.start_task(self._decide(found[0], word, reason.strip()), "answer at the terminal")

    async def _decide(self, asked: DueQuestion, word: str, reason: str) -> None:
        question = asked.question
        session = self._host.session(asked.key, principal=asked.principal)
        try:
            given = await session.decide(
                question.question_id,
                "approved" if word == "approve" else "denied",
                reason,
                call_hash=question.call_hash if word == "approve" else "",
                answerer=Answerer("local", "terminal"),
            )
        except HoldfastError as error:
            self._say(f"  {error.message}")
        else:
            self._say(f"  {given.decision}: {question.call_hash[:_SHORT]}")
