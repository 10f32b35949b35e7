"""What each shape does with answers, failures, deadlines and bad input."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest

import holdfast
from holdfast import Agent, Host, Run, agent, branch, parallel, route, sequence, supervised
from holdfast.agents import BranchResult
from holdfast.errors import BranchesFailed, ConfigurationError, RunFailed, TooManyRestarts, UnknownBranch
from holdfast.protocol.events import ChildFinished, ChildStarted, Event, TextDelta
from holdfast.protocol.messages import TreeNode
from holdfast.testing import run_virtual
from tests.compose.kit import host, log_of


def says(name: str, text: str | None = None, *, after_s: float = 0.0) -> Agent:
    """Answers with a text, or with its name and what it was asked."""

    async def work(run: Run) -> str:
        await asyncio.sleep(after_s)
        return f"{name}({run.text})" if text is None else text

    return agent(name=name, replayable=True)(work)


def broken(name: str, *, after_s: float = 0.0) -> Agent:
    """Fails."""

    async def work(run: Run) -> str:
        await run.emit(f"{name} began")
        await asyncio.sleep(after_s)
        raise ValueError(f"{name} broke")

    return agent(name=name)(work)


def asked(shape: Agent, text: str = "x", *others: Agent) -> tuple[str, list[Event]]:
    """What the shape answers, or the error that it raises; and the log."""

    async def outer(run: Run) -> str:
        problem: BaseException | None = None
        try:
            return await run.delegate(shape, run.text)
        except RunFailed as error:
            problem = error.__cause__
            caught.append(problem)
            return f"raised {type(problem).__name__}"

    async def scenario() -> tuple[str, list[Event]]:
        async with host([agent(outer), *others]) as one:
            answer = await one.session("s").ask(text)
            return answer, await log_of(one)

    caught.clear()
    return run_virtual(scenario())


caught: list[BaseException | None] = []


def on_host(*agents: Agent, scenario: Callable[[Host], Coroutine[Any, Any, None]]) -> None:
    """Run the scenario on virtual time."""

    async def main() -> None:
        async with host(agents) as one:
            await scenario(one)

    run_virtual(main())


# ── parallel ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_answer_of_parallel_are_the_texts_in_the_order_of_the_branches() -> None:
    shape = parallel(says("slow", after_s=2), says("quick"), says("silent", ""))
    assert asked(shape)[0] == "slow(x)\n\nquick(x)"


def test_join_makes_the_answer_and_may_wait() -> None:
    async def join(results: Any) -> str:
        await asyncio.sleep(1)
        return " + ".join(f"{result.name}={result.text}" for result in results)

    assert asked(parallel(says("a"), says("b"), join=join))[0] == "a=a(x) + b=b(x)"


def test_a_branch_is_asked_what_it_is_said_to_be_asked() -> None:
    shape = parallel(
        says("a"),
        branch(says("b"), text="about {text}: {braces}"),
        branch(says("c"), text=lambda run, text: f"{run.agent.name} {text.upper()}"),
    )
    assert asked(shape)[0] == "a(x)\n\nb(about x: {braces})\n\nc(parallel X)"


def test_the_first_answer_wins_and_the_others_are_gone_with_a_cause_that_says_so() -> None:
    answer, log = asked(parallel(says("slow", after_s=50), says("quick", after_s=1), need="first"))
    assert answer == "quick(x)"
    (slow,) = [event for event in log if isinstance(event, ChildFinished) and event.status == "interrupted"]
    assert slow.error == "child slow was interrupted (stop): branch 'quick' was first"
    assert slow.cause is not None
    assert (slow.cause.kind, slow.cause.origin) == ("stop", "parallel")


def test_so_many_answers_are_enough() -> None:
    shape = parallel(*(says(f"b{n}", after_s=n) for n in range(5)), need=3)
    answer, log = asked(shape)
    assert answer == "b0(x)\n\nb1(x)\n\nb2(x)"
    assert sum(isinstance(event, ChildFinished) and event.status == "interrupted" for event in log) == 2


def test_a_branch_that_fails_interrupts_the_others_with_a_cause_that_names_it() -> None:
    answer, log = asked(parallel(says("done"), broken("bad", after_s=1), says("slow", after_s=50)))
    assert answer == "raised BranchesFailed"
    (error,) = caught
    assert isinstance(error, BranchesFailed)
    assert [(result.name, result.status) for result in error.results] == [
        ("done", "completed"),
        ("bad", "failed"),
        ("slow", "interrupted"),
    ]
    assert error.results[0].text == "done(x)"
    assert error.results[1].text == "bad began"
    assert error.message.startswith("1 of 3 branches completed, 3 must: child bad failed: ValueError: bad broke; ")
    assert isinstance(error.__cause__, ValueError)
    slow = next(e for e in log if isinstance(e, ChildFinished) and (e.error or "").startswith("child slow"))
    assert slow.cause is not None
    assert "branch 'bad' did not complete: child bad failed: ValueError: bad broke" in slow.cause.reason


def test_where_asked_the_others_are_waited_for() -> None:
    answer, _ = asked(parallel(broken("bad"), says("slow", after_s=50), on_failure="wait"))
    assert answer == "raised BranchesFailed"
    (error,) = caught
    assert isinstance(error, BranchesFailed)
    assert [result.status for result in error.results] == ["failed", "completed"]


def test_the_answers_that_were_there_are_the_text_of_a_parallel_that_fails() -> None:
    _, log = asked(parallel(says("done"), broken("bad", after_s=1)))
    ends = [event for event in log if isinstance(event, ChildFinished)]
    assert (ends[-1].status, ends[-1].text) == ("failed", "done(x)")


def test_some_waits_for_all_and_takes_what_is_there() -> None:
    shape = parallel(broken("bad"), says("slow", after_s=9), branch(says("late", after_s=9), deadline_s=1), need="some")
    assert asked(shape)[0] == "slow(x)"
    assert asked(parallel(broken("a"), broken("b"), need="some"))[0] == "raised BranchesFailed"


def test_the_deadline_of_a_branch_counts_from_its_own_beginning_and_ends_it() -> None:
    shape = parallel(
        branch(says("one", after_s=8), deadline_s=9),
        branch(says("two", after_s=8), deadline_s=9),
        branch(says("never", after_s=1e9), deadline_s=9),
        need=2,
        concurrency=1,
    )
    answer, log = asked(shape)
    assert answer == "one(x)\n\ntwo(x)"
    assert not any(isinstance(event, ChildStarted) and event.name == "never" for event in log)
    assert asked(branch_only_late())[0] == "raised BranchesFailed"
    (error,) = caught
    assert isinstance(error, BranchesFailed)
    assert error.results[0].error == "child never was interrupted (deadline): deadline of 9 s exceeded"


def branch_only_late() -> Agent:
    """A branch that never returns."""
    return parallel(branch(says("never", after_s=1e9), deadline_s=9))


def test_at_most_so_many_branches_are_at_work_and_they_begin_in_order() -> None:
    busy = most = 0
    begun: list[str] = []

    def counting(name: str) -> Agent:
        async def work(run: Run) -> str:
            nonlocal busy, most
            begun.append(name)
            busy += 1
            most = max(most, busy)
            await asyncio.sleep(1)
            busy -= 1
            return name

        return agent(name=name)(work)

    names = [f"b{n}" for n in range(7)]
    assert asked(parallel(*map(counting, names), concurrency=3))[0] == "\n\n".join(names)
    assert (most, begun) == (3, names)


def test_branches_of_one_agent_are_numbered_in_log_and_tree() -> None:
    async def scenario(one: Host) -> None:
        session = one.session("s")
        await session.send("x")
        await asyncio.sleep(1)
        names = names_in([await session.tree()])
        assert {"voter 1", "voter 2"} <= set(names)
        await session.interrupt("enough")

    voter = says("voter", after_s=50)
    on_host(parallel(voter, voter, name="vote"), scenario=scenario)


def names_in(nodes: Iterable[TreeNode]) -> list[str]:
    return [name for node in nodes for name in (node.name, *names_in(node.children))]


def test_branches_see_the_history_and_stream_under_their_own_ids() -> None:
    async def remembers(run: Run) -> str:
        return " | ".join(entry.content for entry in await run.history())

    async def scenario(one: Host) -> None:
        session = one.session("s")
        assert await session.ask("one") == ""
        assert await session.ask("two") == "one"
        deltas = [event for event in await log_of(one) if isinstance(event, TextDelta)]
        assert [delta.run_id.count(".") for delta in deltas] == [1, 0]

    on_host(parallel(agent(remembers), name="shape"), scenario=scenario)


# ── sequence and route ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sequence_asks_each_what_the_one_before_answered() -> None:
    assert asked(sequence(says("a"), branch(says("b"), text="<{text}>"), says("c")))[0] == "c(b(<a(x)>))"


def test_the_last_one_of_a_sequence_is_heard_as_it_speaks() -> None:
    async def speaks(run: Run) -> None:
        for word in ("one ", "two ", "three"):
            await run.emit(word)
            await asyncio.sleep(1)

    async def scenario(one: Host) -> None:
        session = one.session("s")
        assert await session.ask("x") == "one two three"
        root = [e for e in await log_of(one) if isinstance(e, TextDelta) and "." not in e.run_id]
        assert [(delta.text, delta.at - root[0].at) for delta in root] == [("one ", 0), ("two ", 1), ("three", 2)]

    on_host(sequence(says("a"), speaks), scenario=scenario)


def test_what_a_sequence_said_before_it_failed_is_kept() -> None:
    async def scenario(one: Host) -> None:
        session = one.session("s")
        with pytest.raises(RunFailed, match="child bad failed: ValueError: bad broke"):
            await session.ask("x")
        assert [e.content for e in await session.transcript() if e.role == "assistant"] == ["bad began"]

    on_host(sequence(says("a"), broken("bad")), scenario=scenario)


@pytest.mark.parametrize("answer", ["tech", " Tech. ", '"TECH"', "`tech`\n"])
def test_a_route_is_chosen_by_name_however_the_name_is_dressed(answer: str) -> None:
    async def choose(run: Run) -> str:
        return answer

    assert asked(route(choose, {"billing": says("b"), "tech": says("t")}))[0] == "t(x)"


def test_a_plain_function_may_choose() -> None:
    async def scenario() -> None:
        async with Host(
            route(lambda run: "short" if len(run.text) < 5 else "long", {"short": says("s"), "long": says("l")}),
            store="memory://",
        ) as one:
            assert await one.session("s").ask("hi") == "s(hi)"
            assert await one.session("s").ask("hello there") == "l(hello there)"

    async def main() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(main())


def test_a_name_that_the_route_does_not_have_is_told_with_those_that_it_has() -> None:
    shape = route(says("model", "the Blog, I think"), {"billing": says("b"), "tech": says("t")}, name="desk")
    assert asked(shape)[0] == "raised UnknownBranch"
    (error,) = caught
    assert isinstance(error, UnknownBranch)
    assert error.code == "unknown_branch"
    assert "'choose' answered 'the Blog, I think', but 'desk' has no such branch" in error.message
    assert error.hint == "its branches are: billing, tech"


def test_otherwise_takes_what_names_no_branch() -> None:
    assert asked(route(says("m", "?"), {"a": says("a")}, otherwise=says("rest")))[0] == "rest(x)"


# ── supervised ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Tries:
    """Agents that complete after some tries."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def make(self, name: str, good_after: int, *, after_s: float = 1.0) -> Agent:
        async def work(run: Run) -> str:
            self.made.append(name)
            count = self.made.count(name)
            await asyncio.sleep(after_s)
            if count <= good_after:
                raise ValueError(f"{name}, try {count}")
            return f"{name} after {count}"

        return agent(name=name, replayable=True)(work)


def test_a_branch_that_fails_is_started_again_alone() -> None:
    tries = Tries()
    shape = supervised(tries.make("a", 2), tries.make("b", 0, after_s=9))
    assert asked(shape)[0] == "a after 3\n\nb after 1"


def test_those_behind_a_branch_are_started_again_with_it_and_those_before_are_not() -> None:
    tries = Tries()
    shape = supervised(
        tries.make("a", 0, after_s=9), tries.make("b", 1), tries.make("c", 0, after_s=9), strategy="rest_for_one"
    )
    answer, log = asked(shape)
    assert answer == "a after 1\n\nb after 2\n\nc after 2"
    (stopped,) = [event for event in log if isinstance(event, ChildFinished) and event.status == "interrupted"]
    assert stopped.cause is not None
    assert "branch 'b' is restarted, and this one with it: child b failed: ValueError: b, try 1" in str(stopped.error)


def test_all_are_started_again_but_for_those_that_have_completed() -> None:
    tries = Tries()
    shape = supervised(
        tries.make("quick", 0, after_s=0.5),
        tries.make("b", 1),
        tries.make("c", 0, after_s=9),
        strategy="one_for_all",
    )
    assert asked(shape)[0] == "quick after 1\n\nb after 2\n\nc after 2"


def test_too_many_restarts_end_it_with_all_that_is_known() -> None:
    tries = Tries()
    shape = supervised(tries.make("done", 0), tries.make("bad", 99), tries.make("slow", 0, after_s=99), restarts=2)
    assert asked(shape)[0] == "raised TooManyRestarts"
    (error,) = caught
    assert isinstance(error, TooManyRestarts)
    assert "more than 2 restarts within 5 s: child bad failed: ValueError: bad, try 1; " in error.message
    assert [(result.name, result.status) for result in error.results] == [
        ("done", "completed"),
        ("bad", "failed"),
        ("slow", "interrupted"),
    ]
    assert tries.made.count("bad") == 3
    assert isinstance(error.__cause__, ValueError)


def test_restarts_that_lie_far_enough_apart_may_go_on() -> None:
    tries = Tries()
    assert asked(supervised(tries.make("a", 9), restarts=1, within_s=0.9))[0] == "a after 10"


def test_a_restart_waits_its_delay_and_an_interrupt_ends_the_wait_at_once() -> None:
    tries = Tries()

    async def scenario(one: Host) -> None:
        session = one.session("s")
        await session.send("x")
        await asyncio.sleep(100)
        assert tries.made == ["a"]
        began = asyncio.get_running_loop().time()
        receipt = await session.interrupt("enough")
        assert receipt.outcome == "gone"
        assert asyncio.get_running_loop().time() - began < 0.1

    on_host(supervised(tries.make("a", 1), delay_s=1000, within_s=1e6), scenario=scenario)


def test_a_permanent_branch_ends_with_the_others_and_a_temporary_one_is_not_started_again() -> None:
    tries = Tries()
    shape = supervised(
        tries.make("main", 0, after_s=3.5),
        branch(tries.make("stream", 0), restart="permanent"),
        branch(tries.make("once", 1), restart="temporary"),
        restarts=10,
        within_s=100,
    )
    answer, log = asked(shape)
    assert answer == "main after 1"
    assert (tries.made.count("stream"), tries.made.count("once")) == (4, 1)
    reasons = [str(event.error) for event in log if isinstance(event, ChildFinished) and event.status == "interrupted"]
    assert reasons == ["child stream was interrupted (stop): all other branches have ended"]


def test_a_deadline_counts_as_a_failure_of_the_branch() -> None:
    tries = Tries()
    shape = supervised(branch(tries.make("a", 0, after_s=9), deadline_s=1), restarts=1, within_s=60)
    assert asked(shape)[0] == "raised TooManyRestarts"
    assert "was interrupted (deadline)" in str(caught[0])


# ── what cannot be ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "make",
    [
        parallel,
        sequence,
        supervised,
        lambda: route(says("a"), {}),
        lambda: route(says("a"), {"a": says("a"), "A ": says("b")}),
        lambda: parallel(says("a"), need="most"),  # type: ignore[arg-type]
        lambda: parallel(says("a"), need=2),
        lambda: parallel(says("a"), concurrency=0),
        lambda: parallel(says("a"), on_failure="ignore"),  # type: ignore[arg-type]
        lambda: parallel(branch(says("a"), name="x"), branch(says("b"), name="x")),
        lambda: parallel(3),  # type: ignore[arg-type]
        lambda: parallel(says("a"), concurrency=2.5),  # type: ignore[arg-type]
        lambda: branch(says("a"), deadline_s=0),
        lambda: branch(says("a"), deadline_s=math.nan),
        lambda: branch(says("a"), deadline_s="5"),  # type: ignore[arg-type]
        lambda: branch(says("a"), restart="always"),  # type: ignore[arg-type]
        lambda: supervised(says("a"), strategy="all"),  # type: ignore[arg-type]
        lambda: supervised(says("a"), restarts=-1),
        lambda: supervised(says("a"), within_s=0),
        lambda: supervised(says("a"), restarts=2.5),  # type: ignore[arg-type]
        lambda: supervised(says("a"), within_s=math.nan),
        lambda: supervised(says("a"), within_s="5"),  # type: ignore[arg-type]
        lambda: supervised(says("a"), delay_s=-1),
        lambda: supervised(says("a"), delay_s=math.nan),
        lambda: supervised(says("a"), delay_s=math.inf),
        lambda: supervised(says("a"), delay_s="5"),  # type: ignore[arg-type]
    ],
)
def test_a_shape_that_cannot_be_is_refused_when_it_is_made(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigurationError):
        make()


@pytest.mark.parametrize("make", [parallel, sequence, supervised, lambda: route(says("a"), {})])
def test_a_shape_of_nothing_is_told_so(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigurationError, match=r"no branches given .*at least one (named )?agent"):
        make()


def test_agents_are_named_and_one_that_the_host_does_not_have_is_told() -> None:
    async def scenario(one: Host) -> None:
        assert await one.session("a", agent="both").ask("x") == "known(x)\n\nknown(x)"
        with pytest.raises(RunFailed, match=r"UnknownAgent: .*'stranger' .*add the agent to the host"):
            await one.session("b", agent="lost").ask("x")
        assert await one.session("b", agent="known").ask("still there?") == "known(still there?)"

    on_host(
        parallel("known", "known", name="both"),
        sequence("stranger", name="lost"),
        says("known"),
        scenario=scenario,
    )


@pytest.mark.parametrize("make", [parallel, sequence, supervised])
def test_agents_in_a_circle_are_refused_with_the_chain(make: Any) -> None:
    options = {"restarts": 0} if make is supervised else {}

    async def scenario(one: Host) -> None:
        with pytest.raises(
            RunFailed, match="delegation cycle: agent 'here' is already handling this request: here ▸ there ▸ here"
        ):
            await one.session("s", agent="here").ask("x")
        assert await one.session("s", agent="fine").ask("y") == "fine(y)"

    on_host(
        make("there", name="here", **options), make("here", name="there", **options), says("fine"), scenario=scenario
    )


def test_a_shape_is_replayable_when_all_its_parts_are_known_to_be() -> None:
    plain = broken("plain")
    assert parallel(says("a"), sequence(says("b"), says("c"))).replayable
    assert not parallel(says("a"), plain).replayable
    assert not sequence(says("a"), "by name").replayable
    assert not route(says("a"), {"b": plain}).replayable


def test_the_toolsets_of_the_parts_are_the_shape_s() -> None:
    class Executing(holdfast.agents.Toolset):
        executes = True

        def tools(self) -> list[holdfast.Tool]:
            return []

    kit = Executing()
    armed = Agent(name="armed", model="scripted:hello", tools=[kit])
    shape = parallel(says("a"), sequence(armed, says("b")))
    assert shape.toolsets == (kit,)
    assert shape.executes


def test_a_result_says_whether_it_completed() -> None:
    assert BranchResult(name="a", status="completed").completed
    assert not BranchResult(name="a", status="not_begun").completed
