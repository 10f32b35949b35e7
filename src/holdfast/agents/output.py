"""Validation and backpressure for the text that a run or a call emits."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from holdfast.protocol.messages import check_text

if TYPE_CHECKING:
    from holdfast.agents.ports import Recorder

__all__ = ["Emission", "NotText", "require_text"]


class NotText(TypeError):
    """The result of an agent is not text. The message names the agent's file and line, which no traceback contains."""

    logs_traceback = False


class Emission:
    """The result of `Run.emit`. The text is already accepted; ``await`` the result to wait while the log is behind."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __await__(self) -> Generator[Any, None, None]:
        if self._recorder.behind:
            yield from self._recorder.room().__await__()


def require_text(text: object, source: str) -> None:
    """Raise `TypeError` unless `text` is a str, and `InvalidRequest` if UTF-8 cannot encode it."""
    if not isinstance(text, str):
        raise TypeError(f"{source} takes text (str), not {type(text).__name__}")
    if not text.isascii():
        check_text(text)
