"""The network of one walled program: opened before its start, through the proxy, as its plan allows."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Final

from holdfast.tools.sandbox.port import NetworkRequest
from holdfast.tools.sandbox.proxy.link import network_proxy

if TYPE_CHECKING:
    from holdfast.tools.sandbox.plan import WallPlan
    from holdfast.tools.sandbox.port import Launch

__all__ = ["DIRECT_VARIABLES", "PROXY_VARIABLES", "network_request", "open_network"]

PROXY_VARIABLES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
"""Environment variables that name the proxy.

All have the form ``http://``: common libraries refuse to start with ``socks5://`` if an optional package is missing.
"""

DIRECT_VARIABLES: Final = ("NO_PROXY", "no_proxy")
"""Environment variables with hosts to reach without the proxy; empty, because a wall has no other way out."""


def network_request(plan: WallPlan) -> NetworkRequest | None:
    """Return the network that a plan allows; None for a plan without a network."""
    if not plan.host_rules:
        return None
    limits = plan.sandbox
    return NetworkRequest(
        principal=plan.principal,
        hosts=plan.host_rules,
        networks=limits.allow_networks,
        connections=limits.connections,
        bytes_limit=limits.network_bytes,
    )


async def open_network(launch: Launch) -> Launch:
    """Return the launch with an open network, if it needs one; otherwise the launch itself.

    If it fails or is cancelled, it closes the descriptors of the launch.

    Raises:
        ToolFailed: if the proxy does not start.
    """
    request = launch.network_request
    if request is None:
        return launch
    try:
        access = await network_proxy().open(
            request.principal,
            request.hosts,
            networks=request.networks,
            connections=request.connections,
            bytes_limit=request.bytes_limit,
        )
    except BaseException:
        for fd in launch.pass_fds:
            os.close(fd)
        raise
    return dataclasses.replace(launch, pass_fds=(*launch.pass_fds, access.take_fd()), network=access)
