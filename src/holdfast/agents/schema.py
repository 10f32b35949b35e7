"""The JSON Schema of a function's parameters, and the validation of a model's arguments."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Annotated, Any

import msgspec

from holdfast.errors import ConfigurationError, InvalidArguments

__all__ = ["Signature", "check_schema", "read_signature"]

_SIMPLE = (str, int, float, bool, type(None))
_SECTIONS = re.compile(r"^(Parameters|Args|Arguments):\s*$")
_ENTRY = re.compile(r"^(\s+)([\w, *]+?)\s*(?:\([^)]*\))?:\s*(.*)$")
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


class Signature:
    """The parameters of a function: their JSON Schema for the model, and their types.

    Parameters:
        shape: Struct type with the function's parameters as fields.
        parameters: JSON Schema of `shape`.
    """

    __slots__ = ("_shape", "parameters")

    def __init__(self, shape: type[msgspec.Struct], parameters: dict[str, Any]) -> None:
        self._shape = shape
        self.parameters = parameters

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the arguments to the types of the function's parameters and return the keyword arguments.

        Raises:
            InvalidArguments: if the arguments do not match the parameters.
        """
        try:
            fitted = msgspec.convert(dict(arguments), self._shape, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidArguments(str(error)) from None
        values = ((name, getattr(fitted, name)) for name in self._shape.__struct_fields__)
        return {name: value for name, value in values if value is not msgspec.UNSET}


def read_signature(function: Callable[..., Any], *, skip: int) -> Signature:
    """Return the signature of a function without its first `skip` parameters.

    Raises `ConfigurationError` for a function that a model cannot call.
    """
    label = getattr(function, "__qualname__", repr(function))
    described = _descriptions(inspect.getdoc(function) or "")
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter in list(inspect.signature(function).parameters.values())[skip:]:
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise ConfigurationError(
                f"the tool {label} takes {parameter}, which a model cannot pass by name",
                hint="declare each parameter by name, or create the tool with Tool(parameters=...)",
            )
        hint = _hint(function, parameter)
        if parameter.name in described:
            hint = Annotated[hint, msgspec.Meta(description=described[parameter.name])]
        default = parameter.default
        if default is parameter.empty:
            fields.append((parameter.name, hint))
        elif isinstance(default, _SIMPLE):
            fields.append((parameter.name, hint, default))
        else:
            fields.append((parameter.name, hint | msgspec.UnsetType, msgspec.UNSET))
    try:
        shape = msgspec.defstruct("arguments", fields, kw_only=True, forbid_unknown_fields=True)
        (_,), parts = msgspec.json.schema_components([shape], ref_template="#/$defs/{name}")
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the tool {label} has a parameter without a JSON Schema: {error}",
            hint="use str, int, float, bool, list, dict, Literal, dataclasses or msgspec Structs as type hints",
        ) from None
    schema = dict(parts.pop("arguments"))
    schema.pop("title", None)
    if parts:
        schema["$defs"] = parts
    return Signature(shape, schema)


def _hint(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the type of one parameter, without resolving the hints of the other parameters, which may be invalid."""
    if parameter.annotation is parameter.empty:
        return Any
    target = inspect.unwrap(function)
    holder = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    names = inspect.getclosurevars(target).nonlocals if inspect.isfunction(target) else {}
    try:
        hints = typing.get_type_hints(holder, getattr(target, "__globals__", {}), dict(names), include_extras=True)
    except Exception as error:
        raise ConfigurationError(
            f"the type hint of the parameter {parameter.name!r} cannot be read: {error}",
            hint="import the type at the top of the module, not under TYPE_CHECKING",
        ) from None
    return hints[parameter.name]


def _descriptions(doc: str) -> dict[str, str]:
    """Return the descriptions of the parameters in the docstring, by name."""
    found: dict[str, str] = {}
    names: list[str] = []
    inside, indent = False, ""
    for line in doc.splitlines():
        if _SECTIONS.match(line):
            inside, indent = True, ""
        elif inside and line.strip() and not line[0].isspace():
            inside = False
        elif inside and (entry := _ENTRY.match(line)) and entry[1] == (indent := indent or entry[1]):
            names = [name.strip(" *") for name in entry[2].split(",")]
            found |= dict.fromkeys(names, entry[3].strip())
        elif inside and line.strip():
            found |= {name: f"{found[name]} {line.strip()}".strip() for name in names}
    return {name: text for name, text in found.items() if text}


def check_schema(value: Any, schema: Mapping[str, Any] | bool, where: str = "") -> None:
    """Raise `InvalidArguments` if the value breaks the basic rules of an external schema.

    The basic rules are types, required and unknown properties, enumerations and items. The owner of the schema checks
    all other rules.
    """
    at = f" at {where}" if where else ""
    if isinstance(schema, bool):  # a boolean schema accepts everything or nothing
        if not schema:
            raise InvalidArguments(f"nothing may be given{at}")
        return
    allowed = schema.get("type")
    names = [allowed] if isinstance(allowed, str) else allowed if isinstance(allowed, list) else []
    known = [name for name in names if name in _TYPES]
    if known and not any(_is(value, name) for name in known):
        raise InvalidArguments(f"expected {' or '.join(known)}, got {_named(value)}{at}")
    if "enum" in schema and value not in schema["enum"]:
        raise InvalidArguments(f"{value!r} is not one of {schema['enum']}{at}")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name not in value:
                raise InvalidArguments(f"the parameter {name!r} is missing{at}")
        for name, item in value.items():
            if name in properties:
                check_schema(item, properties[name], f"{where}.{name}" if where else str(name))
            elif schema.get("additionalProperties") is False:
                raise InvalidArguments(f"unknown parameter {name!r}{at}")
    elif isinstance(value, list) and isinstance(schema.get("items"), (dict, bool)):
        for number, item in enumerate(value):
            check_schema(item, schema["items"], f"{where}[{number}]")


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if isinstance(value, float) and name == "integer":
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _named(value: Any) -> str:
    return next((name for name in _TYPES if _is(value, name)), type(value).__name__)
