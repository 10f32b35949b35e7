"""Ask the person at the terminal for a yes."""

from __future__ import annotations

import signal

__all__ = ["confirmed"]


def confirmed(question: str) -> bool:
    """Print a question and return whether the answer is yes; the end of the input means no.

    While the answer is typed, Ctrl-C ends the process: the handler of the event loop would only cancel the task that
    waits in here, and a handler in Python may miss a signal that arrives just before the read.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
    finally:
        signal.signal(signal.SIGINT, handler)
