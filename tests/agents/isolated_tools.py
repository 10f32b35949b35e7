"""Tools for calls in processes of their own."""

from __future__ import annotations

import os

from holdfast.runtime import IsolatedCall


def speaking(call: IsolatedCall, word: str) -> str:
    """Say a word."""
    call.output(f"{word} is said\n")
    print(f"{word} is printed")
    return f"{call.call_id} in another: {os.getpid()}"
