"""Colours and weights of terminal output, and whether a stream is to have them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

__all__ = ["TerminalStyle", "style_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalStyle:
    """Escape sequences that set a style, each empty on a stream without styles; `plain` ends them all."""

    bold: str = ""
    dim: str = ""
    red: str = ""
    green: str = ""
    yellow: str = ""
    plain: str = ""


_PLAIN = TerminalStyle()
_COLOURED = TerminalStyle(
    bold="\x1b[1m", dim="\x1b[2m", red="\x1b[31m", green="\x1b[32m", yellow="\x1b[33m", plain="\x1b[0m"
)


def style_for(stream: TextIO, environ: Mapping[str, str] = os.environ) -> TerminalStyle:
    """Return the styles for a stream.

    Only a terminal gets styles. ``CLICOLOR_FORCE`` turns them on for other streams; ``NO_COLOR``, ``CLICOLOR=0`` and
    ``TERM=dumb`` turn them off, ``NO_COLOR`` even if ``CLICOLOR_FORCE`` is set. Sources: no-color.org,
    bixense.com/clicolors.
    """
    if environ.get("NO_COLOR"):
        return _PLAIN
    if environ.get("CLICOLOR_FORCE", "0") != "0":
        return _COLOURED
    if environ.get("CLICOLOR") == "0" or environ.get("TERM") == "dumb" or not stream.isatty():
        return _PLAIN
    return _COLOURED
