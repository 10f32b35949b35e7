"""The command line. A command's module is imported when the command runs, which keeps ``holdfast --help`` fast."""

from __future__ import annotations

import io
import os
import signal
import sys

from holdfast.lazy import lazy_names

TYPE_CHECKING = False  # importing it from typing would be most of the time in which Ctrl-C shows a traceback
if TYPE_CHECKING:
    from holdfast.cli.commands import app

__all__ = ["app", "main"]

if not TYPE_CHECKING:  # or else type checkers would accept any name
    __getattr__, __dir__ = lazy_names(__name__, {"commands": ("app",)})


def main() -> None:
    """Entry point of the ``holdfast`` command."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules load: end without a traceback
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # stderr escapes what its encoding lacks anyway
    if any("postgres" in argument for argument in sys.argv):
        from holdfast.cli.argument_secrets import hide_passwords

        hide_passwords()
    from holdfast.cli.commands import app

    try:
        app(prog_name="holdfast")
    except KeyboardInterrupt:  # while the group prints an error, or ends
        from holdfast.cli.exit_codes import Exit

        sys.exit(Exit.INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # and while the interpreter shuts down


def _open_closed_streams() -> None:
    """Open the null device for each standard stream that is closed, before another file takes its descriptor."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode, encoding="utf-8"))
