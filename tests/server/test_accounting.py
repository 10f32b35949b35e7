"""Nothing goes around the accounting: bodies in and out pass `Delivery`, and what grows in memory has a bound."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import holdfast.server

FOLDER = Path(holdfast.server.__file__).parent

RAW = {
    ("delivery.py", "put"),
    ("exchange.py", "_read"),
    ("exchange.py", "send_answer"),
    ("exchange.py", "send_refusal"),
    ("app.py", "_preflight"),
    ("app.py", "_small_body"),
    ("sse.py", "_watch"),
    ("sse.py", "serve_sse"),
}
"""Where ASGI is spoken. Elsewhere answers are returned, or written by `Exchange`, and bodies are read by it.

`send_answer` and `send_refusal` write what is small: `Exchange.answer` charges the others before."""

COLLECTIONS = {
    "app.py _Node.children": "the table of operations",
    "app.py _Node.methods": "the table of operations",
    "app.py App.answers": "statuses of HTTP",
    "delivery.py Delivery._charges": "charges themselves",
    "native.py Native._waiting": "requests, so connections",
    "sse.py Streams._tasks": "budget streams",
    "stops.py Stops._open": "budget stops",
    "stops.py Stops._done": "1,000 of each principal, 10,000 principals",
    "operations.py Table.operations": "the table of operations",
}
"""Collections that live as long as the server, and what bounds them."""

_CALLS = frozenset(("send", "_send", "receive", "stream", "body"))
_OWNERS = ("request.", "exchange.receive", "exchange.send", "exchange._send", "self.receive", "self.send", "self._send")
_MAKERS = frozenset(("dict", "set", "list", "deque", "OrderedDict", "Counter", "defaultdict"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def raw_calls(source: str) -> set[str]:
    """Functions that await ASGI's own callables, or a body by Starlette."""
    found = set()
    for function in functions(ast.parse(source)):
        for node in ast.walk(function):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            of = ast.unparse(node.func)
            if name in _CALLS and (of in ("send", "receive") or of.startswith(_OWNERS)):
                found.add(function.name)
    return found


def collections(name: str, source: str) -> set[str]:
    """Attributes that objects begin with as an empty collection."""
    found = set()
    for made in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
        for function in (one for one in made.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"):
            for node in ast.walk(function):
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                value = getattr(node, "value", None)
                if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(targets[0], ast.Attribute):
                    continue
                empty = isinstance(value, ast.Dict | ast.List | ast.Set) or (
                    isinstance(value, ast.Call) and getattr(value.func, "id", "") in _MAKERS
                )
                if empty:
                    found.add(f"{name} {made.name}.{targets[0].attr}")
    return found


def test_no_body_goes_around_the_accounting() -> None:
    for file in sorted(FOLDER.glob("*.py")):
        around = {(file.name, name) for name in raw_calls(file.read_text())} - RAW
        assert not around, f"{around}: write by Exchange.answer or Exchange.write, read by Exchange.body"


def test_a_body_around_the_accounting_is_found() -> None:
    planted = """
async def give_all(native, exchange):
    await exchange.send({"type": "http.response.body", "body": b"x" * 10**9})

async def take_all(exchange):
    while (await exchange.receive()).get("more_body"):
        pass
"""
    assert raw_calls(planted) == {"give_all", "take_all"}


def test_each_collection_of_the_server_has_a_bound() -> None:
    found = {one for file in sorted(FOLDER.glob("*.py")) for one in collections(file.name, file.read_text())}
    unknown = {one for one in found if one not in COLLECTIONS and one.split()[0] not in BOUNDED_FILES}
    assert not unknown, f"say in COLLECTIONS what bounds {sorted(unknown)}"


BOUNDED_FILES = {
    "connections.py": "budget connections",
    "joining.py": "one connection, 16 requests",
    "credentials.py": "requests, so connections",
    "auth.py": "keys, which operators make",
    "tokens.py": "keys of the identity provider",
}


def test_a_collection_without_a_bound_is_found() -> None:
    planted = "class Cache:\n    def __init__(self):\n        self._answers: dict[str, bytes] = {}\n"
    assert collections("cache.py", planted) == {"cache.py Cache._answers"}
