"""Write docs/generated and docs/reference/python: the parts of the docs that come from code.

python docs/_generate.py            write changed files
python docs/_generate.py --check    exit 1 if a file is stale
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from _api import FOLDER, names_page, python_pages
from _diagrams import StateDiagram
from _faces import (
    cli_page,
    counters_page,
    counts_page,
    exits_page,
    failpoints_page,
    http_page,
    import_everything,
    metrics_page,
)
from _rooms import picture
from _text import code, fields_of, plain, table

from holdfast import errors
from holdfast.protocol import events, mailbox_policies, run_phases, states
from holdfast.server.errors import status_of
from holdfast.settings import describe

HERE = Path(__file__).resolve().parent
TARGET = HERE / "generated"

Page = Callable[[], str]


def settings_page() -> str:
    """Return every setting with its default."""
    rows = [
        (code(row.name), code(row.variable), row.type, code(row.default), plain(row.doc).replace("\n", " "))
        for row in describe()
    ]
    return table(("setting", "variable", "type", "default", "what it does"), rows)


def errors_page() -> str:
    """Return every error with its code, HTTP status, meaning and hint, in tree order."""

    def below(parent: type[errors.HoldfastError], depth: int) -> Iterable[Sequence[str]]:
        indent = "&nbsp;" * 4 * depth
        meaning = plain(parent.__doc__ or "").split("\n")[0]
        yield (
            indent + code(parent.__name__),
            code(parent.code),
            str(status_of(parent)),
            meaning,
            plain(parent.default_hint),
        )
        for child in parent.__subclasses__():
            yield from below(child, depth + 1)

    import_everything()
    return table(("error", "code", "HTTP", "what happened", "what to do next"), below(errors.HoldfastError, 0))


def events_page() -> str:
    """Return every kind of event with its fields."""
    rows = []
    for kind in events.EVENT_KINDS:
        member = next(m for m in events.Event.__args__ if m.__struct_config__.tag == kind)
        meaning = plain(member.__doc__ or "").split("\n")[0]
        rows.append((code(kind), meaning, fields_of(member, but=("seq", "at"))))
    return table(("kind", "meaning", "fields"), rows)


State = TypeVar("State", bound=str)
Input = TypeVar("Input", bound=str)


def as_text(of: Mapping[tuple[State, Input], State]) -> dict[tuple[str, str], str]:
    """Return a state table with plain strings."""
    return {(state, event): target for (state, event), target in of.items()}


def transitions(table_of: Mapping[tuple[str, str], str]) -> str:
    """Return a state table as rows."""
    rows = [(code(state), code(event), code(target)) for (state, event), target in table_of.items()]
    return table(("from", "input", "to"), rows)


def decisions_page() -> str:
    """Return the decisions on a message as a grid of policies and occupancies."""
    occupancies = list(dict.fromkeys(occupancy for occupancy, _ in mailbox_policies.DECISIONS))
    policies = list(dict.fromkeys(policy for _, policy in mailbox_policies.DECISIONS))
    rows = []
    for policy in policies:
        cells = [code(policy)]
        for occupancy in occupancies:
            row = mailbox_policies.DECISIONS[occupancy, policy]
            if isinstance(row, mailbox_policies.Decision):
                effects = [
                    name for name in ("start", "interrupt", "take_all_waiting", "append_to_batch") if getattr(row, name)
                ]
                cells.append(code(row.disposition) + (f" ({', '.join(effects)})" if effects else ""))
            else:
                cells.append(f"refused: {row}")
        rows.append(cells)
    return table(("policy", *occupancies), rows)


RUN_DIAGRAM = StateDiagram(
    table=as_text(states.RUN_TABLE),
    places={
        "running": (120, 70),
        "suspended": (120, 200),
        "stopping": (400, 280),
        "completed": (680, 50),
        "failed": (680, 110),
        "interrupted": (680, 200),
    },
    size=(780, 350),
    final=states.TERMINAL_RUN_STATES,
)
PHASE_DIAGRAM = StateDiagram(
    table=as_text(run_phases.PHASE_TABLE),
    places={
        "running": (80, 140),
        "unloading": (170, 460),
        "releasing": (400, 460),
        "committing": (560, 50),
        "lost": (560, 330),
        "unloaded": (830, 460),
        "ended": (830, 140),
    },
    size=(910, 500),
    final=run_phases.TERMINAL_PHASES,
)
MESSAGE_DIAGRAM = StateDiagram(
    table=as_text(states.MESSAGE_TABLE),
    places={
        "accepted": (100, 130),
        "taken": (330, 130),
        "completed": (640, 40),
        "failed": (640, 100),
        "interrupted": (640, 160),
        "superseded": (640, 220),
        "withdrawn": (330, 250),
    },
    size=(760, 290),
    final=states.TERMINAL_MESSAGE_STATES,
)

PAGES: Mapping[str, Page] = {
    "settings.md": settings_page,
    "errors.md": errors_page,
    "events.md": events_page,
    "run-states.md": lambda: transitions(as_text(states.RUN_TABLE)),
    "message-states.md": lambda: transitions(as_text(states.MESSAGE_TABLE)),
    "run-phases.md": lambda: transitions(as_text(run_phases.PHASE_TABLE)),
    "decisions.md": decisions_page,
    "run-states.svg": RUN_DIAGRAM.svg,
    "message-states.svg": MESSAGE_DIAGRAM.svg,
    "run-phases.svg": PHASE_DIAGRAM.svg,
    "rooms.svg": picture,
    "http.md": http_page,
    "cli.md": cli_page,
    "exits.md": exits_page,
    "failpoints.md": failpoints_page,
    "counters.md": counters_page,
    "counts.md": counts_page,
    "metrics.md": metrics_page,
    "python.md": names_page,
}

# The pages of the Python reference are written for each build and not committed: they change with every docstring.
PYTHON = HERE / FOLDER


def stale() -> list[str]:
    """Return the differences between the written files and the code, one text for each file."""
    found = []
    for name, page in PAGES.items():
        path = TARGET / name
        written = path.read_text("utf-8") if path.exists() else ""
        wanted = page()
        if written != wanted:
            lines = difflib.unified_diff(
                written.splitlines(), wanted.splitlines(), f"{name} (written)", name, lineterm=""
            )
            found.append("\n".join(list(lines)[:40]))
    found += [f"{path.name}: no page makes it" for path in TARGET.iterdir() if path.name not in PAGES]
    return found


def main(arguments: Sequence[str]) -> int:
    """Write or check; return the exit code."""
    if list(arguments) == ["--check"]:
        found = stale()
        for difference in found:
            print(difference)
        if found:
            print("docs/generated is stale: run 'make docs' and commit what it wrote")
        return 1 if found else 0
    write(TARGET, {name: page() for name, page in PAGES.items()})
    pages = python_pages()
    write(PYTHON, pages)
    for path in PYTHON.iterdir():
        if path.name not in pages:
            path.unlink()
    return 0


def write(folder: Path, pages: Mapping[str, str]) -> None:
    """Write the pages that changed, so that a build reads only those."""
    folder.mkdir(exist_ok=True)
    for name, wanted in pages.items():
        path = folder / name
        if not path.exists() or path.read_text("utf-8") != wanted:
            path.write_text(wanted, "utf-8")
            print(f"wrote {path.relative_to(HERE)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
