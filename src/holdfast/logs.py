"""Logging: what failed is told once, with its traceback; secrets are taken out, and nothing forges a line.

Everything that leaves this process as text about a failure goes through `redact`: log records, the ``error`` of a run,
command lines in receipts. `log_failure` makes its record safe by itself, as an application that embeds a host formats
records with handlers of its own.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, TextIO

from holdfast.errors import Interrupted, RunError, told

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "BackgroundHandler",
    "RedactingFormatter",
    "configure_logging",
    "install_hooks",
    "is_logged",
    "log_failure",
    "one_line",
    "redact",
    "visible",
]

REDACTED = "***"
CONTINUED = "  | "
"""Begins every line of a record but its first, so that no text can pass as a record of its own."""

_SHORTEST = 8
_ERROR_CHARACTERS = 500
_READ_CHARACTERS = 4_000
_TRACEBACK_CHARACTERS = 16_000  # what is redacted takes the loop a microsecond for each
_CAUSES = 20
_QUEUED = 1000
_FLUSH_S = 2.0
_MARK = "_holdfast_logged"

_SECRET_VARIABLE = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)$")
_VALUE = r"""(?:"(?:[^"\\\n]|\\.){0,4000}"|'(?:[^'\\\n]|\\.){0,4000}'|[^\s"'`,;&)}\]<>]{1,4000})"""
_STRONG = (
    r"(?:password|passwd|passphrase|passcode|pwd|secret|api[_-]?key|access[_-]?key|account[_-]?key|private[_-]?key"
    r"|approval[_-]?key|client[_-]?secret)"
)
_WEAK = r"(?:token|credentials?|signature|sig|auth|pass)"

_WHOLE = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?s:.*?)(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)"
    r"|hf[at]?_[0-9A-Za-z]{8,}"  # ours, and those of a hub of models
    r"|(?<![\w-])eyJ[\w-]{6,4000}\.[\w-]{6,4000}(?:\.[\w-]{0,4000})?"  # signed tokens (JWT)
    r"|\bsk-[\w-]{16,400}|\b[srp]k_(?:live|test)_\w{8,400}"
    r"|\b(?:AKIA|ASIA|AROA|AIDA)[0-9A-Z]{12,40}"
    r"|\bgh[pousr]_\w{16,400}|\bgithub_pat_\w{16,400}|\bglpat-[\w-]{16,400}"
    r"|\bxox[a-z]-[\w-]{10,400}|\bAIza[\w-]{30,100}|\bya29\.[\w-]{10,4000}|\bSG\.[\w-]{10,100}\.[\w-]{10,100}"
    r"|\b(?:npm|gsk|xai|r8|pplx|dop_v1)[_-]\w{20,400}|\bpypi-[\w-]{20,400}"
)
_AFTER = re.compile(
    # The value of a header, a scheme, a URL's user, a name, a flag: the first group stays.
    r"((?i:\b(?:set-)?cookie:[ \t]{0,3}))[^\r\n]{1,8000}"
    r"|((?i:\bauthorization[\"']?[ \t]{0,3}[:=][ \t]{0,3}[\"']?))[^\r\n\"']{1,8000}"
    r"|((?i:\b(?:bearer|basic) ))[A-Za-z0-9+/=_.~\-]{8,8000}"
    r"|(://[^\s/:@\"'<>?#]{0,256}:)[^\s\"'<>/?#]{1,512}(?=@)"
    r"|(://)[^\s/:@\"'<>?#]{16,512}(?=@)"
    rf"|((?i:{_STRONG}(?:[_-]\w{{1,30}})?[\"']?[ \t]{{0,3}}(?:=>|:=|=|:)[ \t]{{0,3}})){_VALUE}"
    rf"|((?i:(?<![a-z]){_WEAK}(?:[\"']?[ \t]{{0,3}}=|[\"'][ \t]{{0,3}}:)[ \t]{{0,3}}|[?&]key=)){_VALUE}"
    rf"|((?i:(?<![\w-])--?[\w-]{{0,40}}(?:{_STRONG}|token|credentials?)(?:[\"'],)?[ \t]{{1,3}})){_VALUE}"
    r"|((?:(?<!\S)-u|--user)[ =]{0,3}[\"']?[^\s:\"']{1,100}:)[^\s\"']{1,400}"
    r"|(\bsshpass +-p *)\S{1,400}"
)
# Control characters but tab and newline, marks that turn or hide text, letters without a form, and surrogates.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\uffa0"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e01ef]"
)


def redact(text: str) -> str:
    """Return `text` with secrets replaced by ``***``.

    Those are Holdfast's own keys; API keys in the forms that providers give them; signed tokens; private keys; values
    of authorization and cookie headers; passwords in URLs; values after names such as ``password`` or ``api_key``, in
    assignments, JSON and flags; and what this process's environment has under names that end in ``KEY``, ``TOKEN``,
    ``SECRET`` or ``PASSWORD``. From any thread. It is a net, not a wall: a secret without a known form or name stays.
    """
    for name, value in list(os.environ.items()):
        if len(value) >= _SHORTEST and _SECRET_VARIABLE.search(name):
            text = text.replace(value, REDACTED)
    return _AFTER.sub(_keep_name, _WHOLE.sub(REDACTED, text))


def _keep_name(found: re.Match[str]) -> str:
    return f"{found[found.lastindex or 0]}{REDACTED}"


def visible(text: str) -> str:
    """Return `text` with control, bidirectional and invisible characters spelled out; tab and newline stay."""
    return text if text.isascii() and text.isprintable() else _HIDDEN.sub(_spelled, text)


def _spelled(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def one_line(error: BaseException) -> str:
    """Return an error's class and text on one line of bounded length, redacted: what clients see of it."""
    text = " ".join(visible(redact(told(error)[:_READ_CHARACTERS])).split())
    return text if len(text) <= _ERROR_CHARACTERS else f"{text[: _ERROR_CHARACTERS - 1]}…"


def is_logged(error: BaseException) -> bool:
    """Whether `log_failure` was given this error before."""
    try:
        return bool(BaseException.__getattribute__(error, _MARK))
    except Exception:
        return False


def log_failure(
    logger: logging.Logger,
    what: str,
    error: BaseException,
    *,
    principal: str | None = None,
    session: str | None = None,
    run_id: str | None = None,
) -> None:
    """Log an error once, with its traceback; a second call with the same error does nothing. From any thread.

    The record is safe for any handler: its text and traceback are redacted, control characters are visible, and it has
    no ``exc_info``, whose objects would not be. It has the attributes ``principal``, ``session`` and ``run_id``.
    Interrupts are no failures and are not logged, nor is an error of `delegate` whose cause was.

    Parameters:
        logger: the one of the part that met the error.
        what: what failed, for people.
        error: which is marked as logged.
        principal, session, run_id: whose, where known.
    """
    if isinstance(error, Interrupted) or is_logged(error):
        return
    passes_on = isinstance(error, RunError) and error.__cause__ is not None and is_logged(error.__cause__)
    # An error may refuse attributes, or have a class that does.
    try:
        BaseException.__setattr__(error, _MARK, True)
    except Exception:
        pass
    if passes_on or not logger.isEnabledFor(logging.ERROR):
        return
    whose = ", ".join(
        f"{name} {value!r}"
        for name, value in (("principal", principal), ("session", session), ("run", run_id))
        if value is not None
    )
    what = " ".join(visible(redact(what)).split())
    text = f"{what}: {one_line(error)}" + (f" ({visible(whose)})" if whose else "")
    record = logger.makeRecord(
        logger.name,
        logging.ERROR,
        __file__,
        0,
        text,
        (),
        None,
        "log_failure",
        {"principal": principal, "session": session, "run_id": run_id},
    )
    record.exc_text = _continued(visible(redact(_traceback_of(error))))
    logger.handle(record)


def _traceback_of(error: BaseException) -> str:
    """The traceback of an error and its causes, of bounded length; of causes that were logged before only the name."""
    try:
        trace = traceback.TracebackException.from_exception(error)
        _cut_logged_causes(trace, error)
        text = "".join(trace.format()).rstrip()
    except Exception as trouble:  # of an error whose text, notes or causes cannot be had
        text = f"{told(error)} (its traceback cannot be formatted: {type(trouble).__name__})"
    if len(text) <= _TRACEBACK_CHARACTERS:
        return text
    half = _TRACEBACK_CHARACTERS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"


def _cut_logged_causes(trace: traceback.TracebackException, error: BaseException) -> None:
    for depth, (shown, cause, is_cause) in enumerate(_causes(trace, error)):
        if is_logged(cause) or depth >= _CAUSES:
            if is_cause:
                shown.__cause__ = None
            shown.__context__ = None
            return


def _causes(
    trace: traceback.TracebackException, error: BaseException
) -> Iterator[tuple[traceback.TracebackException, BaseException, bool]]:
    """Each error of the chain with what shows it, the newest first."""
    while True:
        if error.__cause__ is not None and trace.__cause__ is not None:
            yield trace, error.__cause__, True
            if trace.__cause__ is None:
                return
            trace, error = trace.__cause__, error.__cause__
        elif error.__context__ is not None and trace.__context__ is not None:
            yield trace, error.__context__, False
            if trace.__context__ is None:
                return
            trace, error = trace.__context__, error.__context__
        else:
            return


def _continued(text: str) -> str:
    """Text below the first line of a record."""
    return "\n".join(CONTINUED + line for line in text.split("\n"))


class RedactingFormatter(logging.Formatter):
    """Time in UTC, severity, logger and text; secrets are taken out of tracebacks too, and nothing forges a line."""

    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)sZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, or lines, of a record; all but the first are marked as its own."""
        first, _, rest = visible(redact(super().format(record))).rstrip("\n").partition("\n")
        if not rest:
            return first
        lines = (line if line.startswith(CONTINUED) else CONTINUED + line for line in rest.split("\n"))
        return "\n".join((first, *lines))


class BackgroundHandler(logging.Handler):
    """Writes records to a stream from a thread, so that a stream nobody reads stops nobody who logs.

    At most a thousand records wait; what comes beyond that is left out and counted.

    Parameters:
        stream: such as ``sys.stderr``.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str] = queue.Queue(_QUEUED)
        self._left_out = 0
        self._thread = threading.Thread(target=self._write_all, name="holdfast-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the text of a record. From any thread; never waits."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._left_out += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all is written, at most 2 s."""
        with self._lines.all_tasks_done:
            deadline = time.monotonic() + _FLUSH_S  # noqa: TID251  # the layers below the clock
            while self._lines.unfinished_tasks and (left_s := deadline - time.monotonic()) > 0:  # noqa: TID251
                self._lines.all_tasks_done.wait(left_s)

    def _write_all(self) -> None:
        while True:
            text = self._lines.get()
            left_out, self._left_out = self._left_out, 0
            if left_out:
                text += f"\n{left_out:,} records were left out: they came faster than they could be written"
            try:
                self._stream.write(text + "\n")
                self._stream.flush()
            except (OSError, ValueError):  # nobody reads any more
                pass
            self._lines.task_done()


def configure_logging(level: Literal["debug", "info", "warning", "error"]) -> None:
    """Log what is at least as severe as `level` to stderr; the HTTP server's own chatter only from warnings on."""
    handler = BackgroundHandler(sys.stderr)
    handler.setFormatter(RedactingFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    logging.getLogger("holdfast").setLevel(level.upper())


def install_hooks() -> None:
    """Send to the log what Python writes to stderr itself: errors of threads, of destructors, and warnings.

    For a process of Holdfast's own, once. Dumps of `faulthandler` do not go through it: they have files, lines and
    names of functions, no values.
    """
    logger = logging.getLogger("holdfast")

    def on_thread_error(given: threading.ExceptHookArgs) -> None:
        if given.exc_value is not None and not isinstance(given.exc_value, SystemExit):
            name = "?" if given.thread is None else given.thread.name
            log_failure(logger, f"thread {name!r} failed", given.exc_value)

    def on_unraisable(given: object) -> None:
        error = getattr(given, "exc_value", None)
        if isinstance(error, BaseException):
            log_failure(logger, str(getattr(given, "err_msg", None) or "an exception was ignored"), error)

    def on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            log_failure(logger, "the process fails", error)

    threading.excepthook = on_thread_error
    sys.unraisablehook = on_unraisable
    sys.excepthook = on_uncaught
    logging.captureWarnings(True)
