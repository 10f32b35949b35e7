"""The parts of the reference that come from the HTTP table, the command line, the failpoints and the counters."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import pkgutil
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
from _text import code, fields_of, plain, table

import holdfast


def http_page() -> str:
    """Return every operation with its parameters, answers and refusals."""
    from holdfast.server.errors import status_of
    from holdfast.server.parameters import JsonBody
    from holdfast.server.routes import ROUTES

    rows = ((code(route.method), code(route.path), first_line(route.doc)) for route in ROUTES)
    out = [table(("method", "address", "what it does"), rows)]
    out += ["## Operations"]
    for route in ROUTES:
        out += ["", f"### `{route.method} {route.path}`", "", plain(route.doc), ""]
        if route.access == "admin":
            out += ["Needs an admin key.", ""]
        elif route.access == "public":
            out += ["Needs no key.", ""]
        if isinstance(route.body, JsonBody):
            optional, body = " (may be left out)" if route.body.optional else "", route.body.type
            out += [f"Body{optional}: {fields_of(body)}. {first_line(plain(body.__doc__ or ''))}", ""]
        elif route.body is not None:
            media_type = route.body if isinstance(route.body, str) else route.body.media_type
            out += [f"Body: {code(media_type)}.", ""]
        if route.query:
            queries = ((code(query.name), query.type, query.doc) for query in route.query)
            out += [table(("query", "type", "what it does"), queries)]
        answers = (f"{status}: {answer(kind)}" for status, kind in route.responses.items())
        out += ["Answers: " + "; ".join(answers) + ".", ""]
        if route.errors:
            out += ["Refusals: " + ", ".join(f"{code(e.code)} ({status_of(e)})" for e in route.errors) + ".", ""]
    return "\n".join(out)


def first_line(text: str) -> str:
    """Return the first line of a text."""
    return text.strip().partition("\n")[0]


def answer(kind: Any) -> str:
    """Return the answer type of an operation as text."""
    if isinstance(kind, str):
        return code(kind)
    if isinstance(kind, types.UnionType):
        return " or ".join(answer(member) for member in typing.get_args(kind))
    text = code(kind.__name__)
    return text + (f" with {fields_of(kind)}" if issubclass(kind, msgspec.Struct) else "")


def import_everything() -> None:
    """Import all modules but those for tests and proofs, so that their errors and failpoints are registered."""
    for module in pkgutil.walk_packages(holdfast.__path__, "holdfast."):
        if not module.name.startswith(("holdfast.__main__", "holdfast.testing.", "holdfast.proof.")):
            importlib.import_module(module.name)


def failpoints_page() -> str:
    """Return every failpoint, with one row per path."""
    from holdfast import failpoints

    import_everything()
    paths: dict[str, list[str]] = {}
    for name in failpoints.names():
        paths.setdefault(name.rpartition(".")[0], []).append(name)
    return table(("path", "failpoints"), ((code(path), ", ".join(map(code, names))) for path, names in paths.items()))


def counters_page() -> str:
    """Return the counter behind each promise."""
    from holdfast.host import PROMISES

    rows = ((code(number), name, kept, broken) for number, (name, kept, broken) in PROMISES.items())
    return table(("counter", "promise", "`kept` counts", "`broken` counts, and stays 0"), rows)


def counts_page() -> str:
    """Return all other counters of a host."""
    from holdfast.host import COUNTS

    return table(("name", "what it counts"), ((code(name), what) for name, what in COUNTS.items()))


def metrics_page() -> str:
    """Return every metric family of ``/metrics``."""
    from holdfast.host import HostStatistics
    from holdfast.server.metrics import render

    none = dict.fromkeys(HostStatistics.__struct_fields__, 0)
    empty = HostStatistics(**{**none, "node_id": "", "counts": {}, "promises": {}})  # type: ignore[arg-type]
    text = render(empty, streams=0, answers={})
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    rows = ((code(name), kinds[name], what) for name, what in re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    return table(("metric", "kind", "what it counts"), rows)


def cli_page() -> str:
    """Return every command with its arguments, options and an example, in the groups of the help."""
    import typer.main
    from typer.core import TyperGroup

    from holdfast.cli import app
    from holdfast.cli.commands import COMMANDS

    program = typer.main.get_command(app)
    assert isinstance(program, TyperGroup)
    out: list[str] = []
    for group in dict.fromkeys(spec.group for spec in COMMANDS.values()):
        specs = {name: spec for name, spec in COMMANDS.items() if spec.group == group}
        rows = ((code(f"holdfast {name}"), spec.summary) for name, spec in specs.items())
        out += [f"## {group}", "", table(("command", "what it does"), rows)]
        for name in specs:
            out += command_section(f"holdfast {name}", program.commands[name])
    return "\n".join(out)


def exits_page() -> str:
    """Return the exit codes with their meanings."""
    from holdfast.cli import exit_codes

    tree = ast.parse(inspect.getsource(exit_codes.Exit))
    definition = tree.body[0]
    assert isinstance(definition, ast.ClassDef)
    body = definition.body
    words = {}
    for before, after in itertools.pairwise(body):
        match before, after:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=text)):
                words[name] = str(text)
    return table(("exit code", "meaning"), ((code(member.value), words[member.name]) for member in exit_codes.Exit))


def command_section(path: str, command: Any) -> Iterator[str]:
    """Yield the sections of a command and its subcommands."""
    parameters = [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    usage = [path]
    usage += [f"<{p.name}>" if p.required else f"[{p.name}]" for p in parameters if p.param_type_name == "argument"]
    if any(p.param_type_name == "option" for p in parameters):
        usage.append("[options]")
    yield f"### `{path}`\n\n```text\n{' '.join(usage)}\n```\n\n{paragraphs(command.help or '')}\n"
    rows = []
    for parameter in parameters:
        names = ", ".join(parameter.opts + parameter.secondary_opts)
        shown = f"<{parameter.name}>" if parameter.param_type_name == "argument" else names
        default = parameter.default
        written = "" if default in (None, False, (), []) or callable(default) or parameter.required else code(default)
        rows.append((code(shown), " ".join((getattr(parameter, "help", "") or "").split()), written))
    if rows:
        yield table(("option", "what it does", "default"), rows)
    if command.epilog:
        yield f"Example:\n\n```sh\n{command.epilog}\n```\n"
    for name, below in getattr(command, "commands", {}).items():
        yield from command_section(f"{path} {name}", below)


def paragraphs(text: str) -> str:
    """Return a help text as Markdown."""
    return text.replace("<", "\\<").strip()
