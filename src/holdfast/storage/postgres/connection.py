"""Connections to a PostgreSQL database, with the adapters of the store.

Text columns of PostgreSQL cannot hold NUL, so the store writes another character for it (see `_escape`).
"""

from __future__ import annotations

from typing import Any, Final

import psycopg
from psycopg.pq import Format
from psycopg.types.numeric import Int8BinaryDumper, Int8Dumper
from psycopg.types.string import StrBinaryDumper, StrDumper, TextLoader

from holdfast.errors import ConfigurationError
from holdfast.storage.postgres.address import PostgresAddress

__all__ = ["CONNECT_TIMEOUT_S", "connect"]

CONNECT_TIMEOUT_S: Final = 5
_PREPARE_AFTER: Final = 3
"""Number of executions after which a statement is prepared."""
_PREPARED_LIMIT: Final = 400
_MARK: Final = "\ue000"
"""A private character that no text needs. It stands for NUL, and is doubled where it occurs itself."""
_NUL: Final = _MARK + "0"
_ITSELF: Final = _MARK + "1"


def _escape(text: str) -> str:
    return text.replace(_MARK, _ITSELF).replace("\0", _NUL)


def _unescape(text: str) -> str:
    return text.replace(_NUL, "\0").replace(_ITSELF, _MARK)


class _TextDumper(StrDumper):
    def dump(self, obj: str) -> Any:
        return super().dump(_escape(obj) if "\0" in obj or _MARK in obj else obj)


class _TextBinaryDumper(StrBinaryDumper):
    def dump(self, obj: str) -> Any:
        return super().dump(_escape(obj) if "\0" in obj or _MARK in obj else obj)


class _TextLoader(TextLoader):
    def load(self, data: Any) -> Any:
        text = super().load(data)
        return _unescape(text) if isinstance(text, str) and _MARK in text else text


class _TextBinaryLoader(_TextLoader):
    format = Format.BINARY


def connect(address: PostgresAddress) -> psycopg.Connection[Any]:
    """Open a connection that commits each statement, unless a transaction was begun.

    Raises:
        psycopg.OperationalError: if the database does not accept the connection.
        ConfigurationError: if libpq does not accept the URL.
    """
    connection = _try_to_connect(address)
    if connection is None:  # not raised where libpq's error, which may show a part of the password, is the context
        raise ConfigurationError(
            f"libpq does not accept the URL of {address.shown}",
            hint="percent-encode special characters, and check the part after the ?",
        )
    connection.prepared_max = _PREPARED_LIMIT
    adapters = connection.adapters
    # One type for each kind of value: with psycopg's own choice, a statement would be prepared again for each mix.
    for dumper in (Int8Dumper, Int8BinaryDumper):
        adapters.register_dumper(int, dumper)
    for text_dumper in (_TextDumper, _TextBinaryDumper):
        adapters.register_dumper(str, text_dumper)
    for loader in (_TextLoader, _TextBinaryLoader):
        adapters.register_loader("text", loader)
    return connection


def _try_to_connect(address: PostgresAddress) -> psycopg.Connection[Any] | None:
    """Return a new connection; None if libpq does not accept the URL."""
    try:
        return psycopg.connect(
            address.conninfo,
            autocommit=True,
            connect_timeout=CONNECT_TIMEOUT_S,
            fallback_application_name="holdfast",
            prepare_threshold=_PREPARE_AFTER if address.prepared_statements else None,
            # A cut network is noticed within about 10 s.
            keepalives_idle=5,
            keepalives_interval=2,
            keepalives_count=3,
            tcp_user_timeout=10_000,
        )
    except psycopg.ProgrammingError:
        return None
