"""Approval of shell commands: which are harmless, and which a person must approve."""
