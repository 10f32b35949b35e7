"""The command line. Commands load what they need when they run, so that ``holdfast --help`` is quick."""

from holdfast.cli.app import app, main

__all__ = ["app", "main"]
