"""Routes of the host: its task tree, its state and statistics, and a drain."""

from __future__ import annotations

import msgspec

from holdfast.host import DrainReport, HostStatistics, Incident
from holdfast.host.budgets import BudgetUsage
from holdfast.protocol.http import DrainBody
from holdfast.protocol.messages import TreeNode
from holdfast.server.context import ServerContext
from holdfast.server.parameters import JsonBody
from holdfast.server.request import Request
from holdfast.server.response import Response, encode
from holdfast.server.router import Router
from holdfast.server.routes.list_parameters import ALL, listed_principal

__all__ = ["ROUTER", "ServerView"]

ROUTER = Router()


class ServerView(msgspec.Struct, frozen=True, kw_only=True):
    """The server: its version, the kind of its store, and the agents that the caller may use.

    ``approval_key_required`` is true if agents run programs, so that approving a call requires an approval
    key typed by a person. ``budgets`` contains the usage of scarce resources by principal; callers without role admin
    see only their own usage. Admins also see the store's file, the host's statistics and the newest incidents.
    """

    version: str
    store: str
    agents: list[str]
    default_agent: str
    approval_key_required: bool
    statistics: HostStatistics | None
    incidents: list[Incident]
    budgets: dict[str, BudgetUsage]


@ROUTER.route("GET", "/v1/tree", query=(ALL,), responses={200: TreeNode})
async def get_tree(server: ServerContext, request: Request) -> Response:
    """Return the tree of your live tasks, threads and processes."""
    await request.take_turn()
    return Response(200, encode(server.host.tree(principal=listed_principal(request))))


@ROUTER.route("GET", "/v1/server", responses={200: ServerView})
async def get_server(server: ServerContext, request: Request) -> Response:
    """Return the server's version, kind of store, agents and budgets; to admins, also its statistics and incidents."""
    from holdfast.version import __version__

    host, agents = server.host, request.agents
    info = await host.store.info()
    admin = request.caller.role == "admin"
    view = ServerView(
        version=__version__,
        store=f"{info.engine} {info.path}" if admin else info.engine,
        agents=sorted(host.agents.keys() if agents is None else agents & host.agents.keys()),
        default_agent=host.default_agent,
        approval_key_required=server.needs_approval_key(request.caller),
        statistics=host.statistics() if admin else None,
        incidents=list(host.incidents.newest) if admin else [],
        budgets=await _budgets(server, None if admin else request.caller.principal),
    )
    return Response(200, encode(view))


async def _budgets(server: ServerContext, principal: str | None) -> dict[str, BudgetUsage]:
    """Return the usage of each budget, including stored bytes, by `principal`, or by all principals if it is None."""
    store, limit = server.host.store, server.host.stored_limit
    if principal is None:
        stored: dict[str, float] = dict(await store.most_stored(limit=20))
    else:
        stored = {principal: await store.stored_bytes(principal)}
    usage = BudgetUsage(used=sum(stored.values()), limit=limit, share=limit, refused=0, principals=stored)
    return server.host.budget_usage(principal) | {"stored": usage}


@ROUTER.route(
    "POST", "/v1/drain", access="admin", body=JsonBody(DrainBody, optional=True), responses={200: DrainReport}
)
async def drain(server: ServerContext, request: Request, body: DrainBody) -> Response:
    """Refuse new work, let runs finish by the deadline, and report what remains. Requests that only read still work."""
    return Response(200, encode(await server.host.drain(deadline_s=body.deadline_s)))
