"""Results of the checks of ``holdfast doctor``."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Check"]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one check: its state, what was found, and how to fix it."""

    name: str
    state: Literal["ok", "advice", "fault"]
    found: str
    advice: str = ""
