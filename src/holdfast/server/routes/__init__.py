"""Routes of the server, with one module for each resource."""

from __future__ import annotations

from holdfast.server.router import Route
from holdfast.server.routes import (
    attachments,
    events,
    grants,
    histories,
    host,
    keys,
    messages,
    pages,
    probes,
    questions,
    runs,
    schedules,
    sessions,
    stops,
)

__all__ = ["API_ROUTES", "PAGE_ROUTES", "ROUTES"]

PAGE_ROUTES: list[Route] = [*pages.ROUTER.routes, *probes.ROUTER.routes]
"""Routes outside ``/v1``."""
API_ROUTES: list[Route] = [
    route
    for module in (
        messages,
        events,
        stops,
        sessions,
        runs,
        host,
        keys,
        questions,
        grants,
        histories,
        attachments,
        schedules,
    )
    for route in module.ROUTER.routes
]
"""Routes below ``/v1``."""
ROUTES: list[Route] = [*PAGE_ROUTES, *API_ROUTES]
"""All routes of the server, in the order in which the OpenAPI document lists them."""
