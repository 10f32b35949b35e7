"""The HTTP server: the API, event streams, keys, the page, and a graceful shutdown."""

from holdfast.server.asgi import App
from holdfast.server.auth import KeyRing
from holdfast.server.connections import raise_descriptor_limit
from holdfast.server.lifecycle import Running, bind, holder_of, serve, serve_until, url_of
from holdfast.server.worker_link import WorkerLink

__all__ = [
    "App",
    "KeyRing",
    "Running",
    "WorkerLink",
    "bind",
    "holder_of",
    "raise_descriptor_limit",
    "serve",
    "serve_until",
    "url_of",
]
