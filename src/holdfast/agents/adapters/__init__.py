"""Adapters for the models and agents of other frameworks. Each needs its extra; importing this package needs none."""
