"""Logging. Each failure is logged once with its traceback, secrets are redacted, and no text can forge a log record.

Every text about a failure is passed through `redact` before it leaves this process: log records, the ``error`` of a run
and command lines in receipts. `log_failure` redacts a record before it is handled, because an application that embeds a
host formats records with its own handlers.
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

from holdfast.errors import Interrupted, RunError, format_error

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "BackgroundHandler",
    "RedactingFormatter",
    "configure_logging",
    "flush_logs",
    "install_hooks",
    "is_logged",
    "log_failure",
    "one_line",
    "redact",
    "visible",
]

REDACTED = "***"
CONTINUED = "  | "
"""Prefix of every line of a record after the first, so that no text in a record can look like another record."""

_SHORTEST = 8
_ERROR_CHARACTERS = 500
_READ_CHARACTERS = 4_000
_TRACEBACK_CHARACTERS = 16_000  # redaction costs the event loop about a microsecond per character
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
    r"|hf[at]?_[0-9A-Za-z]{8,}"  # Holdfast's own, and Hugging Face's
    r"|(?<![\w-])eyJ[\w-]{6,4000}\.[\w-]{6,4000}(?:\.[\w-]{0,4000})?"  # signed tokens (JWT)
    r"|\bsk-[\w-]{16,400}|\b[srp]k_(?:live|test)_\w{8,400}"
    r"|\b(?:AKIA|ASIA|AROA|AIDA)[0-9A-Z]{12,40}"
    r"|\bgh[pousr]_\w{16,400}|\bgithub_pat_\w{16,400}|\bglpat-[\w-]{16,400}"
    r"|\bxox[a-z]-[\w-]{10,400}|\bAIza[\w-]{30,100}|\bya29\.[\w-]{10,4000}|\bSG\.[\w-]{10,100}\.[\w-]{10,100}"
    r"|\b(?:npm|gsk|xai|r8|pplx|dop_v1)[_-]\w{20,400}|\bpypi-[\w-]{20,400}"
)
_AFTER = re.compile(
    # The value of a header, scheme, URL user, name or flag; the first group is kept.
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
# Control characters except tab and newline, bidirectional and invisible marks, blank letters, and surrogates.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\uffa0"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e01ef]"
)


def redact(text: str) -> str:
    """Return `text` with secrets replaced by ``***``.

    These secrets are redacted:

    - Holdfast's own keys, API keys in the formats of common providers, signed tokens and private keys
    - values of authorization and cookie headers
    - passwords in URLs
    - values after names such as ``password`` or ``api_key`` in assignments, JSON and command-line flags
    - values of this process's environment variables whose names end in ``KEY``, ``TOKEN``, ``SECRET``, ``PASSWORD`` or
      similar

    Redaction is best effort: a secret is not redacted if neither its format nor its name is recognized. Callable from
    any thread.
    """
    for name, value in list(os.environ.items()):
        if len(value) >= _SHORTEST and _SECRET_VARIABLE.search(name):
            text = text.replace(value, REDACTED)
    return _AFTER.sub(_keep_name, _WHOLE.sub(REDACTED, text))


def _keep_name(found: re.Match[str]) -> str:
    return f"{found[found.lastindex or 0]}{REDACTED}"


def visible(text: str) -> str:
    """Return `text` with control, bidirectional and invisible characters escaped, except tab and newline."""
    return text if text.isascii() and text.isprintable() else _HIDDEN.sub(_spelled, text)


def _spelled(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def one_line(error: BaseException) -> str:
    """Return an error as clients see it: its class and redacted text, on one line of bounded length."""
    text = " ".join(visible(redact(format_error(error)[:_READ_CHARACTERS])).split())
    return text if len(text) <= _ERROR_CHARACTERS else f"{text[: _ERROR_CHARACTERS - 1]}…"


def is_logged(error: BaseException) -> bool:
    """Return whether `error` was already passed to `log_failure`."""
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
    """Log an error, with its traceback unless its class has ``logs_traceback = False``. Callable from any thread.

    A second call with the same error does nothing.

    The record is safe for any handler: secrets in its text and traceback are redacted, control characters are escaped,
    and ``exc_info`` is not set, because a handler would format it without redaction. The record has the attributes
    ``principal``, ``session`` and ``run_id``. An interrupt is not logged, because it is not a failure. A `RunError` is
    not logged if its cause has already been logged.

    Parameters:
        logger: logger of the component that caught the error.
        what: description of the operation that failed.
        error: error to log; it is then marked as logged.
        principal: principal whose work failed; None if unknown.
        session: key of the session in which the error occurred; None if unknown.
        run_id: id of the run in which the error occurred; None if unknown.
    """
    if isinstance(error, Interrupted) or is_logged(error):
        return
    passes_on = isinstance(error, RunError) and error.__cause__ is not None and is_logged(error.__cause__)
    # An error may reject attributes, or its class may.
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
    if getattr(type(error), "logs_traceback", True):
        record.exc_text = _continued(visible(redact(_traceback_of(error))))
    logger.handle(record)


def _traceback_of(error: BaseException) -> str:
    """Return the traceback of an error and its causes, up to the first cause that was already logged.

    A long traceback is shortened in the middle.
    """
    try:
        trace = traceback.TracebackException.from_exception(error)
        _cut_logged_causes(trace, error)
        text = "".join(trace.format()).rstrip()
    except Exception as trouble:  # the error's text, notes or causes are unavailable
        text = f"{format_error(error)} (traceback unavailable: {type(trouble).__name__})"
    if len(text) <= _TRACEBACK_CHARACTERS:
        return text
    half = _TRACEBACK_CHARACTERS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters omitted …]\n{text[-half:]}"


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
    """Yield the causes and contexts of an error, newest first.

    Yields the traceback of the error that has the cause, the cause, and whether it is ``__cause__`` or ``__context__``.
    """
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
    """Return `text` with every line prefixed as a continuation line."""
    return "\n".join(CONTINUED + line for line in text.split("\n"))


class RedactingFormatter(logging.Formatter):
    """Formatter that writes the UTC time, severity, logger name and redacted text of a record.

    Tracebacks are redacted too, and no text in a record can forge another record.
    """

    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)sZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted record. Every line after the first is prefixed as a continuation line."""
        first, _, rest = visible(redact(super().format(record))).rstrip("\n").partition("\n")
        if not rest:
            return first
        lines = (line if line.startswith(CONTINUED) else CONTINUED + line for line in rest.split("\n"))
        return "\n".join((first, *lines))


class BackgroundHandler(logging.Handler):
    """Handler that writes records in a separate thread, so that a blocked stream never blocks the code that logs.

    At most 1,000 records are queued. Further records are dropped, and the number of dropped records is logged.

    Parameters:
        stream: output stream, such as ``sys.stderr``.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str] = queue.Queue(_QUEUED)
        self._left_out = 0
        self._thread = threading.Thread(target=self._write_all, name="holdfast-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the formatted record without blocking. Callable from any thread."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._left_out += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all queued records have been written, or until 2 s have passed."""
        with self._lines.all_tasks_done:
            deadline = time.monotonic() + _FLUSH_S  # noqa: TID251  # the layers below the clock
            while self._lines.unfinished_tasks and (left_s := deadline - time.monotonic()) > 0:  # noqa: TID251
                self._lines.all_tasks_done.wait(left_s)

    def _write_all(self) -> None:
        while True:
            text = self._lines.get()
            left_out, self._left_out = self._left_out, 0
            if left_out:
                text += f"\n{left_out:,} records were dropped: they arrived faster than they could be written"
            try:
                self._stream.write(text + "\n")
                self._stream.flush()
            except (OSError, ValueError):  # the stream has no reader any more
                pass
            self._lines.task_done()


def configure_logging(level: Literal["debug", "info", "warning", "error"]) -> None:
    """Log records of at least severity `level` to stderr.

    For other packages, such as the HTTP server, the lowest severity is ``warning``, even if `level` is lower.
    """
    handler = BackgroundHandler(sys.stderr)
    handler.setFormatter(RedactingFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    logging.getLogger("holdfast").setLevel(level.upper())


def flush_logs() -> None:
    """Wait until all records are written, so that text on stderr comes after them, but for at most 2 s."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def install_hooks() -> None:
    """Log warnings and uncaught errors, including errors in threads and destructors.

    Otherwise Python would write them directly to stderr. Call this once, and only in Holdfast's own processes. Dumps by
    `faulthandler` bypass the log; they contain file names, function names and line numbers, but no values.
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
            log_failure(logger, "the process failed", error)

    threading.excepthook = on_thread_error
    sys.unraisablehook = on_unraisable
    sys.excepthook = on_uncaught
    logging.captureWarnings(True)
