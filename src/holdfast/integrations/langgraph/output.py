"""Emit a graph's output as events of its run: models' messages as text and calls, and nodes as calls of the graph.

Invariants
- Messages are emitted one at a time: the output of other models waits until the current message is complete. So each
  message is emitted whole, however the chunks of several messages were interleaved.
- A model's call is a call of the run; the call stays open until the graph has a message with the call's result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage

from holdfast.agents.results import summarize_error, truncate
from holdfast.integrations.langgraph.messages import as_json, readable, reasoning_of, text_of, usage_of
from holdfast.protocol.events import ReasoningDelta, ToolFinished, ToolOutput, ToolStarted, plain
from holdfast.protocol.messages import Usage
from holdfast.protocol.transcript import STEP_BREAK

if TYPE_CHECKING:
    from holdfast.agents.context import RunContext

__all__ = ["Nodes", "Speech"]


class _Message:
    """A message that is being emitted, or that waits for its turn."""

    __slots__ = ("begun", "calls", "over", "pieces", "task")

    def __init__(self, task: str) -> None:
        self.task = task
        self.pieces: list[BaseMessage] = []
        self.calls: AIMessageChunk | None = None  # its chunks with calls, joined
        self.begun = False
        self.over = False


class Speech:
    """Emits the output of the models in a graph's nodes.

    Parameters:
        speakers: names of the nodes whose messages are emitted; None means all nodes.
        silent: whether to emit nothing and only count usage.
    """

    def __init__(self, context: RunContext, speakers: Collection[str] | None, *, silent: bool) -> None:
        self._context = context
        self._speakers = speakers
        self._silent = silent
        self._messages: dict[str, _Message] = {}  # by id; the first is being emitted
        self._calls: dict[str, str] = {}  # our ids by the model's ids
        self._numbers = 0
        self._used = Usage()
        self._said: list[Any] = []  # text, or the fields of a call or of its result
        self._noted = 0  # characters of the run's text already in `_said`

    def take_usage(self) -> Usage:
        """Return the usage since the previous call of this method."""
        used, self._used = self._used, Usage()
        return used

    @property
    def said(self) -> list[Any]:
        """All output and calls of the run so far, which a later attempt repeats with `again`."""
        self._note_text()
        return self._said

    def _note_text(self) -> None:
        if text := self._context.transcript.text[self._noted :]:
            self._said.append(text)
            self._noted += len(text)

    async def hear(self, message: Any, metadata: Mapping[str, Any]) -> None:
        """Handle a message, or a chunk of a message, that a node's model or tool produced."""
        if isinstance(message, AIMessage):
            used = usage_of(message)
            if used != Usage():
                self._used += used
                self._context.charge(used)
        if self._silent or (self._speakers is not None and metadata.get("langgraph_node") not in self._speakers):
            return
        if isinstance(message, ToolMessage):
            self._result(message)
        elif isinstance(message, AIMessage):
            task = str(metadata.get("langgraph_checkpoint_ns", "")).rpartition(":")[2]
            known = self._messages.setdefault(message.id or task, _Message(task))
            known.pieces.append(message)
            known.over = not isinstance(message, AIMessageChunk) or message.chunk_position == "last"
            await self._say()

    async def task(self, part: Mapping[str, Any]) -> None:
        """Handle the start or end of a node; when a node ends, its messages are complete."""
        if "result" in part and self._messages:
            for message in self._messages.values():
                message.over = message.over or message.task == part["id"]
            await self._say()

    async def flush(self) -> None:
        """Emit all waiting messages."""
        for message in self._messages.values():
            message.over = True
        await self._say()

    async def again(self, said: Sequence[Any]) -> None:
        """Emit the text of an earlier attempt again. The calls of that attempt are already in the log."""
        context = self._context
        for one in said:
            match one:
                case str():
                    await context.emit(one)
                case [call_id, name, arguments, theirs]:
                    self._calls[theirs] = call_id
                    self._numbers += 1
                    context.transcript.feed(self._started(call_id, name, arguments))
                case [call_id, status, result]:
                    context.transcript.feed(self._finished(call_id, status, result))
        self._said = list(said)
        self._noted = len(context.transcript.text)

    async def _say(self) -> None:
        while self._messages:
            message_id, message = next(iter(self._messages.items()))
            pieces, message.pieces = message.pieces, []
            for piece in pieces:
                await self._piece(message, piece)
            if not message.over:
                return
            del self._messages[message_id]
            if message.calls is not None:
                self._begin(message.calls)

    async def _piece(self, message: _Message, piece: BaseMessage) -> None:
        context = self._context
        if reasoning := reasoning_of(piece):
            context.write(ReasoningDelta(run_id=context.run_id, text=plain(reasoning), at=context.now()))
        if text := text_of(piece):
            if not message.begun and context.transcript.size:
                text = STEP_BREAK + text
            message.begun = True
            await context.emit(plain(text))
        if isinstance(piece, AIMessageChunk):
            if piece.tool_call_chunks:
                message.calls = piece if message.calls is None else message.calls + piece
        elif isinstance(piece, AIMessage):
            self._begin(piece)

    def _begin(self, message: AIMessage) -> None:
        for call in message.tool_calls:
            theirs = call["id"] or ""
            if theirs in self._calls:
                continue
            self._numbers += 1
            call_id = self._calls[theirs] = f"{self._context.run_id}.call-{self._numbers}"
            arguments = readable(call["args"])
            started = self._started(call_id, call["name"], arguments)
            self._note_text()
            self._context.write(started)
            self._context.journal.begun(started)
            self._said.append([call_id, call["name"], arguments, theirs])

    def _result(self, message: ToolMessage) -> None:
        call_id = self._calls.get(message.tool_call_id)
        if call_id is None:
            return  # result of a call made elsewhere
        status: Literal["ok", "error"] = "error" if message.status == "error" else "ok"
        text = truncate(text_of(message), self._context.limits.result_limit_bytes)
        self._context.write(self._finished(call_id, status, text))
        self._said.append([call_id, status, text])

    def _started(self, call_id: str, name: str, arguments: Any) -> ToolStarted:
        # Idempotent by itself: its node's effects belong to the graph's call, which has its own flag.
        context = self._context
        return ToolStarted(
            run_id=context.root_id, call_id=call_id, name=name, arguments=arguments, idempotent=True, at=context.now()
        )

    def _finished(self, call_id: str, status: Literal["ok", "error"], text: str) -> ToolFinished:
        context = self._context
        if status == "error":
            return ToolFinished(run_id=context.root_id, call_id=call_id, status=status, error=text, at=context.now())
        return ToolFinished(run_id=context.root_id, call_id=call_id, status=status, result=text, at=context.now())


class Nodes:
    """Reports the start and end of each node in one stretch of a graph's work (see the module `run`).

    Parameters:
        call_id: id of the stretch's call in the log.
    """

    def __init__(self, context: RunContext, call_id: str) -> None:
        self._context = context
        self._call_id = call_id
        self._ids: dict[str, str] = {}  # calls by the ids of tasks
        self._open: dict[str, None] = {}
        self._numbers = 0

    def task(self, namespace: Sequence[str], part: Mapping[str, Any]) -> None:
        """Report the start or end of a node."""
        context, task = self._context, part["id"]
        if "result" not in part:
            self._numbers += 1
            outer = self._ids.get(namespace[-1].rpartition(":")[2]) if namespace else None
            call_id = self._ids[task] = f"{outer or self._call_id}.{self._numbers}"
            self._open[task] = None
            context.write(
                ToolStarted(
                    run_id=context.root_id, call_id=call_id, name=part["name"], idempotent=True, at=context.now()
                )
            )
        elif task in self._open:
            del self._open[task]
            error = part["error"]
            if error is not None:
                self._end(task, "error", summarize_error(error) if isinstance(error, BaseException) else str(error))
            elif part["interrupts"]:
                self._end(task, "interrupted", "it asks a person")
            else:
                self._end(task, "ok", None)

    async def output(self, part: Any) -> None:
        """Report output that a node wrote to the graph's stream."""
        context = self._context
        text = part if isinstance(part, str) else as_json(part)
        context.write(ToolOutput(run_id=context.root_id, call_id=self._call_id, text=plain(text), at=context.now()))
        await context.recorder.room()

    def end(self) -> None:
        """Mark the nodes that are still open as interrupted."""
        while self._open:
            self._end(self._open.popitem()[0], "interrupted", None)

    def _end(self, task: str, status: Literal["ok", "error", "interrupted"], error: str | None) -> None:
        context = self._context
        context.write(
            ToolFinished(run_id=context.root_id, call_id=self._ids[task], status=status, error=error, at=context.now())
        )
