"""The HTTP server: the native API, event streams, keys, the page, and a graceful shutdown."""

from holdfast.server.app import App
from holdfast.server.auth import KeyRing
from holdfast.server.connections import raise_descriptor_limit
from holdfast.server.run import Running, bind, holder_of, serve, serve_until

__all__ = ["App", "KeyRing", "Running", "bind", "holder_of", "raise_descriptor_limit", "serve", "serve_until"]
