"""The Python reference, from `__all__`, signatures and docstrings, as Markdown."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator, Sequence
from types import ModuleType

import msgspec
from _text import plain

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
    return inspect.formatannotation(of).replace("typing.", "")


def fence(text: str) -> str:
    """Return a fenced block of Python."""
    return f"```python\n{text}\n```"


def class_page(name: str, cls: type) -> list[str]:
    """Return the lines for a class with its public methods and properties, in source order."""
    is_value = dataclasses.is_dataclass(cls) or issubclass(cls, msgspec.Struct)
    is_error = issubclass(cls, BaseException)
    out = [f"### {name}", ""]
    if not is_error:
        out += [fence(signature(f"class {name}", cls)), ""]
    out += [to_markdown(cls.__doc__ or ""), ""]
    for member, thing in vars(cls).items():
        if member.startswith("_") or (is_value and not callable(thing) and not isinstance(thing, property)):
            continue
        function = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
        if isinstance(function, property):
            text = inspect.getdoc(function)
            if text:
                out += [f"`{name}.{member}` (property): {one_paragraph(text)}", ""]
        elif inspect.isroutine(function) and inspect.getdoc(function):
            out += [fence(signature(f"{name}.{member}", function, method=True)), ""]
            out += [to_markdown(inspect.getdoc(function) or ""), ""]
    return out


def one_paragraph(docstring: str) -> str:
    """Return a docstring on one line."""
    return " ".join(plain(docstring).split())


def module_page(module: ModuleType) -> str:
    """Return the section for all names in a module's `__all__`."""
    out = [f"## `{module.__name__}`", "", to_markdown(module.__doc__ or ""), ""]
    for name in module.__all__:
        thing = getattr(module, name)
        if isinstance(thing, ModuleType):
            continue
        if isinstance(thing, type):
            out += class_page(name, thing)
        elif inspect.isroutine(thing):
            out += [f"### {name}", "", fence(signature(name, thing)), "", to_markdown(inspect.getdoc(thing) or ""), ""]
        else:
            out += [f"### {name}", "", f"```text\n{constant(name, thing)}\n```", ""]
    return "\n".join(out)


def constant(name: str, thing: object) -> str:
    """Return a value or type alias as code, truncated if it is long."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(thing).replace("typing.", ""))
    if isinstance(thing, frozenset):
        text = "frozenset(" + repr(sorted(thing)) + ")"
    return f"{name} = {text if len(text) <= 400 else text[:400] + ' …'}"
