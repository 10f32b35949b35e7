"""``holdfast chat`` without its server: what is typed is answered at once, and nothing runs later than expected."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.cli.chat_connection import PATIENCE_S, ChatConnection
from holdfast.cli.chat_view import ChatView
from holdfast.errors import ServerUnreachable
from holdfast.protocol.messages import Receipt
from holdfast.testing import run_virtual
from tests.cli.processes import LIMIT_S, Served, Terminal, served, shows, start, start_on_own_port, terminal

CTRL_C, UP = "\x03", "\x1b[A"


class Gate:
    """A TCP proxy before a server. While it is closed, it keeps messages; all else passes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open = threading.Event()
        self._open.set()
        self.has_message = threading.Event()
        """A message has come to the closed gate."""
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.url = f"http://127.0.0.1:{self._sockets[0].getsockname()[1]}"
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        """Keep the messages that come from now on."""
        self.has_message.clear()
        self._open.clear()

    def open(self) -> None:
        """Let the messages pass."""
        self._open.set()

    def end(self) -> None:
        """Cut all connections, and take no more."""
        self.open()
        end_connections(*self._sockets)
        for thread in self._threads:  # the first one starts the others
            thread.join(LIMIT_S)
        for one in self._sockets:
            one.close()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self._sockets[0].accept()
                self._sockets.append(here)
                try:
                    there = socket.create_connection(("127.0.0.1", self._port))
                except ConnectionRefusedError:
                    end_connections(here)
                    continue
                self._sockets.append(there)
                self._start(self._copy, here, there)
                self._start(self._copy, there, here)

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if data.startswith(b"POST ") and b"/messages" in data:
                    self.has_message.set()
                    self._open.wait(LIMIT_S)
                sink.sendall(data)
        end_connections(source, sink)


def end_connections(*sockets: socket.socket) -> None:
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


@contextmanager
def gate_before(server: Served) -> Iterator[Gate]:
    """A gate until the end of the block."""
    gate = Gate(int(server.url.rpartition(":")[2]))
    try:
        yield gate
    finally:
        gate.end()


def kill(server: Served) -> None:
    server.process.kill()
    server.process.communicate(timeout=LIMIT_S)


def started_again(server: Served) -> Served:
    return start(server.folder, "--port", server.url.rpartition(":")[2])


def said(server: Served, session: str) -> list[str]:
    """What the session was sent."""
    lines = server.run("export", "-s", session, "--events", "--json").stdout.splitlines()
    return [event["content"] for line in lines if (event := json.loads(line))["kind"] == "message.accepted"]


def shows_all(*texts: str) -> Callable[[list[str]], bool]:
    return lambda lines: all(shows(text)(lines) for text in texts)


def type_while_held(screen: Terminal, gate: Gate, first: str, behind: str) -> None:
    """Type a message that the gate holds, and one that waits behind it."""
    gate.close()
    screen.type(f"{first}\r")
    assert gate.has_message.wait(LIMIT_S)  # the chat is sending it now
    screen.type(f"{behind}\r")
    screen.until(shows(f"> {behind}"))


def test_what_is_typed_while_the_server_is_away_is_answered_at_once_and_never_runs(tmp_path: Path) -> None:
    server = start_on_own_port(tmp_path)
    with terminal("chat", folder=tmp_path, HOLDFAST_URL=server.url) as screen:
        screen.prompt()
        screen.type("count a b\r")
        screen.expect("2 words.")
        kill(server)
        screen.expect("disconnected: http://127.0.0.1:")
        screen.type("count a b c\r")
        screen.expect("not connected; the message was not sent: press Up to get it again")
        for command in ("/tree", "/stop", "/new other", "/interrupt now"):
            screen.type(f"{command}\r")
            screen.expect(f"not connected; {command.split()[0]} was not carried out")
        screen.type("/help\r")
        screen.expect("list the commands")
        screen.type("/show\r")
        screen.expect("count_words: ok")
        screen.type(CTRL_C)
        screen.expect("not connected; nothing can be interrupted")
        screen.type("/clear\r")
        screen.expect("not connected; this is still session main")
        assert screen.raw.count(b"disconnected:") == 1
        server = started_again(server)
        screen.expect("reconnected")
        screen.type(UP * 8)
        screen.until(lambda lines: lines[-1] == "> count a b c")
        screen.type("\r")
        screen.expect("3 words.")
        screen.type("/quit\r")
        assert "session main idle" not in screen.expect("bye"), "the command is not carried out later"
        assert screen.end() == 0
        assert screen.raw.count(b"reconnected") == 1
    assert said(server, "main") == ["count a b", "count a b c"]
    assert server.end() == 0


def test_a_message_on_its_way_is_delivered_once_when_the_server_is_back(tmp_path: Path) -> None:
    server = start_on_own_port(tmp_path)
    with gate_before(server) as gate, terminal("chat", folder=tmp_path, HOLDFAST_URL=gate.url) as screen:
        screen.prompt()
        type_while_held(screen, gate, "count x y z", "behind")
        kill(server)
        screen.expect("disconnected:")
        screen.until(shows_all("not connected; not sent: behind", "not delivered yet; still trying (Ctrl-C gives up)"))
        gate.open()
        server = started_again(server)
        screen.expect("reconnected")
        screen.expect("3 words.")
        screen.type("/quit\r")
        assert screen.end() == 0
    assert said(server, "main") == ["count x y z"]
    assert server.end() == 0


def test_ctrl_c_gives_up_a_message_that_cannot_be_delivered(tmp_path: Path) -> None:
    server = start_on_own_port(tmp_path)
    with gate_before(server) as gate, terminal("chat", folder=tmp_path, HOLDFAST_URL=gate.url) as screen:
        screen.prompt()
        screen.type("count a b\r")
        screen.expect("2 words.")
        type_while_held(screen, gate, "count x y z", "behind")
        kill(server)
        screen.expect("not delivered yet; still trying (Ctrl-C gives up)")
        screen.type("more\r")
        screen.expect("not connected; not sent: more")
        screen.type(CTRL_C)
        screen.expect("gave up; the message may or may not have arrived")
        gate.open()
        server = started_again(server)
        screen.expect("reconnected")
        screen.type("count a\r")
        screen.expect("1 word.")
        screen.type("/quit\r")
        assert screen.end() == 0
    assert said(server, "main") == ["count a b", "count a"]
    assert server.end() == 0


def test_leaving_names_the_message_that_is_possibly_not_sent(tmp_path: Path) -> None:
    server = start_on_own_port(tmp_path)
    with gate_before(server) as gate, terminal("chat", folder=tmp_path, HOLDFAST_URL=gate.url) as screen:
        screen.prompt()
        gate.close()
        screen.type("is anybody there\r")
        assert gate.has_message.wait(LIMIT_S)  # the chat is sending it: had it learned of the loss before, it would not
        kill(server)
        screen.expect("disconnected:")
        screen.type("/exit\r")
        screen.expect("possibly not sent: is anybody there")
        assert screen.end() == 0


def test_ctrl_c_before_the_receipt_interrupts_the_run_as_soon_as_it_is_known(tmp_path: Path) -> None:
    with (
        served(tmp_path) as server,
        gate_before(server) as gate,
        terminal("chat", folder=tmp_path, HOLDFAST_URL=gate.url) as screen,
    ):
        screen.prompt()
        gate.close()
        screen.type("stream 100000\r")
        assert gate.has_message.wait(LIMIT_S)
        screen.type(CTRL_C)
        screen.expect("interrupting once the message is delivered")
        gate.open()
        screen.until(shows_all("interrupted: user, Ctrl-C", "gone after"))
        screen.type("/quit\r")
        assert screen.end() == 0


def test_ctrl_c_twice_before_the_receipt_gives_up_the_message_and_what_waits_behind_it(tmp_path: Path) -> None:
    with (
        served(tmp_path) as server,
        gate_before(server) as gate,
        terminal("chat", folder=tmp_path, HOLDFAST_URL=gate.url) as screen,
    ):
        screen.prompt()
        type_while_held(screen, gate, "count x y z", "behind")
        screen.type(CTRL_C)
        screen.expect("press Ctrl-C again to give it up")
        screen.type(CTRL_C)
        screen.expect("gave up; the message may or may not have arrived")
        screen.expect("not sent: behind")
        gate.open()
        screen.type("count a b\r")
        screen.expect("2 words.")
        screen.type("/quit\r")
        assert screen.end() == 0
        assert "behind" not in said(server, "main")


def test_a_terminal_without_history_is_asked_to_type_the_message_again(tmp_path: Path) -> None:
    server = start_on_own_port(tmp_path)
    with terminal("chat", folder=tmp_path, HOLDFAST_URL=server.url, TERM="dumb") as screen:
        screen.expect("> ")
        screen.type("count a b\n")
        screen.expect("2 words.")
        kill(server)
        screen.expect("disconnected:")
        screen.type("hello\n")
        screen.expect("not connected; the message was not sent: type it again once reconnected")
        screen.type("exit\n")
        assert screen.end() == 0


class Record(ChatView):
    """A display that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


def test_a_message_that_finds_no_server_is_given_up_in_the_end() -> None:
    async def unreachable() -> Receipt:
        raise ServerUnreachable("no answer")

    async def main() -> None:
        screen = Record()
        connection = ChatConnection(screen)
        began = asyncio.get_running_loop().time()

        async def deliver() -> bool:
            return await connection.deliver(unreachable) is not None

        delivery = asyncio.create_task(deliver())
        connection.begin(delivery)
        await connection.until_free()
        assert (connection.is_lost, connection.is_delivering) == (True, True), "the person can type meanwhile"
        assert await delivery is False
        assert asyncio.get_running_loop().time() - began == PATIENCE_S
        assert not connection.is_lost, "the next message finds out"
        assert screen.lines == [
            "disconnected: no answer; reconnecting …",
            "not delivered yet; still trying (Ctrl-C gives up)",
            "gave up; the message may or may not have arrived",
        ]

    run_virtual(main())


def test_a_line_waits_for_the_message_before_it_through_a_loss_that_has_passed() -> None:
    async def main() -> None:
        connection = ChatConnection(Record())
        answered = asyncio.get_running_loop().create_future()

        async def delivering() -> bool:
            await answered
            return True

        connection.begin(asyncio.create_task(delivering()))
        next_line = asyncio.create_task(connection.until_free())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        connection.on_cut(ServerUnreachable("cut"))
        connection.on_back()
        await asyncio.sleep(1)
        assert not next_line.done()
        answered.set_result(None)
        assert await next_line is True

    run_virtual(main())
