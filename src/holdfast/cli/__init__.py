"""The command line. A command is imported when it runs, which keeps ``holdfast --help`` fast."""

from holdfast.cli.app import app, main

__all__ = ["app", "main"]
