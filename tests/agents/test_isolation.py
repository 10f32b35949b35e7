"""Tools in processes of their own, and tools that keep the run until they are really gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading

from holdfast import Agent, Host, Settings, tool
from holdfast.agents import Call
from holdfast.agents.scripted import Pause
from holdfast.protocol.events import RunFinished, TextDelta, ToolFinished, ToolOutput
from tests.agents.elsewhere import leaves, pid_of, stuck
from tests.agents.modelled import call, check_entries, log_of, model, on_host, steps

QUICK = Settings(grace_s=0.2, abandon_after_s=0.5)


def test_a_tool_in_a_process_gets_its_arguments_streams_its_output_and_can_be_killed() -> None:
    script = steps([[call("pid_of", text="hello"), call("stuck"), call("leaves", code=3)], "Done."])
    agent = Agent(name="a", model=model(script), tools=[pid_of, stuck, leaves])

    async def main() -> None:
        async with asyncio.timeout(60), Host(agent, store="memory://", settings=QUICK) as host:
            session = host.session("s")
            assert await session.ask("go") == "Done."
            events = await log_of(host, "s")
            ended = {e.call_id[-1]: e for e in events if isinstance(e, ToolFinished)}
            assert ended["1"].result["call_id"].endswith(".1.1")
            assert ended["1"].result["pid"] != os.getpid()
            assert ended["2"].error == "stuck did not end within 0.5 s"
            assert "exited with code 3" in str(ended["3"].error)
            assert "".join(e.text for e in events if isinstance(e, ToolOutput)) == "said hello"
            check_entries(await session.transcript())

    asyncio.run(main())


def test_an_exclusive_tool_keeps_the_slot_until_it_is_really_gone_and_whoever_stops_it_is_answered_before() -> None:
    release = threading.Event()

    @tool(exclusive=True)
    def hold(call: Call) -> str:
        _ = call.output("I am here")
        release.wait(20)
        return "late"

    agent = Agent(name="a", model=model(steps([["I hold. ", call("hold")], "Done."])), tools=[hold])

    async def main() -> None:
        async with (
            asyncio.timeout(30),
            Host(agent, store="memory://", settings=QUICK) as host,
            contextlib.AsyncExitStack() as at_the_end,
        ):
            at_the_end.callback(release.set)
            session = host.session("s")
            sent = await session.send("go")
            async for event in session.events(after=sent.cursor):
                if event.kind == "tool.output":
                    break
            receipt = await session.interrupt("now")
            assert receipt.outcome == "quarantined"
            assert [left.name for left in receipt.abandoned] == ["hold"]
            after = await session.send("next")
            assert (await session.info()).run_id == sent.run_id, "its slot is held"
            release.set()
            settlement = await session.wait(after.message_id)
            assert settlement.state == "completed"
            events = await log_of(host, "s")
            first = next(e for e in events if isinstance(e, RunFinished))
            assert first.status == "interrupted"
            assert host.incidents.counts["late_results"] == 1
            check_entries(await session.transcript())

    asyncio.run(main())


def test_an_ordinary_tool_that_cannot_be_stopped_does_not_keep_the_slot() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        sent = await session.send("go")
        async for event in session.events(after=sent.cursor):
            if isinstance(event, TextDelta):
                break
        await asyncio.sleep(1)
        receipt = await session.interrupt("now")
        assert receipt.outcome == "quarantined"
        assert await session.ask("next") == "I hold. \n\nDone."
        check_entries(await session.transcript())
        await asyncio.sleep(60)  # until what was given up has ended

    @tool
    async def hold(number: int) -> str:
        end = asyncio.get_running_loop().time() + number
        while (left := end - asyncio.get_running_loop().time()) > 0:
            try:
                await asyncio.sleep(left)
            except BaseException:
                continue
        return "held"

    asked = []

    def script(request: object) -> object:
        asked.append(request)
        return steps([["I hold. ", Pause(0.1), call("hold", number=50 if len(asked) == 1 else 1)], "Done."])(request)  # type: ignore[arg-type]

    on_host(scenario, Agent(name="a", model=model(script), tools=[hold]))
