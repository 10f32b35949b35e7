"""Results and errors of tools in the form that a model sees, with a bounded size."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.errors import ToolFailed, format_error
from holdfast.logs import redact
from holdfast.protocol.events import encode_json, plain

__all__ = ["summarize_error", "to_model_text", "truncate"]

_ERROR_BYTES = 10_000


def to_model_text(result: Any, *, limit_bytes: int) -> Any:
    """Return the result in the form that the log stores and the model sees, truncated to `limit_bytes` of text or JSON.

    Raises:
        ToolFailed: if the result is binary data, or an object that JSON cannot represent.
    """
    if result is None or isinstance(result, (bool, int, float)):
        return result
    if isinstance(result, str):
        return truncate(result, limit_bytes)
    if isinstance(result, (bytes, bytearray, memoryview)):
        raise ToolFailed(
            f"the tool returned {len(result):,} bytes of binary data, which cannot be shown",
            hint="make the tool write the data to a file and return the file's name",
        )
    try:
        encoded = encode_json(result)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ToolFailed(
            f"the tool returned {type(result).__name__}, which cannot be shown: {error}",
            hint="make the tool return text, numbers, lists or dicts",
        ) from None
    if len(encoded) <= limit_bytes:
        return msgspec.json.decode(encoded)
    return truncate(encoded.decode(), limit_bytes)


def truncate(text: str, limit_bytes: int) -> str:
    """Return the text; if it exceeds `limit_bytes`, return its beginning and its end with a note in between."""
    if len(text) <= limit_bytes:
        text = plain(text)
        encoded = text.encode()
        if len(encoded) <= limit_bytes:
            return text
    half = limit_bytes // 2
    # Slices first: a text of 100 MB is not encoded as a whole.
    head = plain(text[:half]).encode()[:half].decode(errors="ignore")
    tail = plain(text[-half:]).encode()[-half:].decode(errors="ignore")
    left_out = len(text) - len(head) - len(tail)
    return f"{head}\n[… {left_out:,} characters left out: the result is longer than {limit_bytes:,} bytes …]\n{tail}"


def summarize_error(error: BaseException) -> str:
    """Return an error's class and text for the log and for models, truncated and redacted."""
    return redact(truncate(format_error(error), _ERROR_BYTES))
