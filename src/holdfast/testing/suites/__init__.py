"""Conformance suites for what plugs into Holdfast: stores, models, agents and channels."""
