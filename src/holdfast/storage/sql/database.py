"""Interface of a database that runs the named statements of `holdfast.storage.sql.statements`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Final, Protocol

__all__ = ["LARGE_BYTES", "Database", "SessionChanged"]

LARGE_BYTES: Final = 65_536
"""Size in bytes above which rows need special handling, because a cached statement may keep its bound values."""


class SessionChanged(Exception):
    """A stored row has changed since it was read, so the whole transaction must be rolled back."""


class Database(Protocol):
    """A database connection. Writes run inside a transaction; reads need no transaction."""

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
        """Return at most `size` bytes of the value that a named statement selects, beginning at offset `start`.

        None is returned if the statement selects no row.
        """
        ...

    def write_rows(
        self, name: str, rows: Sequence[tuple[object, ...]], *, large: bool = False, exact: bool = False
    ) -> None:
        """Execute a named statement for many rows, at the latest when the transaction commits.

        Parameters:
            large: whether the rows may exceed `LARGE_BYTES` in total. The caller decides, because measuring rows takes
                as long as binding them, and most rows are known to be small.
            exact: whether the transaction fails with `SessionChanged` unless the statement writes exactly one row of
                the table for each of `rows`.
        """
        ...
