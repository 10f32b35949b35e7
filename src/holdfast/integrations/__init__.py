"""Agents written elsewhere, hosted as they are. Each needs its extra; importing this package needs none."""
