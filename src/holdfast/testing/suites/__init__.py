"""Conformance suites for Holdfast's ports: stores, models, agents and channels."""
