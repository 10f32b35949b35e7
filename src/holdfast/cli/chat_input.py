"""Input line of ``holdfast chat`` on a terminal: editing, history, completion, and output above what is being typed.

One prompt runs for the whole chat. What is printed goes above it in the moment before it is drawn again, so that typed
text is never torn, and the text stays in the terminal's scrollback.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from prompt_toolkit import PromptSession
from prompt_toolkit.clipboard import Clipboard, DummyClipboard, InMemoryClipboard
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.output.vt100 import Vt100_Output

from holdfast.cli.chat_lines import LineQueue
from holdfast.cli.chat_screen import USUAL_SIGN
from holdfast.cli.secret_input import exclusive_terminal

__all__ = ["PromptLines", "PromptScreen"]

_DRAW_EVERY_S = 0.03


class PromptScreen:
    """A terminal with an input line below the output.

    Parameters:
        history: earlier inputs, which the up arrow brings back.
        complete: returns completions of the text before the cursor, as pairs of the last word's replacement and a
            description.
    """

    def __init__(self, history: History, complete: Callable[[str], Sequence[tuple[str, str]]]) -> None:
        self._output = _Output.from_stdout()
        self._unwritten: list[str] = []
        self._live: Sequence[str] = ()
        self._sign = USUAL_SIGN
        self._hidden = False
        self._clipboard: Clipboard = InMemoryClipboard()
        self.session: PromptSession[str] = PromptSession(
            self._message,
            output=self._output,
            history=history,
            completer=_Words(complete),
            key_bindings=KeyBindings(),
            input_processors=[_Hidden(lambda: self._hidden)],
            clipboard=self._clipboard,
            multiline=True,
            complete_while_typing=False,
            erase_when_done=True,
            enable_suspend=True,
            reserve_space_for_menu=6,
        )
        self.session.app.min_redraw_interval = _DRAW_EVERY_S
        self.session.app.before_render += self._write_above

    @property
    def columns(self) -> int:
        """Width of the terminal."""
        return self._output.get_size().columns

    def write(self, lines: Iterable[str]) -> None:
        """Print lines above the input."""
        self._unwritten += lines
        if self.session.app.is_running:
            self.session.app.invalidate()
        else:
            self.flush()

    def flush(self) -> None:
        """Write what waits for the next drawing, if the input line is not on the screen."""
        if not self.session.app.is_running:
            self._write_above()

    def _write_above(self, _: object = None) -> None:
        """Write the lines in the place of the input line, which is drawn again below them."""
        if self._unwritten:
            if self.session.app.is_running:
                self.session.app.renderer.erase()
            self._output.write_raw("".join(f"{line}\n" for line in self._unwritten))
            self._output.flush()
            self._unwritten.clear()

    def show_live(self, lines: Sequence[str]) -> None:
        """Show unfinished lines between the output and the input."""
        if lines != self._live:
            self._live = tuple(lines)
            self.session.app.invalidate()

    def ask(self, sign: str) -> None:
        """Show `sign` before the input."""
        self._sign = sign
        self.session.app.invalidate()

    def heard(self, lines: Iterable[str]) -> None:
        """Print what was typed above the input, which has its usual sign again."""
        self._sign = USUAL_SIGN
        self.write(lines)

    def clear(self) -> None:
        """Clear the terminal."""
        self._unwritten.clear()
        self.session.app.renderer.clear()

    def hide(self, hidden: bool) -> None:
        """Show nothing of what is typed, and keep nothing of it for a later yank; or show it again."""
        self._hidden = hidden
        self.session.clipboard = DummyClipboard() if hidden else self._clipboard
        self.session.app.invalidate()

    def restore(self) -> None:
        """Undo the terminal's modes when the chat ends."""
        self._output.leave()

    def _message(self) -> ANSI:
        return ANSI("\n".join((*self._live, self._sign)))


class PromptLines:
    """Lines that are edited on a screen's input line. Enter sends; Alt-Enter and Ctrl-O begin another line."""

    def __init__(self, screen: PromptScreen, on_line: Callable[[str], None]) -> None:
        self._screen = screen
        self._on_line = on_line
        self._session = screen.session
        self._queue = LineQueue()
        self._secret: asyncio.Future[str] | None = None
        self._prompt: asyncio.Task[None] | None = None
        self._bind()

    def begin(self) -> None:
        """Show the input line, unless it is shown already."""
        if self._prompt is None:
            self._prompt = asyncio.get_running_loop().create_task(self._read(), name="input line")

    async def _read(self) -> None:
        try:
            await self._session.prompt_async(set_exception_handler=False, handle_sigint=False)
        except EOFError:
            pass
        finally:
            if self._secret is not None and not self._secret.done():
                self._secret.set_result("")
            self._queue.put(None)
            self._screen.flush()

    async def close(self) -> None:
        """Remove the input line, and restore the terminal. Raises the error that ended the input, if any."""
        try:
            if self._prompt is not None:
                if self._session.app.is_running:
                    self._session.app.exit(exception=EOFError())
                await self._prompt
        finally:
            self._screen.restore()

    async def outlast(self, saying: asyncio.Task[None]) -> bool:
        """Wait until a line is sent. Return False if the input ends first and the line is still unsent soon after."""
        return await self._queue.outlast(saying)

    async def __aiter__(self) -> AsyncIterator[str]:
        while (line := await self._queue.next()) is not None:
            yield line

    def discard(self) -> bool:
        """Empty the input line. Return whether it had text."""
        had_text = bool(self._session.default_buffer.text)
        self._session.default_buffer.reset()
        return had_text

    def take_entered(self) -> list[str]:
        """Remove the lines that were entered and not yet taken, and return them."""
        return self._queue.take_all()

    async def secret(self, ask: Callable[[], None]) -> str:
        """Return the next line, typed without echo; empty if the input has ended. `ask` runs once the echo is off."""
        if self._prompt is None or self._prompt.done():
            return ""
        buffer = self._session.default_buffer
        draft = buffer.document
        self._secret = asyncio.get_running_loop().create_future()
        try:
            with exclusive_terminal(0):
                buffer.reset()
                self._screen.hide(True)
                ask()
                return await self._secret
        finally:
            self._secret = None
            self._screen.hide(False)
            self._screen.ask(USUAL_SIGN)
            buffer.reset(draft)

    def _bind(self) -> None:
        keys = self._session.key_bindings
        assert isinstance(keys, KeyBindings)

        on_line = has_focus(DEFAULT_BUFFER)  # not in the search of the history
        hidden = Condition(lambda: self._secret is not None)

        @keys.add("c-r", filter=hidden)
        @keys.add("c-s", filter=hidden)
        def _(event: KeyPressEvent) -> None:
            """Do nothing: the text to search for would be shown."""

        @keys.add("enter", filter=on_line)
        def _(event: KeyPressEvent) -> None:
            self._enter()

        @keys.add("escape", "enter", filter=on_line)
        @keys.add("c-o", filter=on_line)
        def _(event: KeyPressEvent) -> None:
            if self._secret is None:
                event.current_buffer.insert_text("\n")

        @keys.add("c-c", filter=on_line)
        def _(event: KeyPressEvent) -> None:
            if self._secret is not None and not self._secret.done():
                self._secret.set_result("")
            else:
                signal.raise_signal(signal.SIGINT)  # as Ctrl-C in other modes of the terminal, or kill -INT

    def _enter(self) -> None:
        """Take what is on the input line: as the secret that was asked for, or as a line."""
        buffer = self._session.default_buffer
        text = buffer.text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        if self._secret is not None:
            buffer.reset()
            if not self._secret.done():
                self._secret.set_result(text.strip())
            return
        buffer.reset(append_to_history=bool(text.strip()))
        if text.strip():
            self._on_line(text)
        self._queue.put(text)


class _Words(Completer):
    """Completion of the last word before the cursor."""

    def __init__(self, complete: Callable[[str], Sequence[tuple[str, str]]]) -> None:
        self._complete = complete

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Return the words that the last one may be the beginning of."""
        typed = document.text_before_cursor
        last = len(typed) - len(typed.rpartition(" ")[0]) - (" " in typed)
        for word, meaning in self._complete(typed):
            yield Completion(word, start_position=-last, display_meta=meaning)


class _Hidden(Processor):
    """Shows nothing of the input while `is_hidden` returns True, not even its length."""

    def __init__(self, is_hidden: Callable[[], bool]) -> None:
        self._is_hidden = is_hidden

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        """Remove the text, or leave it alone."""
        if not self._is_hidden():
            return Transformation(transformation_input.fragments)
        return Transformation([], source_to_display=lambda _: 0, display_to_source=lambda _: 0)


class _Output(Vt100_Output):
    """Keeps pastes bracketed while the input line is drawn again; a paste in that moment would be sent line by line."""

    @classmethod
    def from_stdout(cls) -> _Output:
        """Return an output for stdout, which must be a terminal."""
        output = cls.from_pty(sys.stdout, enable_bell=False)
        assert isinstance(output, cls)
        output.enable_cpr = False  # a terminal's answers to cursor requests mix with what is typed ahead
        return output

    def disable_bracketed_paste(self) -> None:
        """Do nothing until the chat ends."""

    def leave(self) -> None:
        """Disable bracketed pastes."""
        super().disable_bracketed_paste()
        self.flush()
