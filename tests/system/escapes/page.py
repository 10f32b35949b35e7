"""The docs' table of escapes: per wall and user, how many of how many got through, and which."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence

from tests.system.escapes.catalog import ESCAPES
from tests.system.escapes.escape import Escape
from tests.system.escapes.runner import Finding, findings
from tests.system.escapes.walls import WALLS, Wall

__all__ = ["Tried", "measure", "tried_page"]

Tried = Mapping[Wall, Mapping[str, Finding] | str]
"""The findings of each wall, or why it was not tried."""


def measure(progress: Callable[[str], object], walls: Sequence[Wall] = WALLS) -> dict[Wall, dict[str, Finding] | str]:
    """Run all escapes against each wall, and without one."""
    made: dict[Wall, dict[str, Finding] | str] = {}
    for wall in (Wall("none", "root"), Wall("none", "user"), *walls):
        progress(f"{wall} …")
        made[wall] = wall.missing or findings(wall, ESCAPES)
    return made


def tried_page(made: Tried, table: Callable[..., str], escapes: Sequence[Escape] = ESCAPES) -> str:
    """Return the tables: of each wall, of what got through, and of each class.

    Parameters:
        made: as `measure` returned it.
        table: makes a table of a head and rows.
    """
    applicable = {wall.user: through(found) for wall, found in made.items() if wall.name == "none"}
    by_name = {escape.name: escape for escape in escapes}
    rows, holes = [], []
    for wall, found in made.items():
        if wall.name == "none":
            continue
        if isinstance(found, str):
            rows.append((wall.name, wall.user, "not run", "", found))
            continue
        tried = applicable.get(wall.user, set()) & {name for name, one in found.items() if one.began}
        known = sorted(name for name in tried & through(found) if by_name[name].reason(wall))
        open_ = sorted(name for name in tried & through(found) if not by_name[name].reason(wall))
        listed = ", ".join(f"**{name}**" for name in open_) or "none"
        rows.append((wall.name, wall.user, f"{len(tried):,}", f"{len(known):,}", listed))
        holes += [(name, f"{wall.name}, {wall.user}", by_name[name].reason(wall)) for name in known]
    subjects = dict.fromkeys(escape.subject for escape in escapes)
    classes = (
        (subject, f"{sum(escape.subject == subject for escape in escapes):,}", *_shares(subject, escapes, applicable))
        for subject in subjects
    )
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, where, why in holes:
        reasons.setdefault((name, why), []).append(where)
    return "\n".join(
        (
            f"Kernel {platform.release()} on {platform.machine()}; as root and as an ordinary user "
            f"(started by uid {os.geteuid()}). {len(escapes):,} escapes.\n",
            table(("wall", "user", "tried", "got through, and known", "got through"), rows),
            "What is known to get through, and why:\n",
            table(("escape", "walls", "why"), ((name, "<br>".join(at), why) for (name, why), at in reasons.items())),
            "What was tried. An escape that does not succeed without a wall on this machine is not counted above:\n",
            table(("class", "escapes", "succeed without a wall, as root", "as a user"), classes),
        )
    )


def through(found: Mapping[str, Finding] | str) -> set[str]:
    """The names of the escapes that got through."""
    return set() if isinstance(found, str) else {name for name, one in found.items() if one.through}


def _shares(subject: str, escapes: Sequence[Escape], applicable: Mapping[str, set[str]]) -> tuple[str, str]:
    names = {escape.name for escape in escapes if escape.subject == subject}
    return f"{len(names & applicable.get('root', set())):,}", f"{len(names & applicable.get('user', set())):,}"
