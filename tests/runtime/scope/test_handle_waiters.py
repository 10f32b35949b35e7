"""Tasks of other loops that wait for a member of a scope."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.runtime.scope.handle import Handle
from holdfast.runtime.scope.scope import Scope


@pytest.mark.parametrize("awaited", ["handle", "scope"])
def test_waiters_of_another_loop_are_woken_together_even_if_the_waking_thread_pauses_between_them(awaited: str) -> None:
    ready, end_member, may_go_on = threading.Event(), threading.Event(), threading.Event()
    places: list[tuple[Scope, Handle[Any]]] = []

    async def elsewhere() -> None:
        async with Scope("other", parent=None) as scope:
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()
            places.append((scope, scope.spawn(ended.wait())))
            ready.set()
            await asyncio.to_thread(end_member.wait, 20)
            loop.call_soon(ended.set)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        other_loop = threading.Thread(target=asyncio.run, args=(elsewhere(),))
        other_loop.start()
        assert await asyncio.to_thread(ready.wait, 20)
        [(scope, handle)] = places
        woken = asyncio.Event()

        async def wait() -> None:
            await (handle if awaited == "handle" else scope.join())
            woken.set()

        waiting = [asyncio.create_task(wait()) for _ in range(2)]
        await asyncio.sleep(0)
        plain = loop.call_soon_threadsafe

        def pausing(callback: Callable[..., object], *values: Any, **options: Any) -> asyncio.Handle:
            scheduled = plain(callback, *values, **options)
            if threading.current_thread() is other_loop:
                may_go_on.wait(20)
            return scheduled

        loop.call_soon_threadsafe = pausing  # type: ignore[method-assign,assignment]
        end_member.set()
        try:
            await asyncio.wait_for(woken.wait(), 20)
            await asyncio.sleep(0)
            assert all(task.done() for task in waiting), "they are woken in one iteration of their loop"
        finally:
            may_go_on.set()
            loop.call_soon_threadsafe = plain  # type: ignore[method-assign]
            await asyncio.gather(*waiting)
            await asyncio.to_thread(other_loop.join, 20)

    asyncio.run(main())
