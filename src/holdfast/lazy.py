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
    package: str, names_of: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` for a package whose names are loaded on first use.

    Parameters:
        package: name of the package, which is ``__name__`` in its ``__init__.py``.
        names_of: public names of the package, by the relative name of the module that defines them.
    """
    module_of = {name: module for module, names in names_of.items() for name in names}

    def load(name: str) -> Any:
        module = module_of.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{module}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return load, list_names
