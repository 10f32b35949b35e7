"""State shared by the handlers of all routes: the host, the keys, open streams, waits and stops.

The API's handlers get the session that a request names from `ServerContext.session` or `ServerContext.session_named`,
which return sessions of the caller's principal only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from holdfast import errors
from holdfast.host import Host, Session
from holdfast.host.budgets import Rate
from holdfast.server.auth import KeyRing
from holdfast.server.caller import Caller
from holdfast.server.connections import CONNECTION
from holdfast.server.credentials import CredentialUse
from holdfast.server.delivery import ResponseDelivery, Scope
from holdfast.server.request import Request
from holdfast.server.settlement_waits import SettlementWaits
from holdfast.server.stop_tickets import Stops
from holdfast.server.streams import Streams
from holdfast.settings import Settings

__all__ = ["CREDENTIAL_USE", "DELIVERY", "ServerContext"]

CREDENTIAL_USE = "holdfast.use"
"""Key of the ASGI scope under which a request's entry in the register of credentials in use is stored."""
DELIVERY = "holdfast.delivery"
"""Key of the ASGI scope under which the delivery of a page is stored."""


class ServerContext:
    """State shared by the handlers. Use it from one event loop only.

    Parameters:
        host: the started host.
        keys: the API keys.
        openapi: the OpenAPI document, encoded.
    """

    __slots__ = (
        "_public_agents",
        "_rate",
        "approval_key_required",
        "host",
        "keys",
        "openapi",
        "responses",
        "settings",
        "stops",
        "streams",
        "waits",
    )

    def __init__(self, host: Host, keys: KeyRing, *, openapi: bytes) -> None:
        self.host = host
        self.keys = keys
        self.openapi = openapi
        self.settings: Settings = host.settings
        self.streams = Streams(host.budgets)
        self.stops = Stops(host.budgets.stops)
        self.waits = SettlementWaits()
        self.responses: Counter[int] = Counter()
        """Number of responses by status."""
        self.approval_key_required = any(agent.unwalled for agent in host.agents.values())
        """Whether an approval requires an approval key, since programs of an agent could use any other credential."""
        self._rate = Rate("requests", host.settings.principal_rate_per_s)
        self._public_agents = frozenset(host.settings.public_agents or (host.default_agent,))

    def close_waits(self) -> None:
        """End all waits for settlements with the messages' current state, because the server is shutting down."""
        self.streams.closing()
        self.waits.close()

    def authenticate(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Caller:
        """Identify the caller, and register the request under its credential. Raises as `KeyRing.caller`."""
        caller = self.keys.caller(headers)
        connection = scope.get(CONNECTION)
        if connection is not None:
            connection.own(caller.principal)
        delivery: ResponseDelivery | None = scope.get(DELIVERY)
        if delivery is not None:
            delivery.principal = caller.principal
        use: CredentialUse = self.keys.in_use.hold(caller.credential, caller.expires_at)
        scope[CREDENTIAL_USE] = use
        self._rate.take(caller.principal)
        return caller

    def session(self, request: Request) -> Session:
        """Return the caller's session that the path names."""
        return self.session_named(request, request.path["key"])

    def session_named(self, request: Request, key: str) -> Session:
        """Return a session of the caller, limited to the agents that the caller may name."""
        return self.host.session(key, principal=request.caller.principal, agents=request.agents)

    def check_approval_key(self, caller: Caller, secret: str, principal: str) -> str:
        """Check an approval key for the calls of `principal`, and return its id.

        Raises:
            ApprovalKeyRequired: the key is missing or wrong; a wrong key is reported to the operator.
            RateLimited: the caller has tried too many wrong keys.
        """
        who = caller.owner or caller.principal
        self.host.budgets.wrong_keys.check(who)
        try:
            return self.keys.approver(secret, principal)
        except errors.ApprovalKeyRequired:
            if secret:
                self.host.budgets.wrong_keys.take(who)
                self.host.budgets.tell(who, f"{who}: tried a wrong approval key", kind="approval key")
            raise

    def agents_of(self, caller: Caller) -> frozenset[str] | None:
        """Return the agents that a caller may name; None: all of them."""
        if caller.agents is not None:
            return caller.agents
        if caller.role == "admin" or "*" in self.settings.public_agents:
            return None
        return self._public_agents
