"""Interface of a database that runs the named statements of `holdfast.storage.sql.statements`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Final, Protocol

__all__ = ["LARGE_BYTES", "Database"]

LARGE_BYTES: Final = 65_536
"""Maximum bytes of rows to bind to one statement, because a cached statement may keep them until its next use."""


class Database(Protocol):
    """A connection inside a transaction (or, for reads, outside of one)."""

    def query(self, name: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Return the rows of a named statement."""
        ...

    def rows(self, name: str, *parameters: object) -> Generator[tuple[Any, ...]]:
        """Yield the rows of a named statement; close the generator if you do not read it to the end."""
        ...

    def write(self, name: str, *parameters: object) -> int:
        """Execute a named statement; return the number of rows it wrote."""
        ...

    def write_large(self, name: str, *parameters: object, value: bytes | bytearray) -> None:
        """Execute a named statement that inserts a row whose last column is `value`, which may be large."""
        ...

    def read_large(self, name: str, *parameters: object, start: int, size: int) -> bytes | None:
        """Return at most `size` bytes, from `start` on, of the value that a statement selects; None without a row."""
        ...

    def write_rows(self, name: str, rows: Sequence[tuple[object, ...]], *, large: bool) -> int:
        """Execute a named statement for many rows; return the number of rows it wrote.

        Parameters:
            large: whether the rows may exceed `LARGE_BYTES` in total. Measuring them takes as long as binding them, and
                most are known to be small.
        """
        ...
