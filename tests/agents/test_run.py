"""What an agent can do with its run."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from holdfast import Host, Run, Session, Settings, agent, tool
from holdfast.agents import as_agent
from holdfast.agents.journal import Journal
from holdfast.agents.run import Call
from holdfast.errors import Interrupted, NotDeterministic, RunFailed
from holdfast.protocol.events import (
    ChildFinished,
    Event,
    Gap,
    StepStarted,
    TextDelta,
    ToolFinished,
    ToolOutput,
    ToolStarted,
)
from holdfast.runtime import check_interrupt, current_interrupt, current_scope
from holdfast.runtime.scope.task_handle import TaskHandle


def talk(*agents: Any, scenario: Callable[[Host], Coroutine[Any, Any, None]]) -> None:
    """Run the scenario on a host with these agents."""

    async def main() -> None:
        async with asyncio.timeout(30):
            async with Host(agents=agents, store="memory://", settings=Settings(grace_s=1)) as host:
                await scenario(host)

    asyncio.run(main())


def says(work: Any, *more: Any, text: str = "x") -> str:
    """What the agent answers."""
    answers: list[str] = []

    async def scenario(host: Host) -> None:
        answers.append(await host.session("s").ask(text))

    talk(work, *more, scenario=scenario)
    return answers[0]


async def log(session: Session) -> list[Event]:
    """The session's events so far."""
    runs = await session.runs()
    follow = runs[0].messages[-1]
    return [event async for event in session.events(follow=follow) if not isinstance(event, Gap)]


def test_every_kind_of_function_is_an_agent() -> None:
    async def coroutine(run: Run) -> str:
        return "coroutine"

    async def nothing(run: Run) -> None:
        pass

    async def generator(run: Run) -> AsyncIterator[str]:
        yield "gener"
        yield "ator"

    def sync(run: Run) -> str:
        return "sync"

    def sync_generator(run: Run) -> Iterator[str]:
        yield "sync "
        yield "generator"

    def gives_coroutine(run: Run) -> Coroutine[Any, Any, str]:
        return coroutine(run)

    class Thing:
        async def __call__(self, run: Run) -> str:
            return "object"

    cases: list[tuple[Any, str]] = [
        (coroutine, "coroutine"),
        (nothing, ""),
        (generator, "generator"),
        (sync, "sync"),
        (sync_generator, "sync generator"),
        (gives_coroutine, "coroutine"),
        (Thing(), "object"),
    ]
    for work, expected in cases:
        assert says(work) == expected


def test_the_decorator_names_and_describes() -> None:
    @agent(name="other", replayable=True)
    async def one(run: Run) -> None:
        """Does it.

        At length."""

    @agent
    async def two(run: Run) -> None:
        pass

    assert (one.name, one.replayable, one.description) == ("other", True, "Does it.")
    assert (two.name, two.replayable, two.description) == ("two", False, "")
    assert as_agent(one) is one


def test_what_threads_say_comes_in_order_and_whole() -> None:
    def chatty(run: Run) -> None:
        for number in range(5000):
            _ = run.emit(f"{number} ")

    assert says(chatty).split() == [str(n) for n in range(5000)]


def test_many_branches_in_threads_and_tasks_lose_nothing_of_what_they_say() -> None:
    async def forking(run: Run) -> None:
        def in_thread() -> None:
            for _ in range(200):
                _ = run.emit("t")

        async def in_task() -> None:
            for _ in range(200):
                await run.emit("k")

        await run.parallel(*[in_thread, in_task] * 4)

    answer = says(forking)
    assert (answer.count("t"), answer.count("k")) == (800, 800)


def test_calls_are_journaled_before_and_after_with_their_output() -> None:
    seen: list[str] = []

    def work(call: Call, number: int, *, label: str) -> dict[str, Any]:
        seen.append(call.call_id)
        _ = call.output(f"working on {number}")
        return {"number": number, "label": label}

    async def caller(run: Run) -> str:
        await run.step("only step")
        return str(await run.call(work, 7, label="seven"))

    async def scenario(host: Host) -> None:
        session = host.session("s")
        assert await session.ask("x") == "{'number': 7, 'label': 'seven'}"
        events = await log(session)
        kinds = [e.kind for e in events if isinstance(e, (StepStarted, ToolStarted, ToolOutput, ToolFinished))]
        assert kinds == ["step.started", "tool.started", "tool.output", "tool.finished"]
        started = next(e for e in events if isinstance(e, ToolStarted))
        assert started.call_id == seen[0]

    talk(caller, scenario=scenario)


def test_a_call_is_in_the_store_before_it_has_its_effect() -> None:
    hosts: list[Host] = []

    async def effect() -> list[str]:
        """What a crash at this moment would leave."""
        return [event.kind for event in await hosts[0].store.read_events(1, after=0, limit=100)]

    async def caller(run: Run) -> str:
        return " ".join((await run.call(effect))[2:])

    async def scenario(host: Host) -> None:
        hosts.append(host)
        assert await host.session("s").ask("x") == "tool.started"

    talk(caller, scenario=scenario)


def test_a_call_that_raises_is_written_down_and_raised() -> None:
    def broken() -> None:
        raise ValueError("tool broke")

    async def careful(run: Run) -> str:
        try:
            await run.call(broken)
        except ValueError as error:
            return f"caught {error}"
        return "?"

    async def scenario(host: Host) -> None:
        session = host.session("s")
        assert await session.ask("x") == "caught tool broke"
        finished = next(e for e in await log(session) if isinstance(e, ToolFinished))
        assert (finished.status, finished.error) == ("error", "ValueError: tool broke")
        results = [e for e in await session.transcript() if e.role == "tool_result"]
        assert [e.content for e in results] == ["ValueError: tool broke"]

    talk(careful, scenario=scenario)


def test_a_tool_or_a_value_in_place_of_a_function_is_refused() -> None:
    @tool
    def search() -> None:
        """Search."""

    async def agent(run: Run) -> str:
        for wrong in (search, 7):
            try:
                await run.call(wrong)  # type: ignore[arg-type]
            except TypeError as error:
                await run.emit(f"{error}\n")
        return ""

    async def scenario(host: Host) -> None:
        answer = await host.session("s").ask("x")
        assert answer.splitlines() == [
            "tool 'search' is called by models; pass run.call() the function itself, without @tool",
            "run.call() needs a function, got int",
        ]

    talk(agent, scenario=scenario)


def test_the_log_has_a_bounded_piece_of_an_error_text_of_any_length() -> None:
    def broken() -> None:
        raise ValueError("x" * 5_000_000)

    async def child(run: Run) -> None:
        broken()

    async def careful(run: Run) -> str:
        with pytest.raises(ValueError):
            await run.call(broken)
        with pytest.raises(RunFailed):
            await run.delegate(child, "go")
        return "done"

    async def scenario(host: Host) -> None:
        session = host.session("s")
        assert await session.ask("x") == "done"
        errors = [e.error or "" for e in await log(session) if isinstance(e, (ToolFinished, ChildFinished))]
        assert [1_000 < len(error) < 20_000 for error in errors] == [True, True]

    talk(careful, scenario=scenario)


def test_call_ids_are_the_same_in_every_attempt_however_branches_interleave() -> None:
    collected: list[list[str]] = []

    async def nap(order: int) -> int:
        await asyncio.sleep(0.001 * order)
        return order

    async def forking(run: Run) -> None:
        flip = len(collected) % 2

        async def branch_a() -> None:
            await run.call(nap, 3 if flip else 0)
            await run.call(nap, 0)

        async def branch_b() -> None:
            await run.call(nap, 0 if flip else 3)
            await run.call(nap, 1)

        await run.parallel(branch_a, branch_b)
        await run.delegate(child, "x")
        await run.call(nap, 1)

    async def child(run: Run) -> None:
        await run.call(nap, 0)

    async def scenario(host: Host) -> None:
        session = host.session("s")
        for _ in range(2):
            await session.ask("x")
            run_id = (await session.runs())[0].run_id
            starts = [e for e in await log(session) if isinstance(e, ToolStarted) and e.run_id == run_id]
            collected.append(sorted(e.call_id.removeprefix(run_id) for e in starts))

    talk(forking, scenario=scenario)
    assert collected[0] == collected[1]
    assert len(set(collected[0])) == 6


def test_a_replay_that_makes_another_call_is_named() -> None:
    journal = Journal(
        [ToolStarted(run_id="r", call_id="r.1", name="one"), ToolFinished(run_id="r", call_id="r.1", status="ok")]
    )
    assert journal.past("r.1", "one", None) is not None
    assert journal.past("r.2", "two", None) is None
    with pytest.raises(NotDeterministic, match="was 'one' in an earlier attempt and is 'two' now"):
        journal.past("r.1", "two", None)


def test_branches_that_nobody_awaits_are_joined_before_the_run_ends() -> None:
    async def forgetful(run: Run) -> None:
        async def later() -> None:
            await asyncio.sleep(0.01)
            await run.emit("late but there")

        _ = run.spawn(later)

    assert says(forgetful) == "late but there"


def test_the_run_is_current_in_everything_that_it_starts_and_nowhere_else() -> None:
    seen: list[bool] = []

    async def agent_work(run: Run) -> None:
        def look() -> None:
            interrupt, scope = current_interrupt(), current_scope()
            assert interrupt is not None
            assert scope is not None
            up = scope
            while up is not run.scope and up.parent is not None:
                up = up.parent
            seen.append(up is run.scope)
            check_interrupt()

        async def look_async() -> None:
            look()

        look()
        await run.parallel(look, look_async)
        await run.call(look)
        await asyncio.to_thread(look)
        await asyncio.get_running_loop().run_in_executor(None, contextvars.copy_context().run, look)
        await asyncio.create_task(look_async())

    async def scenario(host: Host) -> None:
        await host.session("s").ask("x")
        assert current_interrupt() is None
        assert current_scope() is None

    talk(agent_work, scenario=scenario)
    assert seen == [True] * 7


def test_a_context_variable_of_the_sender_does_not_reach_the_agent() -> None:
    secret: contextvars.ContextVar[str] = contextvars.ContextVar("secret", default="none")

    async def look(run: Run) -> str:
        return secret.get()

    async def scenario(host: Host) -> None:
        secret.set("of one user")
        assert await host.session("s").ask("x") == "none"

    talk(look, scenario=scenario)


def test_history_is_what_was_said_before() -> None:
    async def remember(run: Run) -> str:
        return " | ".join(f"{entry.role}: {entry.content}" for entry in await run.history())

    async def scenario(host: Host) -> None:
        session = host.session("s")
        assert await session.ask("one") == ""
        assert await session.ask("two") == "user: one"

    talk(remember, scenario=scenario)


def test_an_agent_that_says_too_much_is_told_so() -> None:
    async def endless(run: Run) -> None:
        while True:
            await run.emit("x" * 1_000_000)

    async def scenario(host: Host) -> None:
        session = host.session("s")
        sent = await session.send("x")
        settlement = await session.wait(sent.message_id)
        assert settlement.error is not None
        assert "emitted more than 16,000,000 characters" in settlement.error

    talk(endless, scenario=scenario)


def test_deltas_join_to_the_answer() -> None:
    async def chatty(run: Run) -> None:
        for number in range(300):
            await run.emit(f"{number},")
            if number % 50 == 0:
                await asyncio.sleep(0.01)

    async def scenario(host: Host) -> None:
        session = host.session("s")
        answer = await session.ask("x")
        deltas = [e.text for e in await log(session) if isinstance(e, TextDelta)]
        assert "".join(deltas) == answer == "".join(f"{n}," for n in range(300))

    talk(chatty, scenario=scenario)


def test_a_branch_that_is_cancelled_before_it_begins_keeps_its_run_busy_no_longer() -> None:
    async def never() -> None:
        raise AssertionError("it began")

    async def lead(run: Run) -> str:
        busy = [run.context.activity.busy]
        branch = run.spawn(never)
        assert isinstance(branch, TaskHandle)
        assert branch.task is not None
        branch.task.cancel()
        with pytest.raises(Interrupted):
            await branch
        await asyncio.sleep(0)
        busy.append(run.context.activity.busy)
        await run.spawn(asyncio.sleep, 0)
        await run.spawn(lambda: None)
        await asyncio.sleep(0)
        busy.append(run.context.activity.busy)
        return repr(busy)

    assert says(lead) == "[1, 1, 1]"
