"""What the way from an older schema needs beside the statements ``migrate_…``, in the same transaction."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.storage.sql_rows import Database

__all__ = ["move_kept"]

_KEPT = b'"kept":"'  # in a text, the second quote would be escaped


def move_kept(database: Database) -> None:
    """To version 4: what is kept lies in a table of its own. Until then its text stood in its entry."""
    for kind in ("run", "edit"):
        for session, piece in database.query(f"{kind}_pieces"):
            ((*_, body),) = database.query(f"{kind}_piece", session, piece)
            if _KEPT in body:
                lines = [_without_kept(database, session, line) for line in body.split(b"\n")]
                database.write(f"save_{kind}_piece", b"\n".join(lines), session, piece)


def _without_kept(database: Database, session: int, line: bytes) -> bytes:
    if _KEPT not in line:
        return line
    entry: dict[str, Any] = msgspec.json.decode(line)
    kept = entry["kept"]
    database.write_rows("add_kept", [(session, entry["n"], kept.encode())])
    entry["kept"] = {"by": kept.partition("\n")[0], "n": entry["n"]}
    return msgspec.json.encode(entry)
