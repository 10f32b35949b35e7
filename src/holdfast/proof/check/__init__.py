"""Promises that make sense for any agent runtime, tested through a small adapter for each runtime."""
