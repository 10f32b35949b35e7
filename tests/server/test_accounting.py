"""Nothing goes around the accounting: what holds bodies, pages and queues is found by what it is, not by its name.

Looked for in the server, the host and the channels are references (calls or not, under any import name) to

- the reads of the store that give contents, and the objects that hand them on,
- what makes queues, buffers and lists without a bound,
- reads of files and sockets, and results of threads,
- the words of ASGI: whoever writes or reads a body needs them,
- attributes that begin as an empty collection.

Each function, or attribute, that has one stands in a list below with what bounds or charges it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast

SOURCE = Path(holdfast.__file__).parent
FOLDERS = ("server", "host", "channels")

CONTENTS = frozenset(
    (
        "transcript",
        "transcript_within",
        "read_events",
        "run_events",
        "attachment",
        "attachment_part",
        "mailbox",
        "questions",
        "due_questions",
        "runs",
        "settlement",
    )
)
"""Reads of the store (and of sessions, which hand them on) whose answers are as large as a principal made them.

``kept`` is one too, where it is called: most that is called so is a counter.
"""
MAKERS = frozenset(("Queue", "LifoQueue", "PriorityQueue", "SimpleQueue", "deque", "bytearray", "BytesIO", "StringIO"))
READS = frozenset(
    (
        "read_bytes",
        "read_text",
        "readlines",
        "readall",
        "recv",
        "recv_into",
        "getvalue",
        "fdopen",
        "take_body",
        "answer_now",
    )
)
THREADS = frozenset(("to_thread", "run_in_executor"))
REQUEST = frozenset(("stream", "body", "form", "json"))
"""Where Starlette's request gives its body."""
SPOKEN = frozenset(("Receive", "Send"))
"""Types of what speaks ASGI."""
ASGI = frozenset(("http.request", "http.response.start", "http.response.body", "more_body"))
BY_NAME = frozenset(("getattr", "attrgetter", "methodcaller"))
COLLECTIONS = frozenset(("dict", "set", "list", "deque", "OrderedDict", "Counter", "defaultdict", "WeakSet"))
REFERRED = CONTENTS | MAKERS | READS | THREADS


def uses(source: str, *, in_server: bool = True) -> dict[str, set[str]]:
    """The constructs that each function (or module, as "") refers to; ASGI is spoken by the server only."""
    tree = ast.parse(source)
    alias = {
        one.asname or one.name: one.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for one in node.names
    }
    found: dict[str, set[str]] = {}
    typed = {node.arg: getattr(node.annotation, "id", "") for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for place, node in _placed(tree, ""):
        for what in _constructs(node, alias, typed):
            if in_server or not what.startswith("ASGI"):
                found.setdefault(place, set()).add(what)
    return found


def _placed(node: ast.AST, place: str) -> Iterator[tuple[str, ast.AST]]:
    """Every node with the function or class that it stands in; annotations and imports are left out."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "names", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            within = place
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                within = f"{place}.{child.name}" if place else child.name
            if isinstance(child, ast.Call) and _bounded(child):
                yield from _placed(ast.Tuple(elts=[*child.args, *(k.value for k in child.keywords)]), within)
                continue
            yield within, child
            yield from _placed(child, within)


def _bounded(call: ast.Call) -> bool:
    """A queue with a bound of its own, or bytes of a fixed size."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "deque":
        return any(keyword.arg == "maxlen" for keyword in call.keywords)
    return name == "Queue" and bool(call.args or call.keywords)


def _constructs(node: ast.AST, alias: dict[str, str], typed: dict[str, str]) -> Iterator[str]:
    match node:
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in REFERRED:
            yield name
        case ast.Attribute(attr=name, value=ast.Name(id=owner)) if (
            name in REQUEST and alias.get(typed.get(owner, ""), typed.get(owner)) == "Request"
        ):
            yield f"a request's {name}"
        case ast.Attribute(attr="receive" | "_send" as name, ctx=ast.Load()):
            yield f"ASGI {name}"
        case ast.Name(id=name, ctx=ast.Load()) if typed.get(name) in SPOKEN:
            yield f"ASGI {typed[name].lower()}"
        case ast.Call(func=ast.Attribute(attr="kept")):
            yield "kept"
        case ast.Name(id="open", ctx=ast.Load()):
            yield "open"
        case ast.Name(id=name, ctx=ast.Load()) if alias.get(name, name) in MAKERS | READS | THREADS:
            yield alias.get(name, name)
        case ast.Call(func=ast.Name(id=caller), args=arguments) if alias.get(caller, caller) in BY_NAME:
            yield from (one.value for one in arguments if isinstance(one, ast.Constant) and one.value in REFERRED)
        case ast.Call(func=ast.Attribute(attr="join", value=ast.Constant(value=bytes()))):
            yield "bytes.join"
        case ast.Attribute(attr="read", ctx=ast.Load()):
            yield "read"
        case ast.Constant(value=str() as word) if word in ASGI:
            yield f"ASGI {word}"


def _real(owner: str, typed: dict[str, str], alias: dict[str, str]) -> str:
    """The type that a parameter is annotated with, by the name that its own module gives it."""
    given = typed.get(owner, "")
    return alias.get(given, given)


def collections(source: str) -> set[str]:
    """Attributes of objects that begin as an empty collection, in any method, in the class, or by a factory."""
    found = set()
    for made in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(made):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if not _empty(node.value):
                    continue
                if isinstance(target, ast.Attribute):
                    found.add(f"{made.name}.{target.attr}")
                elif isinstance(target, ast.Name) and node in made.body:
                    found.add(f"{made.name}.{target.id}")
    return found


def _empty(value: ast.expr) -> bool:
    match value:
        case ast.Dict(keys=[]) | ast.List(elts=[]):
            return True
        case ast.Call(func=function, keywords=keywords):
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            made = [keyword.value for keyword in keywords if keyword.arg == "default_factory"]
            names = {name, *(getattr(one, "id", "") for one in made)}
            return bool(names & COLLECTIONS) and not any(keyword.arg == "maxlen" for keyword in keywords)
    return False


def files() -> Iterator[tuple[str, str]]:
    """The name and the text of each file that is looked at."""
    for folder in FOLDERS:
        for file in sorted((SOURCE / folder).rglob("*.py")):
            yield str(file.relative_to(SOURCE)), file.read_text()


PASSES_ON = "hands what speaks ASGI on to Delivery or Request, and calls neither"
SMALL = "what it writes is small: Request.respond charges the others before"
CHARGES = "charges what it reads or writes"
LISTS = "the handler takes the principal's turn to read a list whole, and give_list charges it"
OWN_CODE = "for callers in this process, the operator's own code; over HTTP it goes by pages or is charged"
OPEN = "not charged, see limits.md: "

ALLOWED = {
    "server/acceptor.py Acceptor._peek": "_PEEK_BYTES, dropped at once",
    "server/asgi.py App.__call__": PASSES_ON,
    "server/asgi.py App._admit": PASSES_ON,
    "server/asgi.py App._respond": PASSES_ON,
    "server/asgi.py App._respond_with_page": PASSES_ON,
    "server/asgi.py App._end_early": SMALL,
    "server/asgi.py App._http": PASSES_ON,
    "server/asgi.py _preflight": "an answer without a body",
    "server/routes/pages.py _read_form": "a form, of _FORM_BYTES at most",
    "server/delivery.py ResponseDelivery.__init__": PASSES_ON,
    "server/delivery.py ResponseDelivery.begin": "a head",
    "server/delivery.py ResponseDelivery.end": "an end",
    "server/delivery.py ResponseDelivery.put": "the one place where answers leave, one piece at a time",
    "server/delivery.py ResponseDelivery.send": CHARGES,
    "server/delivery.py ResponseDelivery.write": "pieces of what its caller had charged",
    "server/activity.py current_activity": "by Budgets.read_page; questions are cut to lines",
    "server/request.py Request.__init__": PASSES_ON,
    "server/request.py ": "the fields that every answer has, joined once",
    "server/request.py Request._read": CHARGES,
    "server/request.py Request.respond": "writes at once what is small; the rest is charged before",
    "server/parameters.py RawBody.load": "by Request._read",
    "server/response.py send_response": SMALL,
    "server/response.py send_refusal": SMALL,
    "server/large_responses.py read_parts": CHARGES,
    "server/large_responses.py respond_with_list": CHARGES,
    "server/large_responses.py respond_with_transcript": "a page that Session.transcript_page charged",
    "server/write_coalescing.py BoundedReader": "one buffer for all connections",
    "server/connections.py Connections.default_lines": SMALL,
    "server/write_coalescing.py CoalescingProtocol.take_body": "empties the body that it hands over to Request._read",
    "server/write_coalescing.py CoalescingProtocol._write_refusal": SMALL,
    "server/write_coalescing.py CoalescingProtocol.on_response_complete": "empties what nobody reads any more",
    "server/write_coalescing.py _CoalescingTransport.writelines": "joins the head and one piece of a body",
    "server/routes/sessions.py get_mailbox": LISTS,
    "server/routes/runs.py list_runs": LISTS,
    "server/page_runs.py run_article": "a list that was read",
    "server/page.py _runs": "a list that was read",
    "server/page.py render": "a list that was read",
    "server/session_page.py render_session": "a list that was read",
    "server/routes/questions.py list_questions": LISTS,
    "server/streams.py Streams._pump": "watches for the end of the connection",
    "server/streams.py Streams.serve_sse": "by Delivery.write, of pages that LogReader charged",
    "server/worker_link.py WorkerLink._read": "a byte from the supervisor",
    "server/streams.py _watch": "drops what comes",
    "server/tokens.py _pem": "a file that the operator names",
    "host/run_execution.py RunExecution._prepare_commit": "a run's own transcript",
    "host/run_execution.py RunExecution.transcript": "a run's own transcript",
    "host/admission.py Admission.enqueue": "sessions that wait for a run, each once",
    "host/attachments.py fetch": OWN_CODE,
    "host/attachments.py fetch_part": "a part that its caller charged",
    "host/attachments.py keep": "a check of a type",
    "host/budgets.py Budget.wait_for": "charges that wait, _WAITERS of a principal",
    "host/run_launcher.py RunLauncher.finish_unstarted": "a run's own transcript",
    "host/transcript_edits.py last_run": "the newest run only",
    "host/event_archive.py EventArchive.add": "ARCHIVED_BYTES at a time, and what a row is above it",
    "host/maintenance.py Maintenance._archive_events": "one batch at a time",
    "host/toolsets.py Toolsets._find_wall": "once, at the start of the host",
    "host/transcript_edits.py read.within": "by Budgets.read_history",
    "host/transcript_edits.py with_states": "its caller's charge grows by each",
    "host/session_directory.py SessionDirectory.catch_up.read": "one page of PAGE_BYTES, which a run waits for",
    "host/suspension.py Suspension._look_after": OPEN + "the journal of one run, after a write whose answer was lost",
    "host/run_history.py read_run_history": OPEN + "the journal of a run that is resumed",
    "host/log_reader.py LogReader.__anext__": "what a broadcast keeps: FREE_BYTES of a session at most",
    "host/log_reader.py LogReader._from_store.read": "by Budgets.read_page",
    "host/log_reader.py _is_settled": "one settlement, dropped at once",
    "host/recovery.py RunRecovery._prepare": "a claim's questions, when the run is taken over",
    "host/log_follower.py LogFollower._catch_up": "one page of PAGE_BYTES for each reader thread, dropped at once",
    "host/log_follower.py LogFollower._settle": "one settlement, which goes to those that wait for it",
    "host/session.py Session.compact": OWN_CODE,
    "host/session.py Session.export": OWN_CODE,
    "host/session.py Session._number_after": "one entry for a moment, in the principal's turn of Budgets.reads",
    "host/session.py Session.mailbox": LISTS,
    "host/session.py Session._settlement": "one answer, which Request.respond charges",
    "host/session.py Session.questions": LISTS,
    "host/session.py Session.runs": LISTS,
    "host/session.py Session.transcript": OWN_CODE,
    "host/session.py Session.transcript_page.read": "by Budgets.read_page",
    "host/run_host.py RunHostAdapter._note_steered": "a run's own transcript",
    "host/run_host.py RunHostAdapter._steered_at": "one page of PAGE_BYTES at a time, after a lost answer",
    "host/run_host.py RunHostAdapter.attachment": OPEN + "attachments that a run loads",
    "host/run_host.py RunHostAdapter.history": "by Budgets.read_history",
    "host/run_host.py RunHostAdapter.agent_state": OPEN + "what an agent of the operator keeps",
    "host/session_directory.py SessionDirectory.__init__": "sessions that are live, each once",
    "host/host.py Host.open_questions": "a bounded number, for the operator's terminal",
    "host/maintenance.py Maintenance._expire_due": "a bounded number at a time",
}
"""Functions that have one of these constructs, and what bounds or charges it."""

KEYS = "keys, which operators make"
CONNECTIONS = "budget connections"
REQUESTS = "requests under way, so connections"
PRINCIPALS = "principals that hold or wait for something; emptied, or swept above a fixed number"
RUNS = "runs under way: max_runs"
OF_ONE_RUN = "what one run waits for; it waits for the log from BEHIND_AT events or BEHIND_BYTES on"
LIVE = "sessions that are live: runs, background work and streams"

GROWING = {
    "server/acceptor.py Acceptor._others": CONNECTIONS,
    "server/acceptor.py Acceptor._preferred": CONNECTIONS,
    "server/acceptor.py Acceptor._signed": CONNECTIONS,
    "server/acceptor.py Acceptor._starting": "connections that a few turns have chosen, until the loop has made them",
    "server/acceptor.py Acceptor._watched": "_WATCHED",
    "server/context.py ServerContext.responses": "statuses of HTTP",
    "server/router.py _Node.children": "the routes",
    "server/router.py _Node.methods": "the routes",
    "server/auth.py OriginGate._passed": KEYS,
    "server/auth.py KeyRing._approvers": KEYS,
    "server/auth.py KeyRing._writes": "writes of keys, which operators make",
    "server/auth.py KeyRing._by_digest": KEYS,
    "server/auth.py KeyRing._callers": KEYS,
    "server/connections.py Connections._bodies": CONNECTIONS,
    "server/connections.py Connections._heads": CONNECTIONS,
    "server/connections.py Connections._idle": CONNECTIONS,
    "server/connections.py Connections._keyless": CONNECTIONS,
    "server/connections.py Connections._peers": CONNECTIONS,
    "server/connections.py Connections._told": PRINCIPALS,
    "server/credentials.py CredentialsInUse._by_credential": REQUESTS,
    "server/credentials.py CredentialsInUse._by_monotonic": REQUESTS,
    "server/credentials.py CredentialsInUse._by_wall": REQUESTS,
    "server/delivery.py ResponseDelivery._charges": "charges themselves",
    "server/activity.py Activity.calls": "of one page that is rendered",
    "server/activity.py Activity.questions": "of one page that is rendered",
    "server/settlement_waits.py SettlementWaits._waiting": REQUESTS,
    "server/router.py Router.routes": "the routes",
    "server/streams.py Streams._tasks": "budget streams",
    "server/stop_tickets.py Stops._done": "1,000 of each principal, 10,000 principals",
    "server/stop_tickets.py Stops._open": "budget stops",
    "server/tokens.py TokenVerifier._keys": "keys of the identity provider",
    "host/event_writer.py EventWriter._batch": OF_ONE_RUN,
    "host/event_writer.py EventWriter.buffer": OF_ONE_RUN,
    "host/run_execution.py RunExecution._commit_fields": "the fields of a commit",
    "host/run_execution.py RunExecution._receipts": "budget stops",
    "host/event_writer.py EventWriter._waiting": OF_ONE_RUN,
    "host/flush_beat.py FlushBeat._beats": "one turn for each run with output, in at most a few beats",
    "host/flush_beat.py FlushBeat._collected": "one append for each run with output, within one beat",
    "host/live_session.py LiveSession._background": "principal_background",
    "host/admission.py Admission._held": PRINCIPALS,
    "host/admission.py Admission._awaiting_slot": "sessions with messages, each once",
    "host/admission.py Admission._line": "sessions with messages, each once",
    "host/awaited_sessions.py AwaitedSessions._expected": "budget streams",
    "host/budgets.py Budget._held": PRINCIPALS,
    "host/budgets.py Budget._lined_up": PRINCIPALS,
    "host/budgets.py Budgets._told": PRINCIPALS,
    "host/budgets.py LoopTime._debt": PRINCIPALS,
    "host/budgets.py LoopTime._total": PRINCIPALS,
    "host/budgets.py Rate._buckets": PRINCIPALS,
    "host/slot_queue.py SlotQueue._due": "sessions whose batch is not due yet",
    "host/drain.py Drain._cut": RUNS,
    "host/background.py Background._active": PRINCIPALS,
    "host/thread_pools.py ThreadPools._by_principal": PRINCIPALS,
    "host/context.py HostContext.tasks": "stops and looks under way: budget stops, runs",
    "host/cluster_watch.py ClusterWatch._tasks": "five",
    "host/cluster_watch.py ClusterWatch._created": "sessions that other hosts created within 10 ms",
    "host/cluster_watch.py ClusterWatch._unknown": "runs that this host holds",
    "host/background.py Background._noted": "sessions with background work, within principal_background",
    "host/node_requests.py NodeRequests._handling": "requests of other hosts, each for a session with a part here",
    "host/cluster_watch.py ClusterWatch._awaiting_agent": "agents and their versions, which operators choose",
    "host/cluster_watch.py ClusterWatch.awaiting_pool": "pools, whose names operators choose",
    "host/coalesced_tasks.py CoalescedTasks._requested": LIVE,
    "host/grants.py Grants._read": "GRANTS_LIMIT of each principal whose calls watch",
    "host/log_follower.py LogFollower._changes": REQUESTS,
    "host/remote_stops.py RemoteStops._watches": REQUESTS,
    "host/log_follower.py LogFollower._waits": REQUESTS,
    "host/recovery.py RunRecovery.pending": "runs that are taken over",
    "host/recovery.py _Recovered.ends": "runs that are taken over",
    "host/recovery.py _Recovered.interrupted": "runs that are taken over",
    "host/recovery.py _Recovered.restarted": "runs that are taken over",
    "host/recovery.py _Recovered.starts": "runs that are taken over",
    "host/run_launcher.py RunLauncher.ending": "runs that are taken over, or whose agent is gone",
    "host/session_directory.py SessionDirectory.live": LIVE,
    "host/run_launcher.py RunLauncher.live": RUNS,
    "host/host.py Host.on_streams_close": "servers of this host",
    "host/suspension.py Suspension._resuming": RUNS,
    "host/scheduler.py Scheduler._broken": "schedules: principal_schedules",
    "host/settlements.py Settlements._expected": REQUESTS,
    "host/statistics.py PromiseCounters.broken": "names of promises",
    "host/statistics.py IncidentLog.counts": "names of counters",
    "host/statistics.py PromiseCounters.kept": "names of promises",
    "host/run_host.py RunHostAdapter._answers": OF_ONE_RUN,
    "host/run_host.py RunHostAdapter._asked": OF_ONE_RUN,
    "host/run_host.py RunHostAdapter._expected": OF_ONE_RUN,
    "host/toolsets.py Toolsets._entered": "toolsets of the agents",
    "host/tree.py TaskTree._abandoned": "sessions with threads that were given up: principal_abandoned",
    "host/session_directory.py SessionDirectory._idle": LIVE,
    "host/maintenance.py Maintenance._timers": "names of timers",
    "host/run_reports.py RunReports._started_at": LIVE,
    "host/run_reports.py RunReports._raised_at": LIVE,
    "host/run_reports.py RunReports._listeners": "listeners that the operator adds",
    "host/grants.py Grants._watching": "tool calls under way that start programs, until each ends",
    "host/program_quotas.py ProgramQuotas._folders": "_KNOWN_FOLDERS",
    "host/program_quotas.py ProgramQuotas._sums": "principals with a program that runs",
    "host/program_quotas.py ProgramQuotas._watched": "programs that run: principal_program_processes",
    "host/program_quotas.py _Folder.measured": "tool calls that wait for a measurement, _MEASURE_S at most",
}
"""Collections that live as long as their object, and what bounds them."""


def test_each_use_of_contents_and_buffers_is_charged_or_bounded() -> None:
    found = {
        f"{name} {place}": what
        for name, text in files()
        for place, what in uses(text, in_server=name.startswith("server/")).items()
    }
    unknown = {place: sorted(what) for place, what in found.items() if place not in ALLOWED}
    assert not unknown, f"charge it by holdfast.host.budgets, or say in ALLOWED what bounds {unknown}"
    assert not ALLOWED.keys() - found.keys(), "these have nothing to be allowed any more"


def test_each_collection_has_a_bound() -> None:
    found = {f"{name} {one}" for name, text in files() for one in collections(text)}
    assert not found - GROWING.keys(), "say in GROWING what bounds these"
    assert not GROWING.keys() - found, "these are gone"


PLANTED = {
    "a body is written raw": """
async def give_all(native, request):
    await request.send({"type": "http.response.body", "body": b"x" * 10**9})
""",
    "a body is read raw": """
async def take_all(request):
    while (await request.receive()).get("body"):
        pass
""",
    "under another name": """
async def give(scope, passed_on: Send):
    say = passed_on
    await say(scope["message"])
""",
    "by Starlette": """
async def take(asked: Request):
    return await asked.body()
""",
    "a transcript": """
async def read(store, row):
    return await store.transcript(row)
""",
    "a transcript, by a name of its own": """
async def read(store, row):
    get = store.read_events
    return await get(row)
""",
    "a transcript, by its name as text": """
async def read(store, row):
    return await getattr(store, "run_events")(row)
""",
    "what an agent kept": """
async def read(store, row):
    return await store.kept(row, 1)
""",
    "a queue": """
from asyncio import Queue as Line
class Server:
    def begin(self):
        self.line = Line()
""",
    "a deque": """
import collections as c
def line():
    return c.deque([1])
""",
    "a maker that is handed on": """
from collections import deque as Line
def lines(make=Line):
    return {name: make() for name in "ab"}
""",
    "a buffer": "def buffer():\n    return bytearray()\n",
    "a file": "def whole(path):\n    with open(path) as file:\n        return file.read()\n",
    "a file in a thread": "async def whole(path):\n    return await asyncio.to_thread(path.read_bytes)\n",
    "parts that are joined": "def whole(parts):\n    return b''.join(parts)\n",
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_goes_around_the_accounting_is_found(planted: str) -> None:
    assert uses(PLANTED[planted])


def test_what_is_bounded_by_itself_is_passed_over() -> None:
    assert not uses("def line():\n    return deque(maxlen=10), asyncio.Queue(10)\n")
    assert uses("def line():\n    return deque([deque()], maxlen=10)\n")
    assert not uses("def size(body: bytearray) -> bytearray:\n    return body\n")


@pytest.mark.parametrize(
    "planted",
    [
        "class Cache:\n    def __init__(self):\n        self._answers: dict[str, bytes] = {}\n",
        "class Cache:\n    def begin(self):\n        self._answers = collections.OrderedDict()\n",
        "class Cache:\n    _answers: ClassVar[list[bytes]] = []\n",
        "@dataclass\nclass Cache:\n    _answers: list[bytes] = field(default_factory=list)\n",
    ],
)
def test_a_collection_without_a_bound_is_found(planted: str) -> None:
    assert collections(planted) == {"Cache._answers"}
