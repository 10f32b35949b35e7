"""Tools: their schema, what fits it, and what cannot be one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
import pytest

from holdfast import Tool, ToolFailed, tool
from holdfast.agents import Call
from holdfast.agents.results import to_model_text, truncate
from holdfast.agents.schema import check_schema
from holdfast.agents.tool import as_tool, wants_call
from holdfast.errors import ConfigurationError, InvalidArguments


@dataclass
class Point:
    """A point."""

    x: int
    y: int = 0


class Line(msgspec.Struct):
    """Two points."""

    start: Point
    end: Point


@tool
def draw(
    call: Call, line: Line, colour: Literal["red", "blue"] = "red", *, width: float = 1, tags: tuple[str, ...] = ()
) -> str:
    """Draw a line.

    On the canvas.

    Parameters:
        line: where it begins
            and ends.
        colour, width: how it looks.

    Returns:
        What was drawn.
    """
    return f"{line} {colour} {width} {tags}"


def test_the_schema_comes_from_the_hints_and_the_docstring() -> None:
    schema = draw.parameters
    assert draw.name == "draw"
    assert draw.description == "Draw a line.\n\nOn the canvas."
    assert draw.takes_call
    assert list(schema["properties"]) == ["line", "colour", "width", "tags"]
    assert schema["required"] == ["line"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["line"]["description"] == "where it begins and ends."
    assert schema["properties"]["colour"]["enum"] == ["red", "blue"] or "blue" in str(schema["properties"]["colour"])
    assert schema["properties"]["width"]["description"] == "how it looks."
    assert set(schema["$defs"]) == {"Line", "Point"}
    assert "title" not in schema


def test_arguments_are_made_what_the_function_wants() -> None:
    values = draw.check({"line": {"start": {"x": "1"}, "end": {"x": 2, "y": 3}}, "width": "2.5"})
    assert values["line"] == Line(start=Point(1), end=Point(2, 3))
    assert (values["colour"], values["width"]) == ("red", 2.5)
    assert "tags" not in values, "its default is the function's own"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "missing required field `line`"),
        ({"line": 3}, r"Expected `object`, got `int` - at `\$.line`"),
        ({"line": {"start": {"x": 1}, "end": {"x": 1}}, "colour": "green"}, "green"),
        ({"line": {"start": {"x": 1}, "end": {"x": 1}}, "size": 1}, "unknown field `size`"),
        ([], "not a JSON object"),
        ("text", "not a JSON object"),
    ],
)
def test_what_does_not_fit_is_told_so_that_a_model_can_use_it(arguments: Any, text: str) -> None:
    with pytest.raises(InvalidArguments, match=text):
        draw.check(arguments)


FOREIGN = {
    "type": "object",
    "properties": {
        "name": {"type": ["string", "null"]},
        "sizes": {"type": "array", "items": {"type": "integer"}},
        "mode": {"enum": ["a", "b"]},
        "more": {"type": "object", "properties": {"deep": {"type": "boolean"}}, "additionalProperties": False},
        "odd": {"$ref": "#/nowhere"},
    },
    "required": ["name"],
}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "the parameter 'name' is missing"),
        ({"name": 3}, "expected string or null, got integer at name"),
        ({"name": None, "sizes": [1, 2.5]}, r"expected integer, got number at sizes\[1\]"),
        ({"name": "x", "sizes": [True]}, "got boolean"),
        ({"name": "x", "mode": "c"}, "'c' is not one of"),
        ({"name": "x", "more": {"deep": 1}}, "expected boolean, got integer at more.deep"),
        ({"name": "x", "more": {"other": 1}}, "unknown parameter 'other' at more"),
    ],
)
def test_a_foreign_schema_is_held_against_its_plain_rules(arguments: Any, text: str) -> None:
    foreign = Tool(name="foreign", description="", parameters=FOREIGN, work=dict)
    with pytest.raises(InvalidArguments, match=text):
        foreign.check(arguments)


def test_what_fits_a_foreign_schema_is_passed_as_it_is() -> None:
    foreign = Tool(name="foreign", description="", parameters=FOREIGN, work=dict)
    arguments = {"name": "x", "sizes": [1, 2.0], "mode": "a", "more": {"deep": True}, "odd": object, "unknown": 1}
    assert foreign.check(arguments) == arguments


def test_what_cannot_be_a_tool_is_told_with_what_to_do() -> None:
    def starred(*values: int) -> None: ...

    def unknown(value: NoSuchType) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    def unschemed(value: complex | Tool) -> None: ...

    for function, text in (
        (starred, "cannot pass by name"),
        (unknown, "cannot be read"),
        (unschemed, "without a JSON Schema"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            tool(function)
    with pytest.raises(ConfigurationError, match="invalid tool name"):
        tool(name="bad name")(lambda: None)
    for timeout_s in (float("nan"), -1, "5"):
        with pytest.raises(ConfigurationError, match=f"invalid timeout_s of the tool 'x': {timeout_s!r}"):
            tool(name="x", timeout_s=timeout_s)(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"unknown isolation 'vm' .* \(choose auto, loop, thread, process\)"):
        Tool(name="x", description="", parameters={"type": "object"}, work=print, isolation="vm")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="must be the JSON Schema of an object"):
        Tool(name="x", description="", parameters={"type": "string"}, work=dict)
    with pytest.raises(ConfigurationError, match="is not a tool"):
        as_tool(Point)


def test_methods_and_partials_are_tools_too() -> None:
    class Box:
        def fetch(self, call: Call, name: str) -> str:
            """Fetch it."""
            return name

    method = tool(Box().fetch)
    assert (method.name, method.takes_call, list(method.parameters["properties"])) == ("fetch", True, ["name"])
    assert wants_call(partial(Box.fetch, Box()))
    assert not wants_call(partial(draw.work, None))


def test_a_rule_of_approval_sees_the_arguments() -> None:
    @tool(approval=lambda arguments: arguments["path"].startswith("/"))
    def delete(path: str) -> None: ...

    assert delete.needs_approval({"path": "/etc"})
    assert not delete.needs_approval({"path": "x"})


def test_a_long_text_keeps_its_beginning_and_end() -> None:
    text = truncate("a" * 600 + "é" * 600, 1000)
    assert text.startswith("aaa")
    assert text.endswith("ééé")
    assert "characters left out" in text
    assert len(text.encode()) < 1200
    assert truncate("short", 1000) == "short"
    assert to_model_text({"a": "\ud800"}, limit_bytes=1000) == {"a": "\\ud800"}
    with pytest.raises(ToolFailed, match="cannot be shown"):
        circle: list[Any] = []
        circle.append(circle)
        to_model_text(circle, limit_bytes=1000)


@pytest.mark.parametrize(
    ("schema", "value", "fits"),
    [
        ({"properties": {"a": True}}, {"a": 1}, True),
        ({"properties": {"a": False}}, {"a": 1}, False),
        ({"properties": {"a": False}}, {}, True),
        ({"items": False}, [1], False),
        ({"items": True}, [1], True),
    ],
)
def test_a_schema_that_is_only_true_or_false_allows_anything_or_nothing(schema: Any, value: Any, fits: bool) -> None:
    if fits:
        check_schema(value, schema)
    else:
        with pytest.raises(InvalidArguments, match="nothing may be given"):
            check_schema(value, schema)
