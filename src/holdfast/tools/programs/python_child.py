"""The program that runs a script and forwards the script's tool calls to the host.

Any Python from 3.9 on can run this file, so it imports only the standard library. Descriptor 0 is a socket, over which
both sides send frames. A frame is a four-byte length and a JSON object with a ``kind``.

    to the script       ``script`` (source, tools, value_limit, frame_limit) first; ``result`` or ``error`` (id, …)
    from the script     ``hello`` first; ``use`` (id, tool, arguments); ``value`` (text, cut) at most once

- The script's standard input is empty, and programs that it starts do not inherit the socket.
- From the first call on, a separate thread reads the answers; calls may come from any thread of the script's process.
"""

from __future__ import annotations

import ast
import itertools
import json
import linecache
import os
import socket
import struct
import sys
import threading
import traceback
import types
from concurrent.futures import Future

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_NAME = "<script>"


class ToolFailed(Exception):
    """A tool call failed; the text gives the reason."""


class ScriptLink:
    """The script's side of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._input = connection.makefile("rb")
        self._sending = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._reader: threading.Thread | None = None
        self._pid = os.getpid()
        self.frame_limit = 1 << 20

    def send(self, frame: dict[str, Any]) -> None:
        """Send one complete frame."""
        data = json.dumps(frame, ensure_ascii=False, allow_nan=False).encode()
        if len(data) > self.frame_limit:
            raise ToolFailed(f"the arguments take {len(data):,} bytes (limit: {self.frame_limit:,}); use a file")
        with self._sending:
            self._connection.sendall(struct.pack("!I", len(data)) + data)

    def receive(self) -> dict[str, Any] | None:
        """Return the next frame, or None when the host has closed the socket."""
        head = self._input.read(4)
        if len(head) < 4:
            return None
        data = self._input.read(struct.unpack("!I", head)[0])
        frame: dict[str, Any] = json.loads(data)
        return frame

    def use(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Call a tool of the agent and wait for the result."""
        if os.getpid() != self._pid:
            raise RuntimeError("tools can be called only in the script's own process, not in a forked one")
        number = next(self._numbers)
        answer: Future[Any] = Future()
        self._waiting[number] = answer
        try:
            self.send({"kind": "use", "id": number, "tool": tool, "arguments": arguments})
            with self._sending:
                if self._reader is None:
                    self._reader = threading.Thread(target=self._read, name="answers of tools", daemon=True)
                    self._reader.start()
            return answer.result()
        finally:
            del self._waiting[number]

    def _read(self) -> None:
        while (frame := self.receive()) is not None:
            answer = self._waiting.get(frame["id"])
            if answer is None:
                continue
            if frame["kind"] == "result":
                answer.set_result(frame["value"])
            else:
                answer.set_exception(ToolFailed(frame["text"]))
        for answer in list(self._waiting.values()):
            answer.set_exception(ToolFailed("the host has closed the connection"))


def main() -> None:
    """Run the script that the host sends."""
    link = ScriptLink(socket.socket(fileno=os.dup(0)))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    link.send({"kind": "hello"})
    order = link.receive()
    if order is None:
        sys.exit(1)
    link.frame_limit = order["frame_limit"]
    sys.path.insert(0, os.getcwd())
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.modules["holdfast_tools"] = tools = _tools(link, order["tools"])
    module.__dict__.update(tools=tools, __builtins__=__builtins__)
    try:
        value = _run(order["source"], module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        _tell(error)
        sys.exit(1)
    if value is not None:
        text = _text(value)
        link.send({"kind": "value", "text": text[: order["value_limit"]], "cut": len(text) > order["value_limit"]})


def _tools(link: ScriptLink, offered: list[dict[str, Any]]) -> types.ModuleType:
    module = types.ModuleType("holdfast_tools", "The tools of the agent that wrote this script.")
    names = []
    for tool in offered:
        function = _function(link, tool["name"], tool["parameters"])
        function.__name__ = function.__qualname__ = tool["name"].replace("-", "_")
        function.__doc__ = tool["description"]
        names.append(function.__name__)
        setattr(module, function.__name__, function)
    module.__dict__.update(ToolFailed=ToolFailed, __all__=[*names, "ToolFailed"])
    return module


def _function(link: ScriptLink, tool: str, parameters: list[str]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(parameters):
            raise TypeError(f"{tool}() takes {len(parameters)} arguments: {', '.join(parameters)}")
        given = dict(zip(parameters, args))  # noqa: B905 - no strict= before 3.10
        if twice := given.keys() & kwargs.keys():
            raise TypeError(f"{tool}() got two values for {', '.join(sorted(twice))}")
        return link.use(tool, {**given, **kwargs})

    return function


def _run(source: str, namespace: dict[str, Any]) -> Any:
    """Run the script and return its value.

    The value is that of the last statement if this is an expression whose value is not None. Otherwise, it is the
    variable ``result``, or None if the script does not set it.
    """
    linecache.cache[_NAME] = (len(source), None, source.splitlines(keepends=True), _NAME)
    tree: ast.Module = compile(source, _NAME, "exec", ast.PyCF_ONLY_AST)  # type: ignore[assignment]
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, _NAME, "exec"), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), _NAME, "eval"), namespace)
        if value is not None:
            return value
    return namespace.get("result")


def _text(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text.encode("utf-8", "backslashreplace").decode()


def _tell(error: BaseException) -> None:
    """Print the error without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


if __name__ == "__main__":
    main()
