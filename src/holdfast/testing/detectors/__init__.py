"""Detectors for tests: leaks, growing memory, blocking calls and network access."""
