"""Every command with its arguments and options. What a command does stands in a module that is loaded when it runs."""

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
        "Exit codes: 0 done · 1 failed, or something is left · 2 usage · 3 unreachable · 4 refused · 5 interrupted · "
        "6 wait expired · 7 store"
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
keys = typer.Typer(help="Make, list and revoke API keys.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(keys, name="keys")
schedule = typer.Typer(help="Send messages by the clock.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(schedule, name="schedule")
store_commands = typer.Typer(help="Look after the file of the store.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(store_commands, name="store")

Url = Annotated[str | None, typer.Option("--url", envvar="HOLDFAST_URL", help="The server's address.")]
Key = Annotated[str | None, typer.Option("--key", envvar="HOLDFAST_KEY", help="An API key.", show_envvar=True)]
User = Annotated[str | None, typer.Option("--user", help="Act for this principal (trusted and admin keys).")]
Json = Annotated[bool, typer.Option("--json", help="Answer in JSON, one value a line.")]
Session = Annotated[str, typer.Option("--session", "-s", envvar="HOLDFAST_SESSION", help="The session's key.")]
Reason = Annotated[str, typer.Option("--reason", "-r", help="Why; it is kept with the run.")]


def seconds(text: str | float) -> float:
    """A time from the command line. Raises `typer.BadParameter` for what is none, such as -1 or nan."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise typer.BadParameter(f"{text!r} is not a number of seconds")
    return value


Grace = Annotated[
    float | None, typer.Option("--grace", parser=seconds, help="Seconds that what runs has for its clean-up.")
]
Store = Annotated[str | None, typer.Option("--store", help="Where sessions are kept: sqlite:///file or memory://.")]


def main() -> None:
    """Entry point of the ``holdfast`` command."""
    app(prog_name="holdfast")


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
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
        typer.Argument(metavar="[MODULE:AGENT]...", help="Agents; the first is the default. Without any: the demo."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Serve an assistant with this model, provider:name, or scripted:demo."),
    ] = None,
    workspace: Annotated[
        str | None,
        typer.Option(
            "--workspace", "-w", help="The folder that the assistant works in; default: one for each session."
        ),
    ] = None,
    approve: Annotated[
        str | None,
        typer.Option(
            "--approve",
            help="What the assistant may not do before a person approves: all, dangerous (default) or none.",
        ),
    ] = None,
    mcp: Annotated[
        list[str] | None,
        typer.Option("--mcp", metavar="NAME=COMMAND|URL", help="An MCP server whose tools the assistant has too."),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser", help="Give the assistant a browser.")] = False,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="Port to listen on; 0 takes a free one.")] = None,
    store: Store = None,
    grace: Grace = None,
    drain: Annotated[float | None, typer.Option("--drain", help="Seconds that runs have to finish at the end.")] = None,
    log_level: Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error.")] = None,
    json: Json = False,
) -> None:
    """Start a server. Every setting can also come from holdfast.toml or HOLDFAST_<NAME>."""
    from holdfast.cli.serving import AssistantFlags
    from holdfast.cli.serving import serve as serving

    chosen = None
    if model is not None:
        chosen = AssistantFlags(
            model=model, workspace=workspace, approve=approve or "dangerous", mcp=mcp or [], browser=browser
        )
    elif workspace or approve or mcp or browser:
        raise typer.BadParameter("--workspace, --approve, --mcp and --browser say how the assistant of --model works")
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
    agent: Annotated[str | None, typer.Option("--agent", help="The agent to talk to.")] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Annotated[bool, typer.Option("--json", help="Write the events as JSON lines.")] = False,
) -> None:
    """Talk to an agent. Ctrl-C interrupts the answer, twice stops the session, Ctrl-D leaves."""
    from holdfast.cli.chatting import chat as chatting
    from holdfast.cli.connection import Target

    sys.exit(chatting(Target(url=url, key=key, user=user, as_json=json), session, agent=agent))


@app.command()
def send(
    text: Annotated[str | None, typer.Argument(help="The message; read from stdin if it is - or missing.")] = None,
    session: Session = "main",
    wait: Annotated[
        float | None,
        typer.Option("--wait", "-w", parser=seconds, help="Wait for the answer, at most this many seconds."),
    ] = None,
    policy: Annotated[
        str, typer.Option("--policy", help="queue, steer, collect, interrupt, rollback or reject.")
    ] = "queue",
    agent: Annotated[str | None, typer.Option("--agent", help="The agent that answers.")] = None,
    idempotency_key: Annotated[
        str | None, typer.Option("--idempotency-key", help="The same key is accepted once.")
    ] = None,
    files: Annotated[
        list[str] | None, typer.Option("--attach", "-f", metavar="FILE", help="Attach a file; may be given again.")
    ] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Send a message; print its receipt, or its answer with --wait."""
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
    everybody: Annotated[bool, typer.Option("--all", "-a", help="All principals' sessions (admin).")] = False,
    limit: Annotated[int, typer.Option("--limit", help="At most this many.", min=1, max=1000)] = 100,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """List sessions: what runs, what waits."""
    from holdfast.cli.connection import Target
    from holdfast.cli.looking import ps as looking

    sys.exit(looking(Target(url=url, key=key, user=user, as_json=json), everybody=everybody, limit=limit))


@app.command()
def tree(
    session: Annotated[str | None, typer.Option("--session", "-s", help="Only this session.")] = None,
    everybody: Annotated[bool, typer.Option("--all", "-a", help="All principals' (admin).")] = False,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Show the tasks, threads and processes that are alive."""
    from holdfast.cli.connection import Target
    from holdfast.cli.looking import tree as looking

    sys.exit(looking(Target(url=url, key=key, user=user, as_json=json), session, everybody=everybody))


@app.command()
def interrupt(
    session: Session = "main",
    reason: Reason = "",
    run_id: Annotated[str | None, typer.Option("--run", help="Only this run, not a later one.")] = None,
    grace: Grace = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """End the run that is on; what waits runs afterwards. Exit 1 if something could not be ended."""
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
    """End all of a session's work, and withdraw what waits."""
    from holdfast.cli.connection import Target
    from holdfast.cli.ending import stop as ending

    sys.exit(ending(Target(url=url, key=key, user=user, as_json=json), session, reason, grace_s=grace))


@app.command()
def tail(
    session: Session = "main",
    after: Annotated[str | None, typer.Option("--after", help="A cursor: only what comes after it.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Begin with this many of the newest events.", min=0)] = 20,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Go on with what comes.")] = True,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Follow a session's events. After a cut connection it comes back by itself."""
    from holdfast.cli.connection import Target
    from holdfast.cli.looking import tail as looking

    target = Target(url=url, key=key, user=user, as_json=json)
    sys.exit(looking(target, session, after=after, lines=lines, follow=follow))


@app.command()
def export(
    session: Session = "main",
    events: Annotated[bool, typer.Option("--events", help="The event log instead of the transcript.")] = False,
    archive: Annotated[bool, typer.Option("--archive", help="All of it, attachments too, for an import.")] = False,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write to this file.")] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Annotated[bool, typer.Option("--json", help="JSON lines instead of Markdown.")] = False,
) -> None:
    """Write a session's transcript as Markdown, as JSON lines, or whole for an import."""
    from holdfast.cli.connection import Target
    from holdfast.cli.looking import export as looking

    target = Target(url=url, key=key, user=user, as_json=json)
    sys.exit(looking(target, session, events=events, archive=archive, output=output))


@app.command()
def questions(
    session: Session = "main", url: Url = None, key: Key = None, user: User = None, json: Json = False
) -> None:
    """List what a session's run waits for: approvals of calls, and questions."""
    from holdfast.cli.answering import questions as answering
    from holdfast.cli.connection import Target

    sys.exit(answering(Target(url=url, key=key, user=user, as_json=json), session))


Question = Annotated[
    str | None, typer.Argument(metavar="[QUESTION]", help="Its id; may be left out while only one is open.")
]


@app.command()
def approve(
    question: Question = None,
    session: Session = "main",
    note: Annotated[str, typer.Option("--note", help="A word to the model.")] = "",
    call: Annotated[
        str | None,
        typer.Option("--call", metavar="HASH", help="The call that was shown, as 'holdfast questions' names it."),
    ] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Approve a call. Without --call it is shown, and you are asked."""
    from holdfast.cli.answering import approve as answering
    from holdfast.cli.connection import Target

    target = Target(url=url, key=key, user=user, as_json=json)
    sys.exit(answering(target, session, question, text=note, call_hash=call))


@app.command()
def deny(
    question: Question = None,
    session: Session = "main",
    reason: Annotated[str, typer.Option("--reason", "-r", help="Why; the model is told.")] = "",
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Refuse a call that a run asks approval for."""
    from holdfast.cli.answering import deny as answering
    from holdfast.cli.connection import Target

    sys.exit(answering(Target(url=url, key=key, user=user, as_json=json), session, question, text=reason))


@app.command()
def answer(
    text: Annotated[str, typer.Argument(help="The answer.")],
    question: Annotated[
        str | None, typer.Option("--question", "-q", help="Its id; may be left out while only one is open.")
    ] = None,
    session: Session = "main",
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Answer a question that a run asks."""
    from holdfast.cli.answering import answer as answering
    from holdfast.cli.connection import Target

    sys.exit(answering(Target(url=url, key=key, user=user, as_json=json), session, question, text=text))


@app.command()
def retry(
    session: Session = "main",
    wait: Annotated[
        float | None,
        typer.Option("--wait", "-w", parser=seconds, help="Wait for the answer, at most this many seconds."),
    ] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Take the last run out of the transcript and run its messages again."""
    from holdfast.cli.connection import Target
    from holdfast.cli.editing import retry as editing

    sys.exit(editing(Target(url=url, key=key, user=user, as_json=json), session, wait_s=wait))


@app.command()
def undo(session: Session = "main", url: Url = None, key: Key = None, user: User = None, json: Json = False) -> None:
    """Take the last run, or the last edit, out of the transcript, and print what was taken out."""
    from holdfast.cli.connection import Target
    from holdfast.cli.editing import undo as editing

    sys.exit(editing(Target(url=url, key=key, user=user, as_json=json), session))


@app.command()
def compact(
    session: Session = "main",
    keep: Annotated[int, typer.Option("--keep", help="Leave this many of your newest messages.", min=0, max=1000)] = 4,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Have the agent's model sum up the old part of the transcript."""
    from holdfast.cli.connection import Target
    from holdfast.cli.editing import compact as editing

    sys.exit(editing(Target(url=url, key=key, user=user, as_json=json), session, keep=keep))


@app.command()
def branch(
    to: Annotated[str, typer.Argument(metavar="KEY", help="The new session's key.")],
    session: Session = "main",
    through: Annotated[
        int | None, typer.Option("--through", help="Up to this entry of the transcript; all by default.", min=0)
    ] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Copy a session's transcript into a new session, to go on from there."""
    from holdfast.cli.connection import Target
    from holdfast.cli.editing import branch as editing

    sys.exit(editing(Target(url=url, key=key, user=user, as_json=json), session, to, through_n=through))


@app.command("import")
def import_(
    file: Annotated[str, typer.Argument(help="What 'holdfast export --archive' wrote.")],
    session: Session = "main",
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Begin a new session with the history of an archive."""
    from holdfast.cli.connection import Target
    from holdfast.cli.editing import import_history

    sys.exit(import_history(Target(url=url, key=key, user=user, as_json=json), session, file))


@app.command()
def drain(
    deadline: Annotated[
        float | None, typer.Option("--deadline", parser=seconds, help="Seconds that runs have to finish.")
    ] = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Let a server finish what runs and take no new work. What is left is named (exit 1). Needs an admin key."""
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
    """Check what Holdfast depends on. Store, disk, process control, ports, versions, orphans: each with what to do."""
    from holdfast.cli.checking import doctor as checking
    from holdfast.cli.connection import Target

    sys.exit(checking(Target(url=url, key=key, as_json=json), store=store))


@app.command()
def storm(
    sessions: Annotated[int, typer.Option("--sessions", help="Sessions that are driven.", min=1, max=10_000)] = 200,
    seconds: Annotated[float, typer.Option("--seconds", help="How long.", min=0.1)] = 60.0,
    kill_every: Annotated[
        float | None,
        typer.Option(
            "--kill-every", help="Own a server; kill it once at every failpoint, then about every S seconds.", min=0.2
        ),
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="Storm this server instead of an embedded host.")] = None,
    key: Key = None,
    say: Annotated[
        str, typer.Option("--say", help="With --url or --agent: what begins each message to the agent.")
    ] = "stream 10",
    nemesis: Annotated[
        str | None,
        typer.Option(
            "--nemesis",
            metavar="all|FAULT,...",
            help="Inject faults into servers of its own: kill, disk-full, disk-slow, read-only, clock, signals, "
            "readers, connections.",
        ),
    ] = None,
    agents: Annotated[
        list[str] | None,
        typer.Option("--agent", metavar="MODULE:NAME", help="With --nemesis: torment this agent of yours."),
    ] = None,
    connections: Annotated[
        int, typer.Option("--connections", help="With --nemesis: opened and dropped.", min=1, max=1_000_000)
    ] = 10_000,
    write_docs: Annotated[
        bool, typer.Option("--write-docs", help="With --nemesis: write docs/measured/nemesis.md from here.")
    ] = False,
    hostile: Annotated[
        bool,
        typer.Option("--hostile", help="Add a hostile user who floods, does not read, and streams under revoked keys."),
    ] = False,
    seed: Annotated[int | None, typer.Option("--seed", help="Of all choices; a new one by default.")] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="Actions per second over all sessions.", min=0.1)] = None,
    history: Annotated[str | None, typer.Option("--history", help="Keep the history in this file.")] = None,
    check: Annotated[str | None, typer.Option("--check", help="Only judge this kept history again.")] = None,
    json: Json = False,
) -> None:
    """Check the promises under load: double texts, interrupts, readers that vanish, kills. Exit 1 if one is broken."""
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
            help="holdfast (default), langgraph, pydantic-ai, openai-agents, google-adk, all, or an adapter of yours.",
        ),
    ] = None,
    promises: Annotated[
        list[str] | None, typer.Option("--promise", help="Try only this promise; may be given again.")
    ] = None,
    times: Annotated[int, typer.Option("--times", help="Tries of a probe that finds fault.", min=1, max=100)] = 3,
    write_docs: Annotated[
        bool, typer.Option("--write-docs", help="Write docs/measured/conformance.md from here.")
    ] = False,
    json: Json = False,
) -> None:
    """Try an agent framework's promises. Exit 0: kept or not offered; 1: one is broken; 2: one could not be tried."""
    from holdfast.cli.check import check as checking

    sys.exit(checking(names or ["holdfast"], promises=promises or (), times=times, as_json=json, write=write_docs))


@keys.command("create")
def create_key(
    principal: Annotated[str, typer.Argument(help="Whose key: the owner of the sessions.")],
    role: Annotated[str, typer.Option("--role", help="user, trusted (may act for others) or admin.")] = "user",
    label: Annotated[str, typer.Option("--label", help="A note for people.")] = "",
    agent: Annotated[
        list[str] | None,
        typer.Option("--agent", help="An agent that the key may name (repeatable). Default: the public agents."),
    ] = None,
    approve: Annotated[
        bool,
        typer.Option("--approve", help="Make an approval key: a person types it to approve calls; it opens nothing."),
    ] = False,
    store: Store = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Make a key. It is shown once; the store has its hash. From the first key on, every request needs one."""
    from holdfast.cli.connection import Target
    from holdfast.cli.keyring import create, create_approval_key

    target = Target(url=url, key=key, as_json=json)
    if approve:
        sys.exit(create_approval_key(target, store, principal=principal, label=label))
    sys.exit(create(target, store, principal=principal, role=role, label=label, agents=agent))


@keys.command("list")
def list_keys(store: Store = None, url: Url = None, key: Key = None, json: Json = False) -> None:
    """List keys, revoked ones included."""
    from holdfast.cli.connection import Target
    from holdfast.cli.keyring import show

    sys.exit(show(Target(url=url, key=key, as_json=json), store))


@keys.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="The key's id, k_…")],
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop its principal's sessions and pause its schedules, too.")
    ] = False,
    store: Store = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Make a key invalid at once and end its streams. What goes on is named."""
    from holdfast.cli.connection import Target
    from holdfast.cli.keyring import revoke

    sys.exit(revoke(Target(url=url, key=key, as_json=json), store, key_id, stop=stop))


@store_commands.command("move")
def move_store(json: Json = False) -> None:
    """Move ./holdfast.db, where older versions kept it, into .holdfast/. Stop the server first."""
    from holdfast.cli.store_move import move_old_store

    sys.exit(move_old_store(as_json=json))


ScheduleId = Annotated[str, typer.Argument(metavar="SCHEDULE", help="The schedule's id.")]


@schedule.command("add")
def add_schedule(
    text: Annotated[str | None, typer.Argument(help="The message; read from stdin if it is - or missing.")] = None,
    session: Session = "main",
    every: Annotated[
        float | None, typer.Option("--every", parser=seconds, help="Seconds from one tick to the next.")
    ] = None,
    cron: Annotated[str | None, typer.Option("--cron", help="A cron line, such as '30 9 * * MON-FRI'.")] = None,
    timezone: Annotated[
        str, typer.Option("--timezone", help="The zone of the cron line, such as Europe/Berlin.")
    ] = "UTC",
    schedule_id: Annotated[
        str | None, typer.Option("--id", help="Its id; the one that has it is replaced. Made up by default.")
    ] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="The agent that answers.")] = None,
    overlap: Annotated[
        str, typer.Option("--overlap", help="What to do while a run is on: a policy as of send.")
    ] = "queue",
    miss: Annotated[
        str, typer.Option("--miss", help="What becomes of missed ticks: skip, delay (one for all) or burst (each).")
    ] = "skip",
    initial_delay: Annotated[
        float | None, typer.Option("--initial-delay", parser=seconds, help="Seconds to the first tick.")
    ] = None,
    jitter: Annotated[
        float, typer.Option("--jitter", parser=seconds, help="Each tick comes later by up to so many seconds.")
    ] = 0.0,
    max_runs: Annotated[int | None, typer.Option("--max-runs", help="After so many firings it is finished.")] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """Send a message by the clock: --every or --cron."""
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
    session: Annotated[str | None, typer.Option("--session", "-s", help="Only those of this session.")] = None,
    everybody: Annotated[bool, typer.Option("--all", "-a", help="All principals' (admin).")] = False,
    limit: Annotated[int, typer.Option("--limit", help="At most this many.", min=1, max=1000)] = 100,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> None:
    """List schedules: when they are due, and what became of their ticks."""
    from holdfast.cli.connection import Target
    from holdfast.cli.scheduling import show

    sys.exit(show(Target(url=url, key=key, user=user, as_json=json), session=session, limit=limit, everybody=everybody))


@schedule.command("pause")
def pause_schedule(
    schedule_id: ScheduleId, url: Url = None, key: Key = None, user: User = None, json: Json = False
) -> None:
    """Have no more ticks until it is resumed."""
    from holdfast.cli.connection import Target
    from holdfast.cli.scheduling import pause

    sys.exit(pause(Target(url=url, key=key, user=user, as_json=json), schedule_id))


@schedule.command("resume")
def resume_schedule(
    schedule_id: ScheduleId, url: Url = None, key: Key = None, user: User = None, json: Json = False
) -> None:
    """Go on with the first tick from now on."""
    from holdfast.cli.connection import Target
    from holdfast.cli.scheduling import resume

    sys.exit(resume(Target(url=url, key=key, user=user, as_json=json), schedule_id))


@schedule.command("run")
def run_now_schedule(
    schedule_id: ScheduleId, url: Url = None, key: Key = None, user: User = None, json: Json = False
) -> None:
    """Send its message now; its ticks stay where they are."""
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
