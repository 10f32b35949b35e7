"""State shared by the handlers of all routes, such as the host, the API keys and the open event streams.

API handlers call `ServerContext.session` or `ServerContext.session_named` to get the session that a request refers to.
Both methods return only sessions of the caller's principal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from holdfast import errors
from holdfast.host import Host, Session
from holdfast.host.budgets import Rate
from holdfast.server.auth import LOCAL, KeyRing
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
"""Key in the ASGI scope of a request for its `CredentialUse`."""
DELIVERY = "holdfast.delivery"
"""Key in the ASGI scope of a request outside ``/v1`` for its `ResponseDelivery`."""


class ServerContext:
    """State shared by the handlers of all routes. Use it from one event loop only.

    Parameters:
        host: the started host.
        keys: the host's API keys.
        openapi: the OpenAPI document, encoded as JSON.
    """

    __slots__ = (
        "_public_agents",
        "_rate",
        "executes",
        "host",
        "keys",
        "openapi",
        "programs",
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
        self.stops = Stops(host.budgets.stops, host.store.cluster)
        self.waits = SettlementWaits()
        self.responses: defaultdict[int, int] = defaultdict(int)
        """Number of responses by HTTP status."""
        self.programs = any(agent.programs for agent in host.agents.values())
        """Whether an approval requires an approval key, so that no program of an agent can approve a call.

        Behind a wall, a program reaches no credential of the host, but one may lie in a workspace."""
        self.executes = any(agent.executes for agent in host.agents.values())
        """Whether a model may execute commands on this machine, so that the local token approves nothing."""
        self._rate = Rate("requests", host.settings.principal_rate_per_s)
        self._public_agents = frozenset(host.settings.public_agents or (host.default_agent,))

    def close_waits(self) -> None:
        """End all requests that wait for a message to settle, because the server is shutting down.

        These requests respond without the result. Event streams that end from now on report the shutdown as the reason.
        """
        self.streams.closing()
        self.waits.close()

    def authenticate(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Caller:
        """Return the caller of a request, and register the request under the caller's credential.

        Raises as `KeyRing.caller`. Also raises `RateLimited` if the principal exceeds its request rate, and
        `BudgetExceeded` if it exceeds its share of connections.
        """
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
        """Return the caller's session whose key is in the request's path."""
        return self.session_named(request, request.path["key"])

    def session_named(self, request: Request, key: str) -> Session:
        """Return the caller's session `key`. The session accepts only agents that the caller may use."""
        return self.host.session(key, principal=request.caller.principal, agents=request.agents)

    def needs_approval_key(self, caller: Caller) -> bool:
        """Return whether an approval of the caller requires an approval key, typed by a person.

        The local token lies in a file where tools run. It approves nothing there, even if tools cannot reach it.
        """
        return self.programs or (self.executes and caller.credential == LOCAL.credential)

    def check_approval_key(self, caller: Caller, secret: str, principal: str) -> str:
        """Check that an approval key may approve tool calls of `principal`, and return the key's id.

        Raises:
            ApprovalKeyRequired: if the key is missing or wrong. A wrong key is reported to the operator.
            RateLimited: if the caller has tried too many wrong keys.
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
        """Return the names of the agents that a caller may use; None if the caller may use all agents."""
        if caller.agents is not None:
            return caller.agents
        if caller.role == "admin" or "*" in self.settings.public_agents:
            return None
        return self._public_agents
