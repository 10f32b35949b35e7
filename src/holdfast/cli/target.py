"""Turn a command's flags into a client, and its result into an exit code."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from holdfast.cli.event_loop import run_on_loop
from holdfast.cli.exit_codes import Exit, exit_of
from holdfast.cli.output import note, say_error
from holdfast.cli.server_watch import watch_server
from holdfast.errors import ConfigurationError, HoldfastError

if TYPE_CHECKING:
    from holdfast.client import Client

__all__ = ["Target", "absorb_ctrl_c", "end_output", "end_typed_line", "note_back", "note_cut", "run", "run_with_client"]

_ROOM = "free space at the destination, then run it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server that a command talks to, and the output format.

    Parameters:
        url: URL of the server; None uses the host and port from the settings.
        port: port of the server, unless `url` names another; None uses the port from the settings.
        key: API key; None uses the local token of the store in the settings, if the server is on this machine.
        user: principal that the command acts for; None uses the principal of the key or token.
        session: key of the session that the command is about, for hints; None if it is about no session.
        as_json: whether to print JSON.
    """

    url: str | None = None
    port: int | None = None
    key: str | None = None
    user: str | None = None
    session: str | None = None
    as_json: bool = False

    def client(self, *, retry_s: float = 0.3, on_cut: Callable[[HoldfastError], None] | None = None) -> Client:
        """Return a client for the server.

        Raises `ConfigurationError` if the settings, URL, key or principal is invalid, or if the local token would be
        sent to a program of another user.
        """
        from holdfast.client import Client

        return Client(self.address, self.key or self._token(), user=self.user, retry_s=retry_s, on_cut=on_cut)

    def _token(self) -> str | None:
        """Return the local token of the settings' store, or None if the server is not on this machine.

        Raises:
            ConfigurationError: if another user's program listens at the server's address.
        """
        from holdfast.cli.listener_owner import refuse_foreign_listener
        from holdfast.local_token import is_loopback, read_token
        from holdfast.settings import load_settings

        where = urlsplit(self.address)
        if not is_loopback(where.hostname or ""):
            return None
        token = read_token(load_settings().store)
        if token is not None:
            refuse_foreign_listener(where.hostname or "", where.port or 80)
        return token

    @property
    def address(self) -> str:
        """URL of the server. Raises `ConfigurationError` if no `url` is given and the settings are invalid."""
        if self.url:
            return self.url
        from holdfast.settings import load_settings, server_url

        return server_url(load_settings(), port=self.port)


def run_with_client(target: Target, work: Callable[[Client], Awaitable[Exit | None]], *, retry_s: float = 0.3) -> Exit:
    """Run `work` with a client for `target`; print errors on stderr and return the exit code."""

    async def with_client() -> Exit | None:
        async with target.client(retry_s=retry_s) as client, watch_server(client, note):
            return await work(client)

    return run(with_client, as_json=target.as_json, session=target.session)


def run(work: Callable[[], Awaitable[Exit | None]], *, as_json: bool, session: str | None = None) -> Exit:
    """Run `work` on a new event loop; print errors on stderr and return the exit code.

    Ctrl-C cancels `work`, and ends at once when it is pressed again.

    Parameters:
        work: the work of the command.
        as_json: whether to print errors as JSON.
        session: key of the session that the command is about, for hints; None if it is about no session.
    """

    async def guarded() -> Exit:
        try:
            return await work() or Exit.OK
        except HoldfastError as error:
            say_error(error, as_json=as_json, session=session)
            return exit_of(error)

    try:
        return run_on_loop(guarded)
    except KeyboardInterrupt:
        end_typed_line()
        return Exit.INTERRUPTED
    except OSError as error:
        return end_output(error, as_json=as_json)


def end_output(error: OSError, *, as_json: bool) -> Exit:
    """Return the exit code of a command whose output has no reader or no room any more; report missing room.

    Raises `error` if it is another one.
    """
    if isinstance(error, BrokenPipeError):
        _write_no_more()
        return Exit.OK
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise error
    _write_no_more()
    say_error(ConfigurationError(f"incomplete output: {error.strerror}", hint=_ROOM), as_json=as_json)
    return Exit.FAILED


def note_cut(error: HoldfastError) -> None:
    """Report on stderr that an event stream was cut off and is being reconnected."""
    note(f"holdfast: {error.message}; reconnecting …")


def note_back() -> None:
    """Report on stderr that an event stream which was cut off receives events again."""
    note("holdfast: reconnected")


def absorb_ctrl_c() -> None:
    """Continue the current task after a Ctrl-C has cancelled it. The next Ctrl-C ends the command at once."""
    end_typed_line()
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()


def end_typed_line() -> None:
    """End the line on which the terminal shows the ``^C`` of a person."""
    if sys.stderr.isatty():
        note("")


def _write_no_more() -> None:
    """Redirect stdout to the null device, so that flushing the rest of its buffer at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
