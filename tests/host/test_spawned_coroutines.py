"""`run.spawn` takes what `Scope.spawn` takes: a coroutine too; and models that serve people remember no requests."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from holdfast import Host, Run, RunFailed
from holdfast.agents import Agent
from holdfast.agents.model_lookup import find_model
from holdfast.agents.scripted import ScriptedModel


def asked(work: Callable[[Run], Any]) -> str:
    """What an agent answers."""

    async def main() -> str:
        async with asyncio.timeout(30), Host(work, store="memory://") as host:
            return await host.session("s").ask("x")

    return asyncio.run(main())


async def doubled(number: int) -> int:
    await asyncio.sleep(0)
    return number * 2


def test_a_coroutine_is_a_branch_of_the_run() -> None:
    async def agent(run: Run) -> str:
        handles = [run.spawn(doubled(n), name=f"double {n}") for n in range(3)]
        return str([await handle for handle in handles])

    assert asked(agent) == "[0, 2, 4]"


def test_a_coroutine_that_is_not_awaited_is_joined() -> None:
    async def agent(run: Run) -> str:
        async def late() -> None:
            await asyncio.sleep(0.01)
            await run.emit(" late")

        _ = run.spawn(late())
        return "early"

    assert asked(agent) == "early late"


@pytest.mark.parametrize("options", [{"on": "thread"}, {"on": "process"}])
def test_a_coroutine_for_a_thread_is_refused_in_words_and_closed(options: Any) -> None:
    async def agent(run: Run) -> str:
        with pytest.raises(TypeError, match="pass the function instead"):
            run.spawn(doubled(1), **options)
        with pytest.raises(TypeError, match="pass the function instead"):
            run.spawn(doubled(1), 2)
        with pytest.raises(TypeError, match="takes a function or a coroutine, not int"):
            run.spawn(1)  # type: ignore[arg-type]
        gc.collect()
        return "refused"

    assert asked(agent) == "refused"


def test_a_coroutine_after_the_end_is_refused_and_closed() -> None:
    runs: list[Run] = []

    async def agent(run: Run) -> str:
        runs.append(run)
        return "done"

    assert asked(agent) == "done"
    with pytest.raises(Exception, match="has ended"):
        runs[0].spawn(doubled(1))
    gc.collect()


def test_what_a_coroutine_raises_fails_the_run() -> None:
    async def bad() -> None:
        raise KeyError("gone")

    async def agent(run: Run) -> str:
        await run.spawn(bad())
        return ""

    with pytest.raises(RunFailed, match="gone"):
        asked(agent)


@pytest.mark.parametrize("name", ["scripted:demo", "scripted:hello"])
def test_a_scripted_model_that_serves_people_remembers_no_requests(name: str) -> None:
    model = find_model(name)
    assert isinstance(model, ScriptedModel)

    async def main() -> None:
        async with Host(Agent(name="a", model=model), store="memory://") as host:
            for number in range(5):
                await host.session(str(number)).ask("hello")

    asyncio.run(main())
    assert model.requests == []


def test_a_scripted_model_of_tests_remembers_the_newest_requests() -> None:
    model = ScriptedModel("yes", keep_requests=3)

    async def main() -> None:
        async with Host(Agent(name="a", model=model), store="memory://") as host:
            for number in range(5):
                await host.session(str(number)).ask(str(number))

    asyncio.run(main())
    assert [request.messages[-1].content for request in model.requests] == ["2", "3", "4"]  # type: ignore[union-attr]
