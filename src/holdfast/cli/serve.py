"""``holdfast serve``: load the agents, bind the port, run the server, and print its status."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import shlex
import shutil
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.allocator import return_large_blocks
from holdfast.cli.approval_terminal import ApprovalTerminal, has_terminal
from holdfast.cli.exit_codes import Exit, exit_of
from holdfast.cli.options import Grace, Json, Store
from holdfast.cli.output import counted, note, say, say_error, say_json
from holdfast.cli.secret_input import show_on_terminal
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.logs import configure_logging, install_hooks, log_failure, one_line
from holdfast.runtime import Interrupt
from holdfast.settings import Settings, data_folder, default_store, load_settings
from holdfast.undumpable import make_undumpable

if TYPE_CHECKING:
    from holdfast.agents import Agent
    from holdfast.host import DrainReport, Host, Recovery
    from holdfast.server import Running
    from holdfast.tools.mcp.server import McpServer

__all__ = ["AssistantFlags", "load_agent", "run_server", "serve"]

_log = logging.getLogger("holdfast.cli")

EXIT_S = 5.0
"""Time in seconds that exit handlers of libraries may take after the host has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantFlags:
    """Command-line options of the assistant to serve.

    Parameters:
        model: name of the model, as for `find_model`.
        workspace: folder that the assistant works in; None gives each session its own folder.
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
        raise ConfigurationError(f"--mcp {spec!r} is not NAME=COMMAND or NAME=URL", hint="--mcp files='npx -y server'")
    if where.startswith(("http://", "https://")):
        return McpServer(name, url=where, approval=approval)
    return McpServer(name, command=shlex.split(where), approval=approval)


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
        float | None, typer.Option("--drain-timeout", help="Time for runs to finish at shutdown, in seconds.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option("--log-level", help="Log level: debug, info, warning or error.")
    ] = None,
    json: Json = False,
) -> Exit:
    """Start a server. Settings can also come from holdfast.toml or HOLDFAST_<NAME>."""
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
    return run_server(agents or [], flags, as_json=json, chosen=chosen)


def run_server(
    specs: Sequence[str], flags: Mapping[str, object], *, as_json: bool, chosen: AssistantFlags | None = None
) -> Exit:
    """Run a server until a signal ends it.

    Parameters:
        specs: agents to serve, each as ``module:name``; empty means only the assistant, or the agent of the settings
            if no assistant is chosen.
        flags: settings from the command line by name; the value None means that the option was not given.
        as_json: whether to print status changes as JSON lines.
        chosen: options of an assistant to serve as the default agent; None serves no assistant.
    """
    from holdfast.host import Host
    from holdfast.server import bind, raise_descriptor_limit

    try:
        settings = load_settings(flags)
        configure_logging(settings.log_level)
        install_hooks()
        if not settings.debuggers:
            make_undumpable()
        if settings.store == default_store() != f"sqlite:///{data_folder() / 'holdfast.db'}":
            note(f"the store is still {settings.store}: stop the server and move it with 'holdfast store move'")
        agents = [] if chosen is None else [chosen.agent()]
        agents += [load_agent(spec) for spec in (specs or ([] if agents else [settings.agent]))]
        raise_descriptor_limit()
        return_large_blocks()
        host = Host(agents=agents, settings=settings)
        with bind(settings) as listener:
            report = _run(_serve(host, listener, settings, as_json=as_json))
    except HoldfastError as error:
        if isinstance(error.__cause__, (Exception, SystemExit)) and isinstance(error, ConfigurationError):
            log_failure(_log, "the server failed to start", error.__cause__)
            for handler in logging.getLogger().handlers:
                handler.flush()  # the error itself comes last on stderr
        say_error(error, as_json=as_json)
        return exit_of(error)
    try:
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


def load_agent(spec: str) -> Agent:
    """Import and return the agent that ``module:name`` names; the current folder is searched as well.

    Raises:
        ConfigurationError: if the module or the name does not exist, the import fails, or the object is not an agent.
    """
    from holdfast.agents import as_agent

    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise ConfigurationError(f"{spec!r} does not name an agent", hint="use module:name, such as hello:agent")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigurationError(
                f"cannot import {module_name}: {_where(error)}{one_line(error)}", hint="install the missing package"
            ) from error
        raise ConfigurationError(
            f"no module named {module_name!r}", hint="run it in the folder of the module, or install it"
        ) from None
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"cannot import {module_name}: {_where(error)}{one_line(error)}", hint="fix that module"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(
                f"{module_name} has no {name!r}", hint=f"it defines: {', '.join(_public(found)) or 'nothing public'}"
            )
        found = getattr(found, part)
    return as_agent(found)


def _where(error: BaseException) -> str:
    """Return the file and line where an import failed, preferably in the user's own code."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_nearest(Path(error.filename))}, line {error.lineno}: "
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename not in (__file__, importlib.__file__)
    ]
    ours = [frame for frame in frames if not _is_installed(frame.filename)] or frames
    return f"{_nearest(Path(ours[-1].filename))}, line {ours[-1].lineno}: " if ours else ""


def _is_installed(file: str) -> bool:
    """Return whether a file belongs to Python or to an installed package rather than to the user's code."""
    return any(Path(file).is_relative_to(folder) for folder in {*sysconfig.get_paths().values()})


def _public(thing: object) -> list[str]:
    return [name for name in vars(thing) if not name.startswith("_")][:20]


def _run(work: Coroutine[Any, Any, DrainReport]) -> DrainReport:
    factory = None
    if sys.platform == "linux":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


async def _serve(host: Host, listener: socket.socket, settings: Settings, *, as_json: bool) -> DrainReport:
    from holdfast.server import serve as serving

    terminals: list[ApprovalTerminal] = []

    def ready(running: Running) -> None:
        with suppress(OSError):  # the output is closed; keep serving
            if as_json:
                say_json(
                    {
                        "event": "ready",
                        "url": running.url,
                        "pid": os.getpid(),
                        "agents": sorted(host.agents),
                        "store": settings.store,
                        "keys_required": running.keys_required,
                        "token_file": None if running.token_file is None else str(running.token_file),
                        "recovered": host.recovered,
                    }
                )
            else:
                _say_ready(running, settings)
            if running.app.context.approval_key_required:
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

    def at_step(text: str) -> None:
        with suppress(OSError):
            if as_json:
                say_json({"event": "stopping", "text": text})
            else:
                note(text)

    try:
        return await serving(host, listener, ready=ready, note=at_step)
    finally:
        for terminal in terminals:
            terminal.close()


def _say_ready(running: Running, settings: Settings) -> None:
    from holdfast.server.page import paste_lines
    from holdfast.version import __version__

    host = running.host
    curl, python = paste_lines(running.url, with_key=running.keys_required)
    names = ", ".join(sorted(host.agents))
    say(f"Holdfast {__version__} answers on {running.url} (pid {os.getpid()})")
    say(f"  agents  {names}")
    kept = " (data is lost at exit)" if settings.store == "memory://" else ""
    say(f"  store   {settings.store}{kept}")
    if running.token_file is not None:
        say("  keys    local token required, because agents act on this machine; commands in this folder find it")
        say(f"          export HOLDFAST_KEY=$(cat {shlex.quote(_nearest(running.token_file))})")
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
    say(f"{_command()} chat" if settings.port == Settings().port else f"{_command()} chat --url {running.url}")
    say()
    say(curl)
    say()
    say(python)
    say()
    if running.keys_required:
        secret = "a key" if running.token_file is None else "the token"
        say(f"Open {running.url}/ in a browser to see active runs: any user name, and {secret} as the password.")
    else:
        say(f"Open {running.url}/ in a browser to see active runs.")
    say("Press Ctrl-C to drain and shut down; press it twice to exit immediately.")


def _nearest(path: Path) -> str:
    """Return the shorter of a file's relative and absolute paths."""
    return min(os.path.relpath(path), str(path), key=len)


def _command() -> str:
    """Return the text to type to run this command: its name if the name is in PATH, or else its path."""
    here = os.path.abspath(sys.argv[0])
    found = shutil.which("holdfast")
    return "holdfast" if found is not None and os.path.samefile(found, here) else _nearest(Path(here))


def _recovered(recovery: Recovery) -> list[str]:
    """Return lines that describe the result of the recovery after a crash."""
    lines = []
    if recovery.restarted:
        names = ", ".join(recovery.restarted[:5])
        lines.append(f"recovered: {counted(len(recovery.restarted), 'run')} resumed: {names}")
    if recovery.interrupted:
        names = ", ".join(recovery.interrupted[:5])
        lines.append(f"recovered: {counted(len(recovery.interrupted), 'run')} interrupted: {names}")
    if recovery.waiting:
        lines.append(f"recovered: {counted(recovery.waiting, 'message')} queued to run now")
    return lines


def _say_report(report: DrainReport, *, as_json: bool) -> None:
    if as_json:
        say_json({"event": "stopped", "report": report})
        return
    parts = [f"{counted(report.finished, 'run')} finished"]
    if report.suspended:
        parts.append(f"{len(report.suspended)} to resume at the next start")
    if report.interrupted:
        parts.append(f"{len(report.interrupted)} interrupted")
    if report.waiting:
        parts.append(f"messages queued in {counted(report.waiting, 'session')}")
    note(f"shut down after {report.elapsed_s:.1f} s: {', '.join(parts)}")
    for orphan in report.orphans:
        note(f"  still running: {orphan}")
