"""Scopes: their members, how members enter and leave, and how a scope stops."""
