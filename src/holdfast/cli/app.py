"""Every command with its arguments and options. The code of a command is imported when the command runs."""

from __future__ import annotations

import math
import sys
from typing import Annotated

import typer

__all__ = ["app", "main"]

app = typer.Typer(
    name="holdfast",
    help="Host AI agents for many users at once, and keep them under control.",
    epilog=(
        "Exit codes: 0 success · 1 failed, or work is left · 2 usage · 3 unreachable · 4 refused · 5 interrupted · "
        "6 wait expired · 7 store"
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
keys = typer.Typer(help="Create, list and revoke API keys.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(keys, name="keys")
schedule = typer.Typer(help="Send messages on a schedule.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(schedule, name="schedule")
store_commands = typer.Typer(help="Manage the store file.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(store_commands, name="store")

Url = Annotated[str | None, typer.Option("--url", envvar="HOLDFAST_URL", help="Server address.")]
Key = Annotated[str | None, typer.Option("--key", envvar="HOLDFAST_KEY", help="API key.", show_envvar=True)]
User = Annotated[str | None, typer.Option("--user", help="Act as this principal (trusted and admin keys).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one value per line.")]
Session = Annotated[str, typer.Option("--session", "-s", envvar="HOLDFAST_SESSION", help="Session key.")]
Reason = Annotated[str, typer.Option("--reason", "-r", help="Reason to record with the run.")]


def seconds(text: str | float) -> float:
    """Parse a number of seconds. Raises `typer.BadParameter` for an invalid one, such as -1 or nan."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise typer.BadParameter(f"{text!r} is not a number of seconds")
    return value


Grace = Annotated[float | None, typer.Option("--grace", parser=seconds, help="Grace period for cleanup, in seconds.")]
Store = Annotated[str | None, typer.Option("--store", help="Store URL: sqlite:///file or memory://.")]


def main() -> None:
    """Entry point of the ``holdfast`` command."""
    app(prog_name="holdfast")


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Host AI agents for many users at once, and keep them under control."""
    if version:
        from holdfast import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.command()
def serve(
    agents: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODULE:AGENT]...",
            help="Agents to serve; the first is the default. Without any: the setting `agent`, or the demo.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Serve an assistant with this model: provider:name or scripted:demo."),
    ] = None,
    workspace: Annotated[
        str | None,
        typer.Option("--workspace", "-w", help="Working folder of the assistant (default: one per session)."),
    ] = None,
    approve: Annotated[
        str | None,
        typer.Option(
            "--approve",
            help="Calls of the assistant that need a person's approval: all, dangerous (default) or none.",
        ),
    ] = None,
    mcp: Annotated[
        list[str] | None,
        typer.Option("--mcp", metavar="NAME=COMMAND|URL", help="Add the tools of this MCP server (repeatable)."),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser", help="Give the assistant a browser.")] = False,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="Port to listen on; 0 picks a free one.")] = None,
    store: Store = None,
    grace: Grace = None,
    drain: Annotated[
        float | None, typer.Option("--drain", help="Time for runs to finish at shutdown, in seconds.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option("--log-level", help="Log level: debug, info, warning or error.")
    ] = None,
    json: Json = False,
) -> None:
    """Start a server. Settings can also come from holdfast.toml or HOLDFAST_<NAME>."""
    from holdfast.cli.serving import AssistantFlags
    from holdfast.cli.serving import serve as serving

    chosen = None
    if model is not None:
        chosen = AssistantFlags(
            model=model, workspace=workspace, approve=approve or "dangerous", mcp=mcp or [], browser=browser
        )
    elif workspace or approve or mcp or browser:
        raise typer.BadParameter("--workspace, --approve, --mcp and --browser require --model")
    flags = {
        "host": host,
        "port": port,
        "store": store,
        "grace_s": grace,
        "drain_s": drain,
        "log_level": log_level,
    }
    sys.exit(serving(agents or [], flags, as_json=json, chosen=chosen))


@app.command()
def chat(
    session: Session = "main",
    agent: Annotated[str | None, typer.Option("--agent", help="Agent to talk to.")] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Annotated[bool, typer.Option("--json", help="Print the events as JSON lines.")] = False,
) -> None:
    """Chat with an agent. Press Ctrl-C to interrupt the answer, twice to stop the session, Ctrl-D to exit."""
    from holdfast.cli.chatting import chat as chatting
    from holdfast.cli.connection import Target

    sys.exit(chatting(Target(url=url, key=key, user=user, as_json=json), session, agent=agent))


@app.command()
def send(
    text: Annotated[str | None, typer.Argument(help="Message text; read from stdin if - or omitted.")] = None,
    session: Session = "main",
    wait: Annotated[
        float | None,
        typer.Option("--wait", "-w", parser=seconds, help="Wait for the answer, up to this many seconds."),
    ] = None,
    policy: Annotated[
        str, typer.Option("--policy", help="Policy: queue, steer, collect, interrupt, rollback or reject.")
    ] = "queue",
    agent: Annotated[str | None, typer.Option("--agent", help="Agent that answers.")] = None,
    idempotency_key: Annotated[
        str | None, typer.Option("--idempotency-key", help="Accept a message with this idempotency key only once.")
    ] = None,
    files: Annotated[
        list[str] | None, typer.Option("--attach", "-f", metavar="FILE", help="Attach a file (repeatable).")
    ] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Send a message and print its receipt, or its answer with --wait."""
    from holdfast.cli.connection import Target
    from holdfast.cli.sending import send as sending

    sys.exit(
        sending(
            Target(url=url, key=key, user=user, as_json=json),
            session,
            text,
            wait_s=wait,
            policy=policy,
            agent=agent,
            idempotency_key=idempotency_key,
            files=files or (),
        )
    )


@app.command()
def ps(
    everybody: Annotated[
        bool, typer.Option("--all", "-a", help="List the sessions of all principals (admin).")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", help="Maximum number to list.", min=1, max=1000)] = 100,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """List sessions with their active runs and queued messages."""
    from holdfast.cli.connection import Target
    from holdfast.cli.looking import ps as looking

    sys.exit(looking(Target(url=url, key=key, user=user, as_json=json), everybody=everybody, limit=limit))


@app.command()
def tree(
    session: Annotated[str | None, typer.Option("--session", "-s", help="Show only this session.")] = None,
    everybody: Annotated[bool, typer.Option("--all", "-a", help="Show the work of all principals (admin).")] = False,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Show the live tasks, threads and processes."""
    from holdfast.cli.connection import Target
    from holdfast.cli.looking import tree as looking

    sys.exit(looking(Target(url=url, key=key, user=user, as_json=json), session, everybody=everybody))


@app.command()
def interrupt(
    session: Session = "main",
    reason: Reason = "",
    run_id: Annotated[str | None, typer.Option("--run", help="Interrupt only this run, not a later one.")] = None,
    grace: Grace = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Interrupt the active run; queued messages run next. Exit 1 if some work could not be stopped."""
    from holdfast.cli.connection import Target
    from holdfast.cli.ending import interrupt as ending

    sys.exit(ending(Target(url=url, key=key, user=user, as_json=json), session, reason, run_id=run_id, grace_s=grace))


@app.command()
def stop(
    session: Session = "main",
    reason: Reason = "",
    grace: Grace = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Stop all work of a session and withdraw its queued messages."""
    from holdfast.cli.connection import Target
    from holdfast.cli.ending import stop as ending

    sys.exit(ending(Target(url=url, key=key, user=user, as_json=json), session, reason, grace_s=grace))


@app.command()
def tail(
    session: Session = "main",
    after: Annotated[str | None, typer.Option("--after", help="Show only events after this cursor.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Start with this many of the newest events.", min=0)] = 20,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Keep printing new events.")] = True,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Follow a session's events. Reconnects automatically."""
    from holdfast.cli.connection import Target
    from holdfast.cli.looking import tail as looking

    target = Target(url=url, key=key, user=user, as_json=json)
    sys.exit(looking(target, session, after=after, lines=lines, follow=follow))


@app.command()
def export(
    session: Session = "main",
    events: Annotated[bool, typer.Option("--events", help="Export the event log instead of the transcript.")] = False,
    archive: Annotated[bool, typer.Option("--archive", help="Export an archive for import, with attachments.")] = False,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write to this file.")] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Annotated[bool, typer.Option("--json", help="Write JSON lines instead of Markdown.")] = False,
) -> None:
    """Export a session's transcript as Markdown, as JSON lines, or as an archive for import."""
    from holdfast.cli.connection import Target
    from holdfast.cli.looking import export as looking

    target = Target(url=url, key=key, user=user, as_json=json)
    sys.exit(looking(target, session, events=events, archive=archive, output=output))


@app.command()
def questions(
    session: Session = "main", url: Url = None, key: Key = None, user: User = None, json: Json = False
) -> None:
    """List the open approvals and questions of a session."""
    from holdfast.cli.answering import questions as answering
    from holdfast.cli.connection import Target

    sys.exit(answering(Target(url=url, key=key, user=user, as_json=json), session))


Question = Annotated[
    str | None, typer.Argument(metavar="[QUESTION]", help="Question ID; optional if only one is open.")
]


@app.command()
def approve(
    question: Question = None,
    session: Session = "main",
    note: Annotated[str, typer.Option("--note", help="Note to the model.")] = "",
    call: Annotated[
        str | None,
        typer.Option("--call", metavar="HASH", help="Hash of the call to approve, as shown by 'holdfast questions'."),
    ] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Approve a call. Without --call, show it and ask for confirmation."""
    from holdfast.cli.answering import approve as answering
    from holdfast.cli.connection import Target

    target = Target(url=url, key=key, user=user, as_json=json)
    sys.exit(answering(target, session, question, text=note, call_hash=call))


@app.command()
def deny(
    question: Question = None,
    session: Session = "main",
    reason: Annotated[str, typer.Option("--reason", "-r", help="Reason, passed on to the model.")] = "",
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Deny a call that waits for approval."""
    from holdfast.cli.answering import deny as answering
    from holdfast.cli.connection import Target

    sys.exit(answering(Target(url=url, key=key, user=user, as_json=json), session, question, text=reason))


@app.command()
def answer(
    text: Annotated[str, typer.Argument(help="Answer text.")],
    question: Annotated[
        str | None, typer.Option("--question", "-q", help="Question ID; optional if only one is open.")
    ] = None,
    session: Session = "main",
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Answer a question from a run."""
    from holdfast.cli.answering import answer as answering
    from holdfast.cli.connection import Target

    sys.exit(answering(Target(url=url, key=key, user=user, as_json=json), session, question, text=text))


@app.command()
def retry(
    session: Session = "main",
    wait: Annotated[
        float | None,
        typer.Option("--wait", "-w", parser=seconds, help="Wait for the answer, up to this many seconds."),
    ] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Remove the last run from the transcript and run its messages again."""
    from holdfast.cli.connection import Target
    from holdfast.cli.editing import retry as editing

    sys.exit(editing(Target(url=url, key=key, user=user, as_json=json), session, wait_s=wait))


@app.command()
def undo(session: Session = "main", url: Url = None, key: Key = None, user: User = None, json: Json = False) -> None:
    """Remove the last run, or the last edit, from the transcript and print the removed entries."""
    from holdfast.cli.connection import Target
    from holdfast.cli.editing import undo as editing

    sys.exit(editing(Target(url=url, key=key, user=user, as_json=json), session))


@app.command()
def compact(
    session: Session = "main",
    keep: Annotated[int, typer.Option("--keep", help="Keep this many of your newest messages.", min=0, max=1000)] = 4,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Summarize the old part of the transcript with the agent's model."""
    from holdfast.cli.connection import Target
    from holdfast.cli.editing import compact as editing

    sys.exit(editing(Target(url=url, key=key, user=user, as_json=json), session, keep=keep))


@app.command()
def branch(
    to: Annotated[str, typer.Argument(metavar="KEY", help="Key of the new session.")],
    session: Session = "main",
    through: Annotated[
        int | None, typer.Option("--through", help="Copy up to this entry of the transcript (default: all).", min=0)
    ] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Copy a session's transcript into a new session, to continue from there."""
    from holdfast.cli.connection import Target
    from holdfast.cli.editing import branch as editing

    sys.exit(editing(Target(url=url, key=key, user=user, as_json=json), session, to, through_n=through))


@app.command("import")
def import_(
    file: Annotated[str, typer.Argument(help="Archive written by 'holdfast export --archive'.")],
    session: Session = "main",
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Start a new session with the history of an archive."""
    from holdfast.cli.connection import Target
    from holdfast.cli.editing import import_history

    sys.exit(import_history(Target(url=url, key=key, user=user, as_json=json), session, file))


@app.command()
def drain(
    deadline: Annotated[
        float | None, typer.Option("--deadline", parser=seconds, help="Time for runs to finish, in seconds.")
    ] = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Drain a server: finish active runs, accept no new work. Lists any work left (exit 1). Requires an admin key."""
    from holdfast.cli.connection import Target
    from holdfast.cli.ending import drain as ending

    sys.exit(ending(Target(url=url, key=key, as_json=json), deadline_s=deadline))


@app.command()
def doctor(
    store: Store = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Check store, disk, process control, ports, versions and orphans, and print a fix for each problem."""
    from holdfast.cli.checking import doctor as checking
    from holdfast.cli.connection import Target

    sys.exit(checking(Target(url=url, key=key, as_json=json), store=store))


@app.command()
def storm(
    sessions: Annotated[int, typer.Option("--sessions", help="Number of sessions to drive.", min=1, max=10_000)] = 200,
    seconds: Annotated[float, typer.Option("--seconds", help="Duration, in seconds.", min=0.1)] = 60.0,
    kill_every: Annotated[
        float | None,
        typer.Option(
            "--kill-every", help="Start a server; kill it once at every failpoint, then about every S seconds.", min=0.2
        ),
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="Target this server instead of an embedded host.")] = None,
    key: Key = None,
    say: Annotated[
        str, typer.Option("--say", help="With --url or --agent: start of each message to the agent.")
    ] = "stream 10",
    nemesis: Annotated[
        str | None,
        typer.Option(
            "--nemesis",
            metavar="all|FAULT,...",
            help="Inject faults into servers that it starts: kill, disk-full, disk-slow, read-only, clock, signals, "
            "readers, connections.",
        ),
    ] = None,
    agents: Annotated[
        list[str] | None,
        typer.Option("--agent", metavar="MODULE:NAME", help="With --nemesis: test your own agent (repeatable)."),
    ] = None,
    connections: Annotated[
        int, typer.Option("--connections", help="With --nemesis: number to open and drop.", min=1, max=1_000_000)
    ] = 10_000,
    write_docs: Annotated[
        bool,
        typer.Option("--write-docs", help="With --nemesis: write docs/measured/nemesis.md (run in the source tree)."),
    ] = False,
    hostile: Annotated[
        bool,
        typer.Option("--hostile", help="Add a hostile user who floods, does not read, and streams with revoked keys."),
    ] = False,
    seed: Annotated[int | None, typer.Option("--seed", help="Random seed (default: random).")] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Actions per second across all sessions.", min=0.1)
    ] = None,
    history: Annotated[
        str | None, typer.Option("--history", help="Save the history to this file; with --nemesis, a folder.")
    ] = None,
    check: Annotated[str | None, typer.Option("--check", help="Only check this saved history again.")] = None,
    json: Json = False,
) -> None:
    """Test the promises under load: double texts, interrupts, disconnects, kills. Exit 1 if one is broken."""
    from holdfast.cli.storm import Storm
    from holdfast.cli.storm import storm as storming

    sys.exit(
        storming(
            Storm(
                sessions=sessions,
                seconds=seconds,
                kill_every_s=kill_every,
                url=url,
                key=key,
                say=say,
                seed=seed,
                rate=rate,
                history=history,
                hostile=hostile,
                check=check,
                nemesis=nemesis,
                agents=tuple(agents or ()),
                connections=connections,
                write_docs=write_docs,
                as_json=json,
            )
        )
    )


@app.command()
def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|MODULE:ADAPTER]...",
            help="holdfast (default), langgraph, pydantic-ai, openai-agents, google-adk, all, or your own adapter.",
        ),
    ] = None,
    promises: Annotated[
        list[str] | None, typer.Option("--promise", help="Test only this promise (repeatable).")
    ] = None,
    times: Annotated[
        int, typer.Option("--times", help="Attempts of a probe that finds a broken promise.", min=1, max=100)
    ] = 3,
    write_docs: Annotated[
        bool, typer.Option("--write-docs", help="Write docs/measured/conformance.md (run in the source tree).")
    ] = False,
    json: Json = False,
) -> None:
    """Test an agent framework's promises. Exit 0: kept or not offered; 1: one is broken; 2: one could not be tested."""
    from holdfast.cli.check import check as checking

    sys.exit(checking(names or ["holdfast"], promises=promises or (), times=times, as_json=json, write=write_docs))


@keys.command("create")
def create_key(
    principal: Annotated[str, typer.Argument(help="Principal of the key, who owns the sessions.")],
    role: Annotated[str, typer.Option("--role", help="Role: user, trusted (may act for others) or admin.")] = "user",
    label: Annotated[str, typer.Option("--label", help="Label for people.")] = "",
    agent: Annotated[
        list[str] | None,
        typer.Option("--agent", help="Agent that the key may use (repeatable; default: the public agents)."),
    ] = None,
    approve: Annotated[
        bool,
        typer.Option(
            "--approve", help="Create an approval key: a person types it to approve calls; it gives no other access."
        ),
    ] = False,
    store: Store = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Create a key. It is shown once; the store keeps its hash. From the first key on, every request needs one."""
    from holdfast.cli.connection import Target
    from holdfast.cli.keyring import create, create_approval_key

    target = Target(url=url, key=key, as_json=json)
    if approve:
        sys.exit(create_approval_key(target, store, principal=principal, label=label))
    sys.exit(create(target, store, principal=principal, role=role, label=label, agents=agent))


@keys.command("list")
def list_keys(store: Store = None, url: Url = None, key: Key = None, json: Json = False) -> None:
    """List keys, including revoked ones."""
    from holdfast.cli.connection import Target
    from holdfast.cli.keyring import show

    sys.exit(show(Target(url=url, key=key, as_json=json), store))


@keys.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="Key ID, k_…")],
    stop: Annotated[
        bool, typer.Option("--stop", help="Also stop the principal's sessions and pause its schedules.")
    ] = False,
    store: Store = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Revoke a key at once and close its streams. Lists the work that continues."""
    from holdfast.cli.connection import Target
    from holdfast.cli.keyring import revoke

    sys.exit(revoke(Target(url=url, key=key, as_json=json), store, key_id, stop=stop))


@store_commands.command("move")
def move_store(json: Json = False) -> None:
    """Move ./holdfast.db of an older version into .holdfast/. Stop the server first."""
    from holdfast.cli.store_move import move_old_store

    sys.exit(move_old_store(as_json=json))


ScheduleId = Annotated[str, typer.Argument(metavar="SCHEDULE", help="Schedule ID.")]


@schedule.command("add")
def add_schedule(
    text: Annotated[str | None, typer.Argument(help="Message text; read from stdin if - or omitted.")] = None,
    session: Session = "main",
    every: Annotated[
        float | None, typer.Option("--every", parser=seconds, help="Interval between ticks, in seconds.")
    ] = None,
    cron: Annotated[str | None, typer.Option("--cron", help="Cron expression, such as '30 9 * * MON-FRI'.")] = None,
    timezone: Annotated[
        str, typer.Option("--timezone", help="Time zone of the cron expression, such as Europe/Berlin.")
    ] = "UTC",
    schedule_id: Annotated[
        str | None, typer.Option("--id", help="Schedule ID; replaces the schedule with this ID (default: generated).")
    ] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="Agent that answers.")] = None,
    overlap: Annotated[str, typer.Option("--overlap", help="Policy if a run is active, as for send.")] = "queue",
    miss: Annotated[
        str, typer.Option("--miss", help="Handle missed ticks: skip, delay (one for all) or burst (each).")
    ] = "skip",
    initial_delay: Annotated[
        float | None, typer.Option("--initial-delay", parser=seconds, help="Delay before the first tick, in seconds.")
    ] = None,
    jitter: Annotated[
        float, typer.Option("--jitter", parser=seconds, help="Delay each tick by up to this many seconds.")
    ] = 0.0,
    max_runs: Annotated[int | None, typer.Option("--max-runs", help="Finish after this many firings.")] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Send a message on a schedule: --every or --cron."""
    from holdfast.cli.connection import Target
    from holdfast.cli.scheduling import add

    sys.exit(
        add(
            Target(url=url, key=key, user=user, as_json=json),
            session,
            text,
            every_s=every,
            cron=cron,
            timezone=timezone,
            schedule_id=schedule_id,
            agent=agent,
            overlap=overlap,
            miss=miss,
            initial_delay_s=initial_delay,
            jitter_s=jitter,
            max_runs=max_runs,
        )
    )


@schedule.command("ls")
def list_schedules(
    session: Annotated[
        str | None, typer.Option("--session", "-s", help="List only the schedules of this session.")
    ] = None,
    everybody: Annotated[
        bool, typer.Option("--all", "-a", help="List the schedules of all principals (admin).")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", help="Maximum number to list.", min=1, max=1000)] = 100,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """List schedules with their next tick and the outcome of earlier ones."""
    from holdfast.cli.connection import Target
    from holdfast.cli.scheduling import show

    sys.exit(show(Target(url=url, key=key, user=user, as_json=json), session=session, limit=limit, everybody=everybody))


@schedule.command("pause")
def pause_schedule(
    schedule_id: ScheduleId, url: Url = None, key: Key = None, user: User = None, json: Json = False
) -> None:
    """Pause a schedule until it is resumed."""
    from holdfast.cli.connection import Target
    from holdfast.cli.scheduling import pause

    sys.exit(pause(Target(url=url, key=key, user=user, as_json=json), schedule_id))


@schedule.command("resume")
def resume_schedule(
    schedule_id: ScheduleId, url: Url = None, key: Key = None, user: User = None, json: Json = False
) -> None:
    """Resume a schedule from its next tick on."""
    from holdfast.cli.connection import Target
    from holdfast.cli.scheduling import resume

    sys.exit(resume(Target(url=url, key=key, user=user, as_json=json), schedule_id))


@schedule.command("run")
def run_now_schedule(
    schedule_id: ScheduleId, url: Url = None, key: Key = None, user: User = None, json: Json = False
) -> None:
    """Send a schedule's message now; its ticks stay unchanged."""
    from holdfast.cli.connection import Target
    from holdfast.cli.scheduling import run_now

    sys.exit(run_now(Target(url=url, key=key, user=user, as_json=json), schedule_id))


@schedule.command("rm")
def remove_schedule(
    schedule_id: ScheduleId, url: Url = None, key: Key = None, user: User = None, json: Json = False
) -> None:
    """Delete a schedule."""
    from holdfast.cli.connection import Target
    from holdfast.cli.scheduling import remove

    sys.exit(remove(Target(url=url, key=key, user=user, as_json=json), schedule_id))
