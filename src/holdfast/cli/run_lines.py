"""Log one line for each run that ends: whose run it was, how it ended and how long it took.

The lines go to the logger ``holdfast.runs``, whose records have the attributes ``principal``, ``session``, ``run_id``,
``agent``, ``status`` and ``elapsed_s``. On a terminal they are shorter than other records.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TextIO

from holdfast.cli.output import clock_time
from holdfast.cli.style import style_for
from holdfast.host.run_reports import session_label
from holdfast.logs import RedactingFormatter, redact, visible

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from holdfast.host import DrainReport, RunReport

__all__ = ["LINES_PER_S", "RunLines", "TerminalFormatter", "run_text"]

LINES_PER_S = 20
"""Maximum number of runs that are logged with a line of their own in a second; further runs are counted."""
_TICK_S = 0.25
_TICKS_PER_S = 4
_TEXT_CHARACTERS = 160

_log = logging.getLogger("holdfast.runs")


class RunLines:
    """Logs the runs of a host. Records are written in groups, so that a run costs the event loop almost nothing.

    Parameters:
        loop: the host's loop.
        note: called with a line for the operator when the host was drained by a request.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, note: Callable[[str], None]) -> None:
        self._loop = loop
        self._note = note
        self._timer: asyncio.TimerHandle | None = None
        self._tick = 0
        self._taken = 0
        self._waiting: list[RunReport] = []
        self._further = 0
        self._further_failed = 0
        self.is_serving = False
        """Whether the server is ready and was not asked to shut down, so that a drain is the request of a client."""

    def on_run(self, report: RunReport) -> None:
        """Log the run within 0.25 s, or count it if this second already has its lines."""
        if self._timer is None:
            self._timer = self._loop.call_later(_TICK_S, self._on_tick)
        if self._taken < LINES_PER_S:
            self._taken += 1
            self._waiting.append(report)
        else:
            self._further += 1
            self._further_failed += report.status == "failed"

    def on_drained(self, report: DrainReport) -> None:
        """Tell the operator about a drain that a client requested."""
        if self.is_serving:
            self._note("Drained by request: no new work is accepted. Stop the server with Ctrl-C.")

    def close(self) -> None:
        """Log the runs that were not logged yet."""
        if self._timer is not None:
            self._timer.cancel()
        self._end_second()

    def _on_tick(self) -> None:
        self._tick += 1
        if self._tick == _TICKS_PER_S:
            self._end_second()
        else:
            self._write()
            self._timer = self._loop.call_later(_TICK_S, self._on_tick)

    def _end_second(self) -> None:
        self._write()
        if self._further:
            failed = f" ({self._further_failed:,} failed)" if self._further_failed else ""
            _log.info("… and %s more in the last second%s", f"{self._further:,}", failed)
        self._timer = None
        self._tick = self._taken = self._further = self._further_failed = 0

    def _write(self) -> None:
        reports, self._waiting = self._waiting, []
        for report in reports:
            attributes = {
                "principal": report.principal,
                "session": report.session,
                "run_id": report.run_id,
                "agent": report.agent,
                "status": report.status,
                "elapsed_s": report.elapsed_s,
            }
            _log.info("%s", run_text(report), extra=attributes)


def run_text(report: RunReport) -> str:
    """Return a line about an ended run, such as ``main  demo  completed in 1.2 s``. It has no text of a message."""
    took = f" in {report.elapsed_s:.1f} s" if report.elapsed_s else ""
    why = ""
    if report.status == "failed" and report.error:
        why = f": {_shortened(report.error)}" + (f" ({report.raised_at})" if report.raised_at else "")
    elif report.status == "interrupted" and report.cause is not None:
        why = f": {report.cause.kind}" + (f", {_shortened(report.cause.reason)}" if report.cause.reason else "")
        if report.abandoned:
            why += f"; could not end {_shortened(', '.join(report.abandoned))}"
    status = "FAILED" if report.status == "failed" else report.status
    return f"{session_label(report.principal, report.session)}  {report.agent}  {status}{took}{why}"


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _TEXT_CHARACTERS else f"{text[: _TEXT_CHARACTERS - 1]}…"


class TerminalFormatter(RedactingFormatter):
    """Formatter for a terminal: a run is one short line with the local time of day, in red if the run failed.

    Parameters:
        stream: the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._colours = style_for(stream)

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted record."""
        if record.name != _log.name:
            return super().format(record)
        line = " ".join(visible(redact(f"{clock_time(record.created)}  {record.getMessage()}")).split("\n"))
        red = self._colours.red if getattr(record, "status", "") == "failed" else ""
        return f"{red}{line}{self._colours.plain if red else ''}"
