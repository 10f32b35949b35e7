"""The command line. Commands import what they need when they run, which keeps ``holdfast --help`` fast."""

from holdfast.cli.app import app, main

__all__ = ["app", "main"]
