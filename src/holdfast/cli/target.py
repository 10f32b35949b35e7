"""Turn a command's flags into a client, and its result into an exit code."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from holdfast.cli.exit_codes import Exit, exit_of
from holdfast.cli.output import note, say_error
from holdfast.errors import ConfigurationError, HoldfastError

if TYPE_CHECKING:
    from holdfast.client import Client

__all__ = ["Target", "run", "run_with_client"]

_ROOM = "free space at the destination, then run it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server that a command talks to, and the output format.

    Parameters:
        url: URL of the server; None means the host and port of the settings.
        key: API key; None means the local token of the settings' store.
        user: principal that the command acts for; None names no principal.
        as_json: whether to print JSON.
    """

    url: str | None = None
    key: str | None = None
    user: str | None = None
    as_json: bool = False

    def client(self, *, retry_s: float = 0.3, on_cut: Callable[[HoldfastError], None] | None = None) -> Client:
        """Return a client for the server. Raises `ConfigurationError` if the settings or the server are unusable."""
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
        """URL of the server. Raises `ConfigurationError` if the settings are needed and invalid."""
        if self.url:
            return self.url
        from holdfast.settings import load_settings

        settings = load_settings()
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
        return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def run_with_client(target: Target, work: Callable[[Client], Awaitable[Exit | None]], *, retry_s: float = 0.3) -> Exit:
    """Run `work` with a client for `target`; print errors on stderr and return the exit code."""

    async def with_client() -> Exit | None:
        async with target.client(retry_s=retry_s) as client:
            return await work(client)

    return run(with_client, as_json=target.as_json)


def run(work: Callable[[], Awaitable[Exit | None]], *, as_json: bool) -> Exit:
    """Run `work` on a new event loop; print errors on stderr and return the exit code."""

    async def guarded() -> Exit:
        try:
            return await work() or Exit.OK
        except HoldfastError as error:
            say_error(error, as_json=as_json)
            return exit_of(error)

    try:
        return asyncio.run(guarded())
    except KeyboardInterrupt:
        note("")
        return Exit.INTERRUPTED
    except BrokenPipeError:
        _write_no_more()  # the reader closed the pipe
        return Exit.OK
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        _write_no_more()
        say_error(ConfigurationError(f"incomplete output: {error.strerror}", hint=_ROOM), as_json=as_json)
        return Exit.FAILED


def _write_no_more() -> None:
    """Redirect stdout to the null device, so that flushing the rest of its buffer at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
