"""Names that a person may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

__all__ = ["close_names"]

_CLOSE = 0.75
"""Least similarity of a suggested name, so that it differs from what was typed by a slip, not by half its letters."""


def close_names(name: str, names: Sequence[str]) -> list[str]:
    """Return those of `names` that differ from `name` by no more than a slip, the most similar first."""
    swapped = [one for one in names if one != name and sorted(one) == sorted(name)]  # such as "aks" for "ask"
    return list(dict.fromkeys((*swapped, *difflib.get_close_matches(name, names, cutoff=_CLOSE))))
