"""Options that several commands share."""

from __future__ import annotations

import math
from typing import Annotated

import typer

__all__ = ["Files", "Grace", "Json", "Key", "Reason", "Session", "Store", "Url", "User", "Wait", "seconds"]


def seconds(text: str | float) -> float:
    """Parse a number of seconds. Raises `typer.BadParameter` if the number is invalid, such as -1 or nan."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise typer.BadParameter(f"{text!r} is not a number of seconds; use 0 or more")
    return value


def _complete_session(ctx: typer.Context, incomplete: str) -> list[str]:
    from holdfast.cli.session_names import session_names

    options = {name: ctx.params.get(name) for name in ("url", "key", "user")}
    return [name for name in session_names(**options) if name.startswith(incomplete)]


Url = Annotated[str | None, typer.Option("--url", envvar="HOLDFAST_URL", help="Server address.")]
Key = Annotated[str | None, typer.Option("--key", envvar="HOLDFAST_KEY", help="API key.", show_envvar=True)]
User = Annotated[str | None, typer.Option("--user", help="Act as this principal (trusted and admin keys).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one value per line.")]
Session = Annotated[
    str,
    typer.Option("--session", "-s", envvar="HOLDFAST_SESSION", help="Session key.", autocompletion=_complete_session),
]
Reason = Annotated[str, typer.Option("--reason", "-r", help="Reason to record with the run.")]
Grace = Annotated[float | None, typer.Option("--grace", parser=seconds, help="Grace period for cleanup, in seconds.")]
Wait = Annotated[
    float | None,
    typer.Option("--wait", "-w", parser=seconds, help="Wait for the answer, up to this many seconds."),
]
Files = Annotated[list[str] | None, typer.Option("--attach", "-f", metavar="FILE", help="Attach a file (repeatable).")]
Store = Annotated[str | None, typer.Option("--store", help="Store URL: sqlite:///file, postgresql://… or memory://.")]
