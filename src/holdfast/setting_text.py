"""Values and types of settings, written for people."""

from __future__ import annotations

from typing import Any

__all__ = ["rule", "type_name", "written"]


def rule(kind: Any, value: object) -> str:
    """Return which values a setting of this annotated type takes, after one that it does not take."""
    base, meta = kind.__origin__, kind.__metadata__[0]
    if base in (int, float):
        bounds = f" from {meta.ge:g} to {meta.le}" if meta.le is not None else ""
        if not bounds:
            bounds = f" of at least {meta.ge:,}" if meta.ge is not None else f" above {meta.gt}"
        quoted = ", without quotes" if isinstance(value, str) and value.strip().isdecimal() else ""
        return f"use a {'whole' if base is int else 'finite'} number{bounds}{quoted}"
    if base is bool:
        return "use true or false"
    if base is str:
        return "use a text that is not empty" if value == "" else "use a text"
    if getattr(base, "__origin__", None) is tuple:
        return "use a list of texts"
    *first, last = base.__args__
    return f"choose {', '.join(first)} or {last}"


def written(value: object) -> str:
    """Return a value as ``holdfast.toml`` has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value == int(value):
        return str(int(value))
    if isinstance(value, tuple):
        return "[" + ", ".join(written(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def type_name(base: Any) -> str:
    """Return the type of a setting in plain English."""
    if base is str:
        return "text"
    if base is bool:
        return "true or false"
    if base is int:
        return "whole number"
    if base is float:
        return "number"
    if getattr(base, "__origin__", None) is tuple:
        return "list of texts"
    return "one of " + ", ".join(base.__args__)
