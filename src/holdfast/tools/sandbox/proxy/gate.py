"""One program's way to the network: accepts its connections, detects HTTP, CONNECT or SOCKS, and connects them.

Invariants
- A connection leads to one target, which is checked before it is resolved. It is resolved once, and connected to an
  address that was checked. So a redirect, which is a new request of the client, is checked as well.
- A plain request is one connection: ``connection: close`` in both directions, and nothing after the request's body is
  passed on. So no second request follows to a server that was checked for the first.
- A connection belongs to a task of `Gate.serve`, so none outlives that call. Each stage has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from holdfast.errors import ToolFailed
from holdfast.tools.addresses import AddressRules, resolve_host
from holdfast.tools.sandbox.proxy import http, socks
from holdfast.tools.sandbox.proxy.budgets import Traffic
from holdfast.tools.sandbox.proxy.rules import HostRules, ProxyTarget
from holdfast.tools.sandbox.proxy.stream import SocketStream

__all__ = ["DEADLINES", "HEAD_BYTES", "Deadlines", "Gate"]

HEAD_BYTES = 65_536
"""Maximum size of a request's or response's head."""

_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
_END_OF_HEAD = b"\r\n\r\n"
_ACCEPT_PAUSE_S = 0.05
_SAY_S = 2.0
_INTERIM_RESPONSES = 8
_REFUSALS = 32
_REFUSAL_CHARS = 300


class Deadlines(NamedTuple):
    """Deadlines of a connection, in seconds.

    Parameters:
        head_s: time in which the client must send its request's head.
        connect_s: time to resolve the target's name, and to connect to each of its addresses.
        idle_s: time after which a connection without traffic is closed.
    """

    head_s: float = 30.0
    connect_s: float = 10.0
    idle_s: float = 300.0


DEADLINES = Deadlines()


class _Unreachable(Exception):
    """The target cannot be connected to, or does not answer with HTTP."""


class Gate:
    """The proxy for one program.

    Parameters:
        hosts: hosts that the program may reach.
        addresses: addresses that the proxy may connect to.
        traffic: counters and budgets of the program.
        deadlines: deadlines of each connection.
        resolve: returns the addresses of a host and port, in a thread.
    """

    def __init__(
        self,
        hosts: HostRules,
        addresses: AddressRules,
        traffic: Traffic,
        *,
        deadlines: Deadlines = DEADLINES,
        resolve: Callable[[str, int], list[str]] = resolve_host,
    ) -> None:
        self.traffic = traffic
        self.refused: OrderedDict[str, str] = OrderedDict()
        """Reason of the last refusal or failure by host; of many hosts, only the latest."""
        self._hosts = hosts
        self._addresses = addresses
        self._deadlines = deadlines
        self._resolve = resolve

    async def serve(self, listener: socket.socket) -> None:
        """Serve the connections of a listening socket until cancelled, then close it and them."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as connections:
            try:
                while True:
                    try:
                        accepted, _ = await loop.sock_accept(listener)
                    except OSError:  # out of descriptors, or the client has gone
                        await asyncio.sleep(_ACCEPT_PAUSE_S)
                        continue
                    attending = connections.create_task(self._attend(accepted))
                    attending.add_done_callback(lambda _, accepted=accepted: accepted.close())  # type: ignore[misc]
                    await asyncio.sleep(self.traffic.principal.accept_pause_s())
            finally:
                listener.close()  # before the connections: a client that sees the end of one cannot open another

    async def _attend(self, accepted: socket.socket) -> None:
        client = SocketStream(accepted, self.traffic.add_sent)
        try:
            await self._serve(client)
        except (OSError, EOFError, ToolFailed):  # a side has gone, or a budget is used up
            return
        except Exception as error:
            context = {"message": "a connection of the network proxy failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
        finally:
            self.traffic.end_connection()

    async def _serve(self, client: SocketStream) -> None:
        try:
            self.traffic.start_connection()
        except ToolFailed as error:
            self._note("any host", error.message)
            await self._end_with(client, http.refusal("403 Forbidden", error.message))
            return
        async with asyncio.timeout(self._deadlines.head_s):
            first = await client.read()
        client.unread(first)
        if first[:1] == bytes((socks.VERSION,)):
            await self._serve_socks(client)
        elif first:
            await self._serve_http(client)

    async def _serve_socks(self, client: SocketStream) -> None:
        try:
            async with asyncio.timeout(self._deadlines.head_s):
                target = await socks.read_target(client)
            upstream = await self._connect(target)
        except (ToolFailed, _Unreachable, socks.UnsupportedRequest) as error:
            if isinstance(error, socks.UnsupportedRequest):
                await self._end_with(client, error.answer)
            else:
                code = socks.NOT_ALLOWED if isinstance(error, ToolFailed) else socks.UNREACHABLE
                await self._end_with(client, socks.reply(code))
            return
        with contextlib.closing(upstream):
            await client.write(socks.reply(socks.CONNECTED))
            await self._tunnel(client, upstream)

    async def _serve_http(self, client: SocketStream) -> None:
        try:
            async with asyncio.timeout(self._deadlines.head_s):
                request = http.parse_request(await client.read_until(_END_OF_HEAD, HEAD_BYTES))
            upstream = await self._connect(request.target)
        except ToolFailed as error:
            return await self._end_with(client, http.refusal("403 Forbidden", error.message))
        except http.InvalidHead as error:
            return await self._end_with(client, http.refusal("400 Bad Request", str(error)))
        except ValueError as error:
            return await self._end_with(client, http.refusal("431 Request Header Fields Too Large", str(error)))
        except TimeoutError:
            return await self._end_with(client, http.refusal("408 Request Timeout", "no complete request in time"))
        except _Unreachable as error:
            return await self._end_with(client, http.refusal("502 Bad Gateway", str(error)))
        with contextlib.closing(upstream):
            if request.method == "CONNECT":
                await client.write(_ESTABLISHED)
                await self._tunnel(client, upstream)
            else:
                await self._end_with(client, await self._exchange(client, upstream, request))

    async def _end_with(self, client: SocketStream, answer: bytes) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SAY_S):
                await client.write(answer)
        await client.linger()

    # -- connecting

    async def _connect(self, target: ProxyTarget) -> SocketStream:
        """Connect to an allowed address of an allowed target.

        Raises:
            ToolFailed: if the target is not allowed, or is unknown.
            _Unreachable: if no address of the target accepts the connection in time.
        """
        try:
            self._hosts.check(target)
            addresses = self._addresses.permitted(target.host, await self._lookup(target))
        except (ToolFailed, _Unreachable) as error:
            self._note(target.host, str(error))
            raise
        problem: OSError | None = None
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            upstream = socket.socket(family, socket.SOCK_STREAM)
            try:
                upstream.setblocking(False)
                upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                async with asyncio.timeout(self._deadlines.connect_s):
                    await asyncio.get_running_loop().sock_connect(upstream, (address, target.port))
            except BaseException as error:
                upstream.close()
                if not isinstance(error, OSError):
                    raise
                problem = error
            else:
                return SocketStream(upstream, self.traffic.add_received)
        reason = "no response" if problem is None or problem.errno is None else os.strerror(problem.errno)
        self._note(target.host, text := f"{target.host} is unreachable: {reason}")
        raise _Unreachable(text)

    async def _lookup(self, target: ProxyTarget) -> list[str]:
        """Resolve the host in a thread; a principal has few lookups at a time, and none is forgotten while it runs."""
        resolving = self.traffic.principal.resolving
        try:
            async with asyncio.timeout(self._deadlines.connect_s):
                await resolving.acquire()
        except TimeoutError:
            raise _Unreachable(f"{target.host} cannot be resolved: too many lookups in progress") from None

        def end(lookup: asyncio.Future[list[str]]) -> None:
            resolving.release()
            if not lookup.cancelled():
                lookup.exception()  # seen, even if nothing waits any more

        lookup = asyncio.get_running_loop().run_in_executor(None, self._resolve, target.host, target.port)
        lookup.add_done_callback(end)
        await asyncio.wait({lookup}, timeout=self._deadlines.connect_s)  # a cancel would not end the thread
        if not lookup.done():
            raise _Unreachable(f"{target.host} cannot be resolved: no response from the name server")
        return lookup.result()

    def _note(self, host: str, text: str) -> None:
        self.refused[host] = text[:_REFUSAL_CHARS]
        self.refused.move_to_end(host)
        if len(self.refused) > _REFUSALS:
            self.refused.popitem(last=False)

    # -- passing on

    async def _tunnel(self, client: SocketStream, upstream: SocketStream) -> None:
        """Copy bytes in both directions until both have ended."""
        try:
            async with asyncio.timeout(None) as timer, asyncio.TaskGroup() as directions:
                directions.create_task(self._copy(client, upstream, timer))
                directions.create_task(self._copy(upstream, client, timer))
        except* (OSError, ToolFailed):
            pass  # a side has gone, the connection was idle for too long, or a budget is used up

    async def _copy(self, source: SocketStream, sink: SocketStream, timer: asyncio.Timeout) -> None:
        while True:
            self._touch(timer)
            data = await source.read()
            if not data:
                break
            self._touch(timer)
            await sink.write(data)
        sink.end()

    def _touch(self, timer: asyncio.Timeout) -> None:
        """Restart the idle time; at most every tenth of it, because each restart costs a timer."""
        when = asyncio.get_running_loop().time() + self._deadlines.idle_s
        planned = timer.when()
        if not timer.expired() and (planned is None or when - planned > self._deadlines.idle_s / 10):
            timer.reschedule(when)

    async def _exchange(self, client: SocketStream, upstream: SocketStream, request: http.ProxyRequest) -> bytes:
        """Pass on one request and its response; return the answer for the client if the response is missing."""
        answer = b""
        try:
            async with asyncio.timeout(None) as timer, asyncio.TaskGroup() as directions:
                sending = directions.create_task(self._send_request(client, upstream, request, timer))
                await self._pass_response(client, upstream, request.method, timer)
                sending.cancel()
        except* _Unreachable as problems:
            answer = http.refusal("502 Bad Gateway", f"{request.target.host} {problems.exceptions[0]}")
        except* (OSError, EOFError, ToolFailed, http.InvalidHead):
            pass
        return answer

    async def _send_request(
        self, client: SocketStream, upstream: SocketStream, request: http.ProxyRequest, timer: asyncio.Timeout
    ) -> None:
        """Send the head and exactly the bytes of the body that it announced; raise EOFError if the client goes away."""
        await upstream.write(request.head)
        left, chunks = request.length, http.ChunkedBody()
        while left if left is not None else not chunks.done:
            self._touch(timer)
            data = await client.read()
            if not data:
                raise EOFError
            if left is None:
                data = chunks.feed(data)
            else:
                client.unread(data[left:])
                data = data[:left]
                left -= len(data)
            await upstream.write(data)
        if not await client.read():  # otherwise the client asks for more on a connection that will end
            raise EOFError

    async def _pass_response(
        self, client: SocketStream, upstream: SocketStream, method: str, timer: asyncio.Timeout
    ) -> None:
        status, length = 0, None
        for number in range(_INTERIM_RESPONSES):
            self._touch(timer)
            try:
                head = await upstream.read_until(_END_OF_HEAD, HEAD_BYTES)
                status, head, length = http.rewrite_response(head, method)
            except (OSError, EOFError, ValueError, http.InvalidHead) as error:
                raise (EOFError() if number else _Unreachable("did not answer with HTTP/1.1")) from error
            await client.write(head)
            if status >= 200:
                break
        while length is None or length:
            self._touch(timer)
            data = await upstream.read()
            if not data:
                break
            if length is not None:
                data = data[:length]
                length -= len(data)
            await client.write(data)
