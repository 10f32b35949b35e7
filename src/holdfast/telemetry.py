"""Logging: one line for each record on stderr, with every secret taken out."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from typing import Literal

__all__ = ["RedactingFormatter", "configure_logging", "redact"]

_SECRET = re.compile(r"hft?_[0-9a-z]{8,}|(?i:(?<=bearer )|(?<=basic ))[A-Za-z0-9+/=_.\-]{8,}")


_SECRET_NAME = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD)$")
_SHORTEST = 8


def redact(text: str) -> str:
    """`text` with secrets replaced by ``***``.

    Those are our keys, the values of Authorization headers, and what this process's environment has under names that
    end in ``KEY``, ``TOKEN``, ``SECRET`` or ``PASSWORD``, such as the keys of model providers.
    """
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and _SECRET_NAME.search(name):
            text = text.replace(value, "***")
    return _SECRET.sub("***", text)


class RedactingFormatter(logging.Formatter):
    """Time in UTC, severity, logger and text; secrets are taken out of tracebacks too."""

    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)sZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """The line, or lines, of a record."""
        return redact(super().format(record))


def configure_logging(level: Literal["debug", "info", "warning", "error"]) -> None:
    """Log what is at least as severe as `level` to stderr; the HTTP server's own chatter only from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RedactingFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("holdfast").setLevel(level.upper())
