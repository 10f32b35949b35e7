"""Promises that make sense for any agent runtime, tested through an adapter of a few functions."""
