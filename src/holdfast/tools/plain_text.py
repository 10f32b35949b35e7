"""Conversion of the bytes of programs and files to text without terminal escapes and control characters."""

from __future__ import annotations

import re

__all__ = ["plain", "readable", "unfinished"]

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][A-Za-z0-9]|[@-Z\\^_=>78])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_UNPRINTABLE = "\ufffd"


def plain(text: str) -> str:
    """Remove terminal escapes; replace control characters that are not white space with U+FFFD."""
    return _CONTROLS.sub(_UNPRINTABLE, _ESCAPES.sub("", text).replace("\r\n", "\n"))


def readable(data: bytes) -> str:
    """Decode bytes as UTF-8 and return them as plain text.

    Invalid bytes are replaced with U+FFFD. A line that was overwritten with carriage returns keeps its last state.
    Binary data is replaced with one line that states its size.
    """
    text = plain(data.decode("utf-8", "replace"))
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    if b"\0" in data and text.count(_UNPRINTABLE) * 10 > len(text):
        return f"[{len(data):,} bytes of binary data]\n"
    return text


def unfinished(data: bytes) -> int:
    """Return the number of bytes at the end of `data` that belong to an incomplete UTF-8 character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            needs = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < needs else 0
    return 0
