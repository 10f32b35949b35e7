"""Draw ``docs/_static/cast.svg``, the picture in the README, from the real program. Run by hand: python -m docs._cast

A server and a chat run in two terminals. In the chat, a tree of stubborn programs is interrupted. Then the server is
killed in the middle of a run, and started again. The picture shows both terminals as they were; where lines of the
server's terminal are left out, it shows three dots.
"""

from __future__ import annotations

import io
import os
import re
import signal
import tempfile
from pathlib import Path

import pyte
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from holdfast.proof.storm.server import free_port
from tests.house.page_reader import PROMPT, Shell, reader

TARGET = Path(__file__).parent / "_static" / "cast.svg"
COLUMNS = 92
STEPS = 4
PORT = "8420"
OMITTED = "  …"
SERVER_LINES = re.compile(r"^(\$ |Holdfast .* answers on|  agents |  recovered|make: .*Killed|.*\bdemo  )")


def record(folder: Path) -> tuple[list[Text], list[Text]]:
    """Run the scene; return the lines of the server's terminal and those of the chat's."""
    port = free_port()
    with reader(folder, port, columns=COLUMNS) as person:
        server, chat = person.terminals[1], person.terminals[2]
        server.run("make serve")
        chat.run("make chat")
        chat.expect("/help lists")
        chat.tell("tree")
        chat.expect("stubborn processes")
        chat.tell("/tree")
        chat.expect("stubborn tree pid")
        chat.press("C")
        chat.expect("gone after")
        chat.tell(f"steps {STEPS}")
        chat.expect("Step 2")
        os.kill(int((person.folder / ".holdfast" / "holdfast.db-lock").read_text()), signal.SIGKILL)
        server.run("make serve")
        chat.expect("not done again")
        chat.await_readiness()
        return lines_of(server, port), lines_of(chat, port)


def lines_of(shell: Shell, port: int) -> list[Text]:
    """Return the lines of a terminal with their colours, as a reader with the default port has them."""
    screen = pyte.Screen(COLUMNS, 500)
    pyte.ByteStream(screen).feed(shell.raw)
    lines = []
    for row in range(screen.cursor.y + 1):
        cells = [screen.buffer[row][column] for column in range(COLUMNS)]
        line = Text()
        for cell in cells:
            colour = "" if cell.fg == "default" else cell.fg.replace("brown", "yellow")
            line.append(cell.data, f"{'bold ' if cell.bold else ''}{colour}".strip() or None)
        line.rstrip()
        plain = line.plain
        if prompt := re.match(PROMPT.pattern.rstrip("$"), plain):
            line = Text("$ ") + line[prompt.end() :]
        elif str(port) in plain:
            line = Text(plain.replace(str(port), PORT))
        lines.append(line)
    return lines


def without_omitted(lines: list[Text]) -> list[Text]:
    """Return the lines that tell the story, with dots where others stood."""
    kept: list[Text] = []
    for line in lines:
        if SERVER_LINES.match(line.plain):
            kept.append(line)
        elif kept and kept[-1].plain != OMITTED and line.plain:
            kept.append(Text(OMITTED))
    return kept


def draw(server: list[Text], chat: list[Text]) -> str:
    """Return the picture."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for title, lines in (("terminal 1", without_omitted(server)), ("terminal 2", chat)):
        console.print(Rule(Text(title), style="dim"))
        for line in lines:
            console.print(line, no_wrap=True, highlight=False)
    picture = console.export_svg(title="Ctrl-C stops it all; kill -9 loses nothing", unique_id="cast")
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)  # the reader's own font, not one from afar


def main() -> None:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        picture = draw(*record(Path(folder)))
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(picture, "utf-8")


if __name__ == "__main__":
    main()
