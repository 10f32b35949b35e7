"""Routes of the server, a module per resource."""

from __future__ import annotations

from holdfast.server.router import Route
from holdfast.server.routes import (
    attachments,
    events,
    histories,
    host,
    keys,
    messages,
    pages,
    questions,
    runs,
    schedules,
    sessions,
    stops,
)

__all__ = ["API_ROUTES", "PAGE_ROUTES", "ROUTES"]

PAGE_ROUTES: list[Route] = pages.ROUTER.routes
"""Routes outside ``/v1``."""
API_ROUTES: list[Route] = [
    route
    for module in (messages, events, stops, sessions, runs, host, keys, questions, histories, attachments, schedules)
    for route in module.ROUTER.routes
]
"""Routes below ``/v1``."""
ROUTES: list[Route] = [*PAGE_ROUTES, *API_ROUTES]
"""Every route of the server, as the OpenAPI document lists them."""
