"""Integrations with other frameworks. Each needs its own extra; importing this package needs none."""
