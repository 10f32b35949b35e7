"""The URL of a PostgreSQL database, which may contain a password."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from holdfast.errors import ConfigurationError
from holdfast.store_url import POSTGRES_URL, shown_store

__all__ = ["PostgresAddress"]

_SWITCHES: Final = ("prepared_statements", "signals")
"""Parameters of the URL that are ours, not libpq's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresAddress:
    """Where a PostgreSQL database is, and how to talk to it.

    Parameters:
        conninfo: URL for libpq, with the password; it is not part of the ``repr``.
        shown: URL for display: user, hosts and database, and nothing else.
        prepared_statements: whether statements may be prepared; not behind a pgbouncer in transaction mode that does
            not keep prepared statements.
        signals: whether nodes notify each other; not behind a pgbouncer in transaction mode, which breaks LISTEN.
    """

    conninfo: str = field(repr=False)
    shown: str
    prepared_statements: bool = True
    signals: bool = True

    @classmethod
    def parse(cls, url: str) -> PostgresAddress:
        """Parse a store URL. Parameters of the URL but ``prepared_statements`` and ``signals`` are libpq's.

        Raises:
            ConfigurationError: if the URL is invalid. The error does not show it, because it may contain a password.
        """
        found = POSTGRES_URL.fullmatch(url)
        if found is None:
            raise ConfigurationError(
                "invalid PostgreSQL URL",
                hint="use postgresql://user:password@host:5432/database; percent-encode : @ / ? # in a password",
            )
        switches = dict.fromkeys(_SWITCHES, True)
        kept = []
        for parameter in filter(None, (found["query"] or "").split("&")):
            name, _, value = parameter.partition("=")
            if name not in switches:
                kept.append(parameter)
            elif value not in ("on", "off"):
                raise ConfigurationError(f"invalid value of {name} in the store URL", hint="use on or off")
            else:
                switches[name] = value == "on"
        base = url.partition("?")[0]
        return cls(
            conninfo=f"{base}?{'&'.join(kept)}" if kept else base,
            shown=shown_store(url),
            **switches,
        )
