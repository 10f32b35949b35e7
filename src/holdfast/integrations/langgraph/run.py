"""One run of a graph, divided into stretches of work between questions to people.

In the log, the graph is a child of its run; the graph's calls and nodes are not part of the transcript. Each stretch is
a step and a call of that child, and each node is a call inside the stretch's call. The output and the calls of the
graph's models belong to the run itself.

Invariants
- The intent of a stretch is durable before its first node starts, unless the graph is idempotent. The outcome of a
  stretch is in the log before the stretch ends. So a later attempt finds either an open stretch that must not be
  repeated, or the state from which to resume after a finished stretch. A run can be unloaded only while it waits for
  people.
- After the run has ended, the run's saver rejects all writes, from any thread.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from langchain_core.messages import AIMessage, BaseMessage, RemoveMessage
from langgraph.channels import BinaryOperatorAggregate, DeltaChannel
from langgraph.errors import EmptyInputError, GraphRecursionError, InvalidUpdateError
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages
from langgraph.types import Command

from holdfast.agents.journal import current_call_path
from holdfast.agents.results import summarize_error
from holdfast.errors import ConfigurationError, RunFailed
from holdfast.integrations.langgraph.call_numbers import NodeCallPath
from holdfast.integrations.langgraph.messages import as_json, asked, messages_of, text_of
from holdfast.integrations.langgraph.output import Nodes, Speech
from holdfast.integrations.langgraph.questions import ask_all, questions_of, resume_of
from holdfast.integrations.langgraph.state import Kept, RunSaver, fingerprint, owner, pack, unpack
from holdfast.protocol.events import (
    ChildFinished,
    ChildStarted,
    StepFinished,
    StepStarted,
    ToolFinished,
    ToolStarted,
    plain,
)
from holdfast.protocol.messages import AgentState, Question

if TYPE_CHECKING:
    from holdfast.agents.run import Run
    from holdfast.integrations.langgraph.hosted_graph import GraphAgent
    from holdfast.protocol.messages import Answer, Entry

__all__ = ["GraphRun"]

_MODES = ("values", "tasks", "messages", "custom")
_STOPPED = "__interrupt__"
_MESSAGES = "messages"


class _Asked(NamedTuple):
    """A value passed to `interrupt()`, with its questions. An ``interrupt_id`` of None marks a graph's breakpoint."""

    interrupt_id: str | None
    value: Any
    questions: Sequence[Question]


class GraphRun:
    """One run of a hosted graph; the module documents its stretches and invariants."""

    def __init__(self, agent: GraphAgent, run: Run) -> None:
        self._agent = agent
        self._run = run
        self._context = run.context
        self._id = run.context.next_id()
        self._saver = RunSaver(run.session_key)
        self._graph = copy.copy(agent.graph)  # its own copy() loses the classes that its state may contain
        self._graph.checkpointer = self._saver
        self._deltas = [name for name, channel in self._graph.channels.items() if isinstance(channel, DeltaChannel)]
        self._speech = Speech(run.context, agent.speakers, silent=agent.answer is not None)
        self._before = b""
        self._output: Any = None
        self._stretch = 0
        self._kept = ""
        self._inside: dict[str, int] = {}

    async def work(self) -> None:
        """Run the graph to its end. Raises `RunFailed`, `ConfigurationError`, `LimitExceeded`, or a node's error."""
        run = self._run
        self._context.journal.remembers = True  # a node with a question runs again from its beginning
        self._context.write(ChildStarted(run_id=run.run_id, child_id=self._id, agent=self._agent.name, at=run.now()))
        status: Literal["completed", "failed", "interrupted"] = "interrupted"
        error: str | None = None
        try:
            await self._work()
            status = "completed"
        except Exception as problem:
            status, error = "failed", summarize_error(problem)
            raise
        finally:
            self._saver.close()
            if not self._context.closed:
                child = ChildFinished(run_id=run.run_id, child_id=self._id, status=status, error=error, at=run.now())
                self._context.write(child)
                self._context.journal.child_ended(child)

    async def _work(self) -> None:
        config = self._config()
        stopped = await self._past()
        given = None if stopped is not None else await self._given()
        while stopped is not False:
            if stopped:
                given = await self._answered(await self._waits(config))
            self._stretch += 1
            stopped = await self._work_on(given, config)
        if self._context.parent is None:
            self._run.transcript.agent_state = AgentState(by=owner(self._agent.name), body=self._kept)

    # ── input ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _config(self) -> Any:
        run, own = self._run, self._agent.config or {}
        session = {
            "thread_id": run.session_key,
            "session": run.session_key,
            "principal": run.principal,
            "run_id": run.run_id,
            "run": run,
        }
        return {**own, "configurable": {**own.get("configurable", {}), **session}}

    async def _past(self) -> bool | None:
        """Restore the state of an earlier attempt.

        Return whether that attempt stopped for a question, or None if it finished no stretch.
        """
        state = None
        while step := self._context.journal.step(self._id, self._stretch + 1):
            self._stretch += 1
            state = step.state
            self._context.charge(step.usage)
        if state is None:
            return None
        await self._speech.again(state["said"])
        self._kept = state["graph"]
        self._inside = state["inside"]
        if state["ended"]:
            return False
        kept = unpack(self._kept, self._agent.name)
        if kept is None:
            raise ConfigurationError(
                f"the run waited for an answer, but the saved state of its graph {self._agent.name!r} is unreadable",
                hint="send the request again",
            )
        self._before = kept.before
        self._saver.load(kept)
        return True

    async def _given(self) -> Any:
        """Load the graph's state from the session, and return the graph's input."""
        run, agent = self._run, self._agent
        history = await run.history()
        if agent.takes_messages:
            self._before = fingerprint(history)
            return await self._messages(history)
        kept, _, _ = await self._last_kept(history)
        if kept is not None:
            self._saver.load(kept)
        if agent.input is None:
            return run.text
        if isinstance(agent.input, str):
            return {agent.input: run.text}
        given = agent.input(run)
        if inspect.isawaitable(given):
            given = await given
        if given is None:
            raise RunFailed(
                f"the graph {agent.name!r} got no input",
                hint="make the function passed as input= return the graph's input, not None",
            )
        if agent.inputs is not None and isinstance(given, Mapping) and (unknown := given.keys() - agent.inputs):
            raise RunFailed(
                f"the input of the graph {agent.name!r} has no field {min(map(str, unknown))!r}",
                hint=f"its fields are {', '.join(sorted(agent.inputs))}; check the result of input=",
            )
        return given

    async def _messages(self, history: Sequence[Entry]) -> Any:
        """Return the messages since the session's saved state of the graph, and the run's own."""
        kept, since, changed = await self._last_kept(history)
        channel = self._graph.channels[_MESSAGES]
        added: list[BaseMessage] = asked(self._run.messages)
        if kept is not None and changed and getattr(channel, "operator", None) is not add_messages:
            kept, since = None, history
        if kept is not None:
            self._saver.load(kept)
        if not isinstance(channel, BinaryOperatorAggregate):
            since = history  # each input replaces the previous one
        elif kept is not None and changed:
            return {_MESSAGES: [RemoveMessage(id=REMOVE_ALL_MESSAGES), *messages_of(history), *added]}
        return {_MESSAGES: [*messages_of(since), *added]}

    async def _last_kept(self, history: Sequence[Entry]) -> tuple[Kept | None, Sequence[Entry], bool]:
        """Return the state of the newest completed run of the graph, the entries after it, and whether the transcript
        before that run has changed since, for example by a summary."""
        if self._context.parent is None:
            for at in range(len(history) - 1, -1, -1):
                entry = history[at]
                if entry.agent_state is None or entry.agent_state.by != owner(self._agent.name):
                    continue
                kept = unpack(await self._context.host.agent_state(entry.agent_state.n), self._agent.name)
                if kept is None:
                    break
                first = next(n for n, one in enumerate(history) if one.run_id == entry.run_id)
                return kept, history[at + 1 :], kept.before != fingerprint(history[:first])
        return None, history, False

    # ── work ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _work_on(self, given: Any, config: Any) -> bool:
        """Run the nodes until the graph ends (False) or waits for people (True)."""
        run, agent = self._run, self._agent
        call_id = f"{self._id}.{self._stretch}"
        self._context.write(StepStarted(run_id=self._id, step=self._stretch, label=agent.name, at=run.now()))
        started = ToolStarted(
            run_id=run.root_id, call_id=call_id, name=agent.name, idempotent=agent.idempotent, at=run.now()
        )
        self._context.write(started)
        self._context.journal.begun(started)
        if not agent.idempotent:
            await self._context.recorder.written()
        nodes = Nodes(self._context, call_id)
        status: Literal["ok", "error", "interrupted"] = "interrupted"
        error: str | None = None
        try:
            stopped = await self._stream(given, config, nodes)
            if not stopped:
                await self._say_output()
            self._set_down(ended=not stopped)
            status = "ok"
        except Exception as problem:
            status, error = "error", summarize_error(problem)
            raise
        finally:
            if not self._context.closed:
                nodes.end()
                finished = ToolFinished(run_id=run.root_id, call_id=call_id, status=status, error=error, at=run.now())
                self._context.write(finished)
                self._context.journal.ended(finished)
        return stopped

    async def _stream(self, given: Any, config: Any, nodes: Nodes) -> bool:
        agent, speech = self._agent, self._speech
        stopped = False
        token = current_call_path.set(NodeCallPath(self._id, self._inside))
        try:
            parts = self._graph.astream(
                given,
                config,
                context=agent.context(self._run) if callable(agent.context) else agent.context,
                stream_mode=list(_MODES),
                output_keys=self._graph.output_channels,
                subgraphs=True,
                durability="exit",
            )
            async with aclosing(parts):
                async for namespace, mode, part in parts:
                    match mode:
                        case "messages":
                            await speech.hear(*part)
                        case "tasks":
                            await speech.task(part)
                            nodes.task(namespace, part)
                        case "custom":
                            await nodes.output(part)
                        case _ if namespace:
                            pass  # the values of a subgraph
                        case _ if isinstance(part, Mapping) and _STOPPED in part:
                            stopped = True
                        case _:
                            self._output = part  # so far: parallel nodes may continue after one has stopped
        except GraphRecursionError as error:
            raise RunFailed(
                f"the graph {agent.name!r} did not end: {plain(str(error)).partition('.')[0]}",
                hint="make every path lead to END, or raise the limit: graph_agent(config={'recursion_limit': …})",
            ) from error
        except (EmptyInputError, InvalidUpdateError) as error:
            problem = plain(str(error)).partition("For troubleshooting")[0].strip()
            raise RunFailed(
                f"the graph {agent.name!r} rejected its input: {problem}",
                hint="check the keys of the graph's state, and the values that input= and the nodes return",
            ) from error
        finally:
            current_call_path.reset(token)
        await speech.flush()
        return stopped or (agent.breaks and bool((await self._graph.aget_state(config)).next))

    # ── people ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _waits(self, config: Any) -> list[_Asked]:
        """Return the graph's open questions, with ids that are the same in every attempt."""
        state = await self._graph.aget_state(config)
        waits: list[_Asked] = []
        numbers = itertools.count(1)
        for interrupt in state.interrupts:
            questions = [
                _numbered(question, f"{self._id}.{self._stretch}.asks.{next(numbers)}")
                for question in questions_of(self._agent, interrupt.value)
            ]
            waits.append(_Asked(interrupt.id, interrupt.value, questions))
        if not waits:
            names = ", ".join(state.next)
            text = f"{self._agent.name} stopped before {names}. Continue?"
            breakpoint_ = Question(question_id=f"{self._id}.{self._stretch}.asks.1", kind="approval", text=text)
            waits.append(_Asked(None, None, [breakpoint_]))
        return waits

    async def _answered(self, waits: Sequence[_Asked]) -> Any:
        """Ask people all open questions, and return the graph's next input, which is built from the answers."""
        run = self._run
        answers = iter(await ask_all(self._context, [question for asked in waits for question in asked.questions]))
        values: dict[str, Any] = {}
        for asked_ in waits:
            mine: list[Answer] = [next(answers) for _ in asked_.questions]
            if asked_.interrupt_id is not None:
                values[asked_.interrupt_id] = resume_of(self._agent, asked_.value, mine)
            elif mine[0].decision != "approved":
                why = f": {mine[0].text}" if mine[0].text else ""
                run.interrupt.trigger(f"a person stopped the graph{why}", kind="user")
                run.interrupt.check()
        return Command(resume=values) if values else None

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _set_down(self, *, ended: bool) -> None:
        """Write the state that a later attempt needs, and keep the state that the session's next run needs."""
        run, agent, speech = self._run, self._agent, self._speech
        if not ended or self._context.parent is None:
            kept = self._saver.rows(inside=not ended, deltas=self._deltas)
            kept.before = self._before
            self._kept = pack(kept, agent.name, limit_bytes=agent.state_limit_bytes)
        state = {"graph": self._kept, "said": speech.said, "inside": self._inside, "ended": ended}
        usage = speech.take_usage()
        self._context.write(StepFinished(run_id=self._id, step=self._stretch, usage=usage, state=state, at=run.now()))

    async def _say_output(self) -> None:
        """Emit the graph's output if it is the answer."""
        if self._agent.answer is not None or not self._run.transcript.size:
            text = plain(self._answer())
            if text:
                await self._run.emit(text)

    def _answer(self) -> str:
        """Build the run's answer from the graph's output and return the answer."""
        answer, output = self._agent.answer, self._output
        try:
            text = answer(output) if callable(answer) else _shown(output if answer is None else output[answer])
        except (KeyError, TypeError, IndexError) as error:
            raise RunFailed(
                f"the answer of the graph {self._agent.name!r} could not be built: {summarize_error(error)}",
                hint=f"check answer= of graph_agent(); the graph's output is {plain(repr(output))[:300]}",
            ) from error
        if not isinstance(text, str):
            raise RunFailed(
                f"answer() of the graph {self._agent.name!r} returned a {type(text).__name__}", hint="return text"
            )
        return text


def _shown(output: Any) -> str:
    """Return an output as text: the last model message, or JSON for anything that is not text."""
    messages = output.get(_MESSAGES) if isinstance(output, Mapping) else None
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        return next((text_of(m) for m in reversed(messages) if isinstance(m, AIMessage)), "")
    if output is None or isinstance(output, str):
        return output or ""
    return as_json(output)


def _numbered(question: Question, question_id: str) -> Question:
    return Question(
        question_id=question_id,
        kind=question.kind,
        text=plain(question.text),
        tool=question.tool,
        arguments=question.arguments,
    )
