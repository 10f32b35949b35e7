"""The Python reference, from `__all__`, signatures and docstrings, as Markdown: a page for each module."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pprint
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

import msgspec
from _text import code, plain, table

import holdfast

PUBLIC_MODULES: Mapping[str, str] = {
    "holdfast.events": "the events of a session",
    "holdfast.errors": "every error",
    "holdfast.agents": "types for your own agents, tools and models: model messages, limits, branch results",
    "holdfast.integrations.langgraph": "LangGraph graphs as agents",
    "holdfast.integrations.reactive": "agents in reactive streams",
    "holdfast.tools": "the built-in tools",
    "holdfast.runtime": "interrupts and scopes, for use without a host",
    "holdfast.server": "the server, for use in your own application",
    "holdfast.storage": "the stores",
    "holdfast.channels": "the interface for connecting chat networks",
    "holdfast.testing": "tools for testing your agents and other concurrent code",
}
"""Modules that users import from, besides `holdfast` itself, with what each provides."""

DEFINING_MODULES = (
    "holdfast.host",
    "holdfast.client",
    "holdfast.settings",
    "holdfast.tools.assistant",
    "holdfast.protocol.session_api",
    "holdfast.protocol.messages",
    "holdfast.protocol.stopping",
    "holdfast.protocol.states",
    "holdfast.protocol.mailbox_policies",
    "holdfast.storage.port",
    "holdfast.storage.backend",
    "holdfast.failpoints",
    "holdfast.clock",
)
"""Modules that define the other classes and values which users meet."""

FOLDER = "reference/python"
CONSTANT_LENGTH = 1500
CONSTANT_WIDTH = 90
MODULE_PAGES = (*PUBLIC_MODULES, *DEFINING_MODULES)

STARS: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
SECTIONS = ("Parameters:", "Raises:", "Returns:", "Yields:", "Example:", "Invariants:")


def to_markdown(docstring: str) -> str:
    """Return a docstring with its sections as lists."""
    out: list[str] = []
    in_section = False
    for line in plain(docstring).splitlines():
        if line.strip() in SECTIONS and not line.startswith(" "):
            in_section = True
            out += ["", f"**{line.strip().rstrip(':')}**", ""]
        elif in_section and line.startswith("    ") and not line.startswith("     "):
            name, colon, rest = line.strip().partition(": ")
            quoted = ", ".join(f"`{part.strip().strip('`')}`" for part in name.split(",")) if colon else name
            out.append(f"- {quoted}: {rest}" if colon else f"- {name}")
        elif in_section and line.startswith("     "):
            out.append(f"  {line.strip()}")
        else:
            in_section = in_section and not line.strip()
            out.append(line)
    return "\n".join(out).strip()


def signature(name: str, thing: object, *, method: bool = False) -> str:
    """Return the signature as code, one parameter per line if it is long."""
    prefix = "async " if inspect.iscoroutinefunction(thing) or inspect.isasyncgenfunction(thing) else ""
    try:
        parsed = inspect.signature(thing)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return prefix + name
    parameters = list(parsed.parameters.values())
    if method and parameters and parameters[0].name in ("self", "cls"):
        del parameters[0]
    written = list(written_parameters(parameters))
    tail = ""
    if not isinstance(thing, type) and parsed.return_annotation is not inspect.Signature.empty:
        tail = f" -> {annotation(parsed.return_annotation)}"
    one_line = f"{prefix}{name}({', '.join(written)}){tail}"
    if len(one_line) <= 100:
        return one_line
    inner = "".join(f"    {parameter},\n" for parameter in written)
    return f"{prefix}{name}(\n{inner}){tail}"


def written_parameters(parameters: Sequence[inspect.Parameter]) -> Iterator[str]:
    """Yield the parameters as written in a definition."""
    starred = False
    for number, parameter in enumerate(parameters):
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        text = STARS.get(parameter.kind, "") + parameter.name
        starred = starred or parameter.kind is parameter.VAR_POSITIONAL
        if parameter.annotation is not parameter.empty:
            text += f": {annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            spaced = " = " if parameter.annotation is not parameter.empty else "="
            text += spaced + re.sub(r"<([^<>]*)>", "...", repr(parameter.default))
        yield text
        after = parameters[number + 1 : number + 2]
        if parameter.kind is parameter.POSITIONAL_ONLY and (not after or after[0].kind is not parameter.kind):
            yield "/"


def annotation(of: object) -> str:
    """Return a type as source code."""
    if isinstance(of, str):
        return of.replace('"', "").replace("'", "") if "Literal" not in of else of
    if typing.get_origin(of) is typing.Annotated:
        of = typing.get_args(of)[0]
    written = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", inspect.formatannotation(of))
    return written.replace("typing.", "")


def fence(text: str) -> str:
    """Return a fenced block of Python."""
    return f"```python\n{text}\n```"


def class_section(name: str, cls: type) -> list[str]:
    """Return the lines for a class with its public methods and properties, in source order."""
    is_value = dataclasses.is_dataclass(cls) or issubclass(cls, msgspec.Struct)
    is_error = issubclass(cls, BaseException)
    out = [f"## {name}", ""]
    if not is_error:
        out += [fence(signature(f"class {name}", cls)), ""]
    out += [to_markdown(cls.__doc__ or ""), ""]
    for member, thing in vars(cls).items():
        if member.startswith("_") or (is_value and not callable(thing) and not isinstance(thing, property)):
            continue
        function = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
        documented = inspect.getdoc(function) if isinstance(function, property) or inspect.isroutine(function) else None
        if documented is None:
            continue
        if isinstance(function, property):
            out += [f"### {name}.{member}", "", f"Property: {one_paragraph(documented)}", ""]
        else:
            out += [f"### {name}.{member}", "", fence(signature(f"{name}.{member}", function, method=True)), ""]
            out += [to_markdown(documented), ""]
    return out


def one_paragraph(docstring: str) -> str:
    """Return a docstring on one line."""
    return " ".join(plain(docstring).split())


def python_pages() -> dict[str, str]:
    """Return the page of each module, by file name. A name that several modules export is on the first one's page."""
    pages = {}
    written: dict[str, tuple[object, str]] = {}
    for module_name in MODULE_PAGES:
        module = importlib.import_module(module_name)
        out = [f"# `{module_name}`", "", to_markdown(module.__doc__ or ""), ""]
        elsewhere = []
        things = {name: getattr(module, name) for name in module.__all__}
        for name, thing in sorted(things.items(), key=lambda item: is_constant(item[1])):
            if isinstance(thing, ModuleType):
                continue
            first, home = written.setdefault(name, (thing, module_name))
            if home != module_name and first is thing:
                elsewhere.append((link(name, home), code(home)))
            else:
                out += section(name, thing)
        if elsewhere:
            out += ["## Also exported", "", table(("name", "described in"), elsewhere)]
        pages[f"{module_name}.md"] = "\n".join(out)
    return pages


def is_constant(thing: object) -> bool:
    """Return whether a page shows the value of a thing."""
    return not isinstance(thing, type) and not inspect.isroutine(thing)


def section(name: str, thing: object) -> list[str]:
    """Return the lines for a class, function or constant."""
    if isinstance(thing, type):
        return class_section(name, thing)
    if inspect.isroutine(thing):
        return [f"## {name}", "", fence(signature(name, thing)), "", to_markdown(inspect.getdoc(thing) or ""), ""]
    return [f"## {name}", "", f"```python\n{constant(name, thing)}\n```", ""]


def names_page() -> str:
    """Return the tables of modules and of the names that `holdfast` itself exports, with links to their pages."""
    modules = {name: importlib.import_module(name) for name in MODULE_PAGES}
    names = []
    for name in sorted(holdfast.__all__):
        homes = (home for home, module in modules.items() if getattr(module, name, None) is getattr(holdfast, name))
        home = next(home for home in homes if name in modules[home].__all__)
        names.append((link(name, home), code(home)))
    defining = ((link("", name), summary(modules[name])) for name in DEFINING_MODULES)
    return "\n".join(
        (
            table(("module", "provides"), ((link("", name), text) for name, text in PUBLIC_MODULES.items())),
            "Modules that are not in this table may change without notice. The package is typed.\n",
            "## Names of `holdfast`\n",
            table(("name", "described in"), names),
            "## Modules that define the rest\n",
            "The classes and values that you meet, but seldom import:\n",
            table(("module", "contents"), defining),
        )
    )


def link(name: str, module: str) -> str:
    """Return a link to a name on the page of its module, or to the page if the name is empty."""
    anchor = f"#{name.lower()}" if name else ""
    return f"[`{name or module}`](/{FOLDER}/{module}.md{anchor})"


def summary(module: ModuleType) -> str:
    """Return the first line of a module's docstring."""
    return plain(module.__doc__ or "").partition("\n")[0]


def constant(name: str, thing: object) -> str:
    """Return a value or type alias as code, truncated if it is long."""
    if isinstance(thing, frozenset):
        text = f"frozenset({sorted(thing)!r})"
    else:
        text = pprint.pformat(thing, sort_dicts=False)
    text = re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", text)
    text = re.sub(r" at 0x[0-9a-f]+|typing\.", "", text)
    text = re.sub(r"\bholdfast\.[a-z_.]+\.(?=[A-Z])|collections\.abc\.|contextlib\.", "", text)
    if "\n" not in text:
        return textwrap.fill(f"{name} = {text}", CONSTANT_WIDTH, break_long_words=False, subsequent_indent="    ")
    opening = re.match(r"\w*[\[({]", text)
    start = opening.end() if opening else 0
    body = " " * start + text[start:-1]
    if len(body) > CONSTANT_LENGTH:
        body = body[: body.rindex("\n", 0, CONSTANT_LENGTH)] + f"\n{' ' * start}# …"
    return f"{name} = {text[:start]}\n{textwrap.indent(textwrap.dedent(body), '    ')}\n{text[-1]}"
