"""Options that several commands share."""

from __future__ import annotations

import math
from typing import Annotated

import typer

__all__ = ["Grace", "Json", "Key", "Reason", "Session", "Store", "Url", "User", "Wait", "seconds"]


def seconds(text: str | float) -> float:
    """Parse a number of seconds. Raises `typer.BadParameter` if the number is invalid, such as -1 or nan."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise typer.BadParameter(f"{text!r} is not a number of seconds")
    return value


Url = Annotated[str | None, typer.Option("--url", envvar="HOLDFAST_URL", help="Server address.")]
Key = Annotated[str | None, typer.Option("--key", envvar="HOLDFAST_KEY", help="API key.", show_envvar=True)]
User = Annotated[str | None, typer.Option("--user", help="Act as this principal (trusted and admin keys).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one value per line.")]
Session = Annotated[str, typer.Option("--session", "-s", envvar="HOLDFAST_SESSION", help="Session key.")]
Reason = Annotated[str, typer.Option("--reason", "-r", help="Reason to record with the run.")]
Grace = Annotated[float | None, typer.Option("--grace", parser=seconds, help="Grace period for cleanup, in seconds.")]
Wait = Annotated[
    float | None,
    typer.Option("--wait", "-w", parser=seconds, help="Wait for the answer, up to this many seconds."),
]
Store = Annotated[str | None, typer.Option("--store", help="Store URL: sqlite:///file or memory://.")]
