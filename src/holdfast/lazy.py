"""Load the public names of a package on first use, so that importing the package is cheap."""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # importing it from typing would be most of the cost of ``import holdfast``
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, names_of: Mapping[str, tuple[str, ...]], *, elsewhere: tuple[str, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` for a package whose names are loaded on first use.

    Parameters:
        package: name of the package, which is ``__name__`` in its ``__init__.py``.
        names_of: public names of the package, by the relative name of the module that defines them.
        elsewhere: relative names of modules whose public names the package does not have; the error for such a name
            names the module that has it.
    """
    module_of = {name: module for module, names in names_of.items() for name in names}

    def load(name: str) -> Any:
        module = module_of.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_place(package, name, elsewhere)}")
        value = getattr(importlib.import_module(f"{package}.{module}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        found = vars(sys.modules[package])
        return sorted({*(name for name in found if name.startswith("__")), *found.get("__all__", ()), *module_of})

    return load, list_names


def _place(package: str, name: str, elsewhere: tuple[str, ...]) -> str:
    """Return which of the modules has a public name, as the end of an error message, or an empty string.

    No module is imported for a private name, nor for a submodule, which the import system looks up as a name first.
    """
    import importlib.util

    if name.startswith("_") or importlib.util.find_spec(f"{package}.{name}") is not None:
        return ""
    modules = [f"{package}.{module}" for module in elsewhere]
    found = next((module for module in modules if name in importlib.import_module(module).__all__), None)
    return f"; it is in {found!r}" if found else ""
