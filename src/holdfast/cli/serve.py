"""``holdfast serve``: load the agents, bind the port, run the server, and print its status."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from holdfast.allocator import return_large_blocks
from holdfast.cli.agent_spec import find_agent, log_import_failure
from holdfast.cli.approval_terminal import ApprovalTerminal, has_terminal
from holdfast.cli.event_loop import run_on_loop
from holdfast.cli.exit_codes import Exit, exit_of
from holdfast.cli.options import Grace, Json, Store
from holdfast.cli.output import counted, note, say, say_error, say_json
from holdfast.cli.own_command import own_command
from holdfast.cli.reload import RESTART, ReloadedBy, serve_reloading
from holdfast.cli.run_lines import RunLines, TerminalFormatter
from holdfast.cli.secret_input import show_on_terminal
from holdfast.cli.supervisor import WorkerPlace, serve_workers
from holdfast.cli.worker_share import worker_settings
from holdfast.clock import system_clock
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.logs import configure_logging, flush_logs, install_hooks
from holdfast.runtime import Interrupt
from holdfast.settings import Settings, data_folder, default_store, load_settings
from holdfast.store_url import shown_store
from holdfast.undumpable import make_undumpable
from holdfast.user_code import nearest

if TYPE_CHECKING:
    from holdfast.agents import Agent
    from holdfast.host import DrainReport, Host, Recovery
    from holdfast.server import Running, WorkerLink
    from holdfast.tools.mcp.server import McpServer

__all__ = ["AssistantFlags", "run_server", "serve"]

T = TypeVar("T")

_DISPLAYS = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
_NAMED = 5
EXIT_S = 5.0
"""Maximum time that exit handlers of libraries may take after the host has closed, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantFlags:
    """Command-line options of the assistant to serve.

    Parameters:
        model: name of the model, as for `find_model`.
        workspace: folder that the assistant works in for the local user; None gives each session its own folder.
        approve: calls that need approval: ``all``, ``dangerous`` or ``none``.
        mcp: MCP servers, each as ``name=command`` or ``name=https://…``.
        browser: whether the assistant has a browser.
    """

    model: str
    workspace: str | None
    approve: str
    mcp: Sequence[str]
    browser: bool

    def agent(self) -> Agent:
        """Create the assistant. Raises `ConfigurationError` if an option is invalid."""
        from holdfast.tools.assistant import assistant

        return assistant(
            self.model,
            workspace=self.workspace,
            approve=self.approve,  # type: ignore[arg-type]  # checked by assistant()
            browser=self.browser,
            tools=[_mcp_server(spec, approval=self.approve == "all") for spec in self.mcp],
        )


def _mcp_server(spec: str, *, approval: bool) -> McpServer:
    from holdfast.tools.mcp.server import McpServer

    name, _, where = spec.partition("=")
    if not name or not where:
        raise ConfigurationError(
            f"--mcp {spec!r} is not NAME=COMMAND or NAME=URL", hint="use a value such as --mcp time=mcp-server-time"
        )
    if where.startswith(("http://", "https://")):
        return McpServer(name, url=where, approval=approval)
    return McpServer(name, command=shlex.split(where), approval=approval)


def serve(
    agents: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE|MODULE[:AGENT]]...",
            help="Agents to serve, such as hello.py; the first is the default. If omitted: the setting `agent`.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Serve an assistant with this model: provider:name or scripted:demo."),
    ] = None,
    workspace: Annotated[
        str | None,
        typer.Option(
            "--workspace",
            "-w",
            help="Working folder of the assistant for the local user; otherwise each session gets its own.",
        ),
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
        float | None, typer.Option("--drain-timeout", help="Time for runs to finish at shutdown, in seconds.")
    ] = None,
    reload: Annotated[
        bool,
        typer.Option("--reload", help="Restart when a Python file here changes; runs then have 1 s to finish."),
    ] = False,
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="Number of server processes; more than one needs PostgreSQL.")
    ] = 1,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page of active runs in a browser.")] = False,
    log_level: Annotated[
        str | None, typer.Option("--log-level", help="Log level: debug, info, warning or error.")
    ] = None,
    reloaded: Annotated[
        ReloadedBy | None, typer.Option("--reloaded", parser=ReloadedBy.parse, hidden=True)  # from --reload itself
    ] = None,
    worker: Annotated[
        WorkerPlace | None, typer.Option("--worker", parser=WorkerPlace.parse, hidden=True)  # from --workers itself
    ] = None,
    json: Json = False,
) -> Exit:
    """Start a server. Settings can also come from holdfast.toml or HOLDFAST_<NAME>."""
    if reload and workers > 1:
        raise typer.BadParameter("--reload runs one worker; omit --workers")
    if reload:
        sys.exit(serve_reloading([argument for argument in sys.argv[1:] if argument != "--reload"]))
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
        "drain_timeout_s": drain,
        "log_level": log_level,
    }
    if workers > 1:
        return serve_workers(flags, workers=workers, as_json=json, on_url=show_page if open_page else None)
    return run_server(
        agents or [], flags, as_json=json, chosen=chosen, open_page=open_page, reloaded=reloaded, worker=worker
    )


def run_server(
    specs: Sequence[str],
    flags: Mapping[str, object],
    *,
    as_json: bool,
    chosen: AssistantFlags | None = None,
    open_page: bool = False,
    reloaded: ReloadedBy | None = None,
    worker: WorkerPlace | None = None,
) -> Exit:
    """Run a server until a signal ends it.

    Parameters:
        specs: agents to serve, as for `find_agent`; if empty, only the assistant is served, or, without an
            assistant, the agent that the settings name.
        flags: settings from the command line, by name; None stands for an option that was not given.
        as_json: whether to print status changes as JSON lines.
        chosen: options of an assistant to serve as the default agent; None serves no assistant.
        open_page: whether to open the page of the server in a browser.
        reloaded: the reloader that started this process, if any.
        worker: the place of this process among several workers; None if it is the only one.
    """
    from holdfast.host import Host
    from holdfast.server import bind, raise_descriptor_limit

    try:
        settings = load_settings(flags)
        if worker is not None:
            settings = worker_settings(settings, workers=worker.workers)
        configure_logging(settings.log_level)
        if sys.stderr.isatty() and not as_json:
            for handler in logging.getLogger().handlers:
                handler.setFormatter(TerminalFormatter(sys.stderr))
        install_hooks()
        if not settings.debuggers:
            make_undumpable()
        if settings.store == default_store() != f"sqlite:///{data_folder() / 'holdfast.db'}":
            note(f"the store is still {settings.store}: stop the server and move it with 'holdfast store move'")
        raise_descriptor_limit()  # before the first program: a walled one gets at most half of this limit
        agents = [] if chosen is None else [chosen.agent()]
        agents += [find_agent(spec) for spec in (specs or ([] if agents else [settings.agent]))]
        return_large_blocks()
        host = Host(agents=agents, settings=settings)
        with bind(settings) if worker is None else worker.take_listener() as listener:
            link = None if worker is None else worker.take_link()
            report, is_silent = _run(
                lambda: _serve(
                    host, listener, settings, as_json=as_json, open_page=open_page, reloaded=reloaded, link=link
                )
            )
    except HoldfastError as error:
        log_import_failure(error)
        say_error(error, as_json=as_json)
        return exit_of(error)
    flush_logs()  # the report comes last
    try:
        if not is_silent:
            _say_report(report, as_json=as_json)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the output is closed; the flush at exit must not fail again
    code = Exit.FAILED if report.orphans else Exit.OK
    _bound_the_exit(code)
    return code


def _bound_the_exit(code: Exit) -> None:
    """Limit the time for exit handlers of libraries, which may block forever, such as a pool with killed processes."""

    def end() -> None:
        Interrupt(name="exit").wait_blocking(EXIT_S)
        note(f"exit handlers still ran {EXIT_S:g} s after the shutdown; exiting now")
        os._exit(code)

    threading.Thread(target=end, name="holdfast-exit", daemon=True).start()


def _run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    factory = None
    if sys.platform == "linux":
        import uvloop

        factory = uvloop.new_event_loop
    return run_on_loop(work, loop_factory=factory)


async def _serve(
    host: Host,
    listener: socket.socket,
    settings: Settings,
    *,
    as_json: bool,
    open_page: bool,
    reloaded: ReloadedBy | None,
    link: WorkerLink | None,
) -> tuple[DrainReport, bool]:
    """Serve until a signal arrives; return the report of the drain, and whether it is to be kept from the operator."""
    from holdfast.server import serve as serving

    is_silent = False
    terminals: list[ApprovalTerminal] = []
    lines = RunLines(asyncio.get_running_loop(), note)
    if not as_json and logging.getLogger("holdfast").isEnabledFor(logging.INFO):
        host.watch_runs(lines)

    def ready(running: Running) -> None:
        lines.is_serving = True
        with suppress(OSError):  # the output is closed; keep serving
            if link is not None:
                link.tell_ready(**_about(running, settings))
            elif as_json:
                say_json({"event": "ready", **_about(running, settings)})
            elif reloaded is not None and reloaded.change:
                _say_reloaded(running, reloaded)
            else:
                _say_ready(running, settings)
            if reloaded is not None and not as_json:
                running.host.loop.add_signal_handler(RESTART, restart)
            if open_page:
                threading.Thread(target=show_page, args=(f"{running.url}/",), name="holdfast-page", daemon=True).start()
            if running.app.context.executes:
                offer_approvals(running)

    def offer_approvals(running: Running) -> None:
        if has_terminal():
            terminals.append(ApprovalTerminal(host, note))
            terminals[0].start()
            show_on_terminal(
                f"approval key for chat and the page, valid until the server exits: {running.app.keys.show_approver()}"
            )
        elif not running.app.keys.any_approver:
            note("no way to approve calls: the server has no terminal and no approval key")
            note("  stop the server, create a key with 'holdfast keys create PRINCIPAL --approve', and restart it")

    def restart() -> None:
        nonlocal is_silent
        is_silent = not host.live and not any(live.background for live in host.actors.values())
        signal.raise_signal(signal.SIGTERM)

    def at_step(text: str) -> None:
        lines.is_serving = False
        if is_silent or (link is not None and not host.live):
            return
        with suppress(OSError):
            if as_json:
                say_json({"event": "stopping", "text": text})
            else:
                note(text)

    try:
        report = await serving(host, listener, ready=ready, note=at_step, link=link)
        is_silent = is_silent or (link is not None and is_idle(report))
        return report, is_silent and not report.orphans
    finally:
        for terminal in terminals:
            terminal.close()
        lines.close()


def _about(running: Running, settings: Settings) -> dict[str, object]:
    """Return the description of a server that is ready, for programs."""
    host = running.host
    return {
        "url": running.url,
        "pid": os.getpid(),
        "agents": sorted(host.agents),
        "default_agent": host.default_agent,
        "store": shown_store(settings.store),
        "keys_required": running.keys_required,
        "token_file": None if running.token_file is None else str(running.token_file),
        "recovered": host.recovered,
    }


def is_idle(report: DrainReport) -> bool:
    """Return whether the drain found nothing to report."""
    return not (report.finished or report.suspended or report.interrupted or report.waiting or report.ended_background)


def _say_ready(running: Running, settings: Settings) -> None:
    from holdfast.server.page import paste_lines
    from holdfast.version import __version__

    host = running.host
    curl, python = paste_lines(running.url, with_key=running.keys_required)
    others = sorted(host.agents.keys() - {host.default_agent})
    names = ", ".join((f"{host.default_agent} (default)" if others else host.default_agent, *others))
    say(f"Holdfast {__version__} answers on {running.url} (pid {os.getpid()})")
    say(f"  agents  {names}")
    kept = " (data is lost at exit)" if settings.store == "memory://" else ""
    say(f"  store   {shown_store(settings.store)}{kept}")
    if running.token_file is not None:
        say("  keys    local token required, because agents act on this machine; commands in this folder find it")
        say(f"          export HOLDFAST_KEY=$(cat {shlex.quote(nearest(running.token_file))})")
    else:
        keys = (
            "required for every request"
            if running.keys_required
            else "none: anyone on this machine acts as principal `local`"
        )
        say(f"  keys    {keys}")
    for line in _recovered(host.recovered):
        say(f"  {line}")
    say()
    say("Try it from another terminal:")
    say()
    for line in _first_steps(running, settings):
        say(line)
    say()
    say("With curl:")
    say()
    say(curl)
    say()
    say("From Python:")
    say()
    say(python)
    say()
    if running.keys_required:
        secret = "a key" if running.token_file is None else "the token"
        say(f"Open {running.url}/ in a browser to see active runs: any user name, and {secret} as the password.")
    else:
        say(f"Open {running.url}/ in a browser to see active runs.")
    say("Press Ctrl-C to shut down; press it twice to quit at once.")


def _say_reloaded(running: Running, reloaded: ReloadedBy) -> None:
    """Print what is new after a restart: the rest of the banner is on the terminal already."""
    host = running.host
    took_s = system_clock.monotonic() - reloaded.began_at
    names = ", ".join((host.default_agent, *sorted(host.agents.keys() - {host.default_agent})))
    answers = f"{names} answers on {running.url} (pid {os.getpid()})"
    say(f"reloaded in {took_s:.1f} s: {reloaded.change}; {answers}")
    for line in _recovered(host.recovered):
        say(f"  {line}")


def show_page(url: str) -> None:
    """Open a page in the user's graphical browser, or print its address if that fails."""
    import webbrowser

    graphical = sys.platform != "linux" or any(os.environ.get(name) for name in _DISPLAYS)
    try:
        opened = graphical and webbrowser.open(url)
    except (webbrowser.Error, OSError):
        opened = False
    if not opened:
        note(f"found no browser to open; open {url} yourself")


def _first_steps(running: Running, settings: Settings) -> list[str]:
    """Return commands to type next: three things to try with the demo, or how to talk to an agent of one's own."""
    where = "" if settings.port == Settings().port else f" --url {running.url}"
    chat, ask, interrupt = (f"{own_command()} {name}{where}" for name in ("chat", "ask", "interrupt"))
    if running.host.default_agent != "demo":
        return [chat, f'{ask} "hello"']
    return [
        f"1. Talk to it:   {chat}",
        "                 (type help, or steps 20; Ctrl-C interrupts the run)",
        f'2. Stop it:      {ask} "tree"',
        f"                 and from one more terminal: {interrupt}",
        f"3. Kill it:      kill -9 {os.getpid()}",
        "                 while it works, then start it again: the run continues",
    ]


def _recovered(recovery: Recovery) -> list[str]:
    """Return lines that describe the result of the recovery after a crash."""
    lines = []
    if recovery.restarted:
        names = _named(recovery.restarted_in, len(recovery.restarted))
        lines.append(f"recovered: {counted(len(recovery.restarted), 'run')} resumed: {names}")
    if recovery.interrupted:
        names = _named(recovery.interrupted_in, len(recovery.interrupted))
        lines.append(f"recovered: {counted(len(recovery.interrupted), 'run')} interrupted: {names}")
        mine = [label for label in recovery.interrupted_in if "/" not in label]
        key = shlex.quote(mine[0]) if mine else "SESSION --user OWNER"
        lines.append(f"           to run the messages again: {own_command()} retry -s {key}")
    if recovery.waiting:
        names = _named(recovery.waiting_in, recovery.waiting)
        lines.append(f"recovered: messages queued in {counted(recovery.waiting, 'session')}: {names}")
    return lines


def _named(sessions: Sequence[str], count: int) -> str:
    """Return the first sessions of `count`, and how many more there are."""
    shown = sessions[:_NAMED]
    more = f", … and {count - len(shown)} more" if count > len(shown) else ""
    return f"{', '.join(shown)}{more}"


def _say_report(report: DrainReport, *, as_json: bool) -> None:
    if as_json:
        say_json({"event": "stopped", "report": report})
        return
    parts = [f"{counted(report.finished, 'run')} finished"] if report.finished else []
    if report.suspended:
        parts.append(f"{counted(len(report.suspended), 'run')} to resume at the next start")
    if report.interrupted:
        parts.append(f"{counted(len(report.interrupted), 'run')} interrupted")
    if report.waiting:
        parts.append(f"messages queued in {counted(report.waiting, 'session')}")
    after = f"Stopped after {report.elapsed_s:.1f} s"
    idle = "." if report.ended_background else "; nothing was running."
    note(f"{after}: {', '.join(parts)}" if parts else f"{after}{idle}")
    for work in report.ended_background:
        note(f"  ended background work: {work}")
    for orphan in report.orphans:
        note(f"  still running: {orphan}")
