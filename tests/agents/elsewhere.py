"""Tools that run in processes of their own: they are imported there."""

from __future__ import annotations

import os
import time
from typing import Any

from holdfast import tool


@tool(isolation="process")
def pid_of(call: Any, text: str) -> dict[str, object]:
    """Says something and who it is."""
    call.output(f"said {text}")
    return {"pid": os.getpid(), "call_id": call.call_id}


@tool(isolation="process", timeout_s=0.5)
def stuck() -> None:
    """Ignores every interrupt."""
    while True:
        try:
            time.sleep(100)
        except BaseException:
            continue


@tool(isolation="process", exclusive=True)
def leaves(code: int) -> None:
    """Ends its process."""
    os._exit(code)
