"""Values that are set once, from any thread."""

from __future__ import annotations

import asyncio
import threading

from holdfast.runtime.oneshot import Oneshot


def test_waiters_of_one_loop_are_woken_together_even_if_the_setting_thread_pauses_between_them() -> None:
    async def main() -> None:
        value: Oneshot[int] = Oneshot()
        woken, may_go_on = asyncio.Event(), threading.Event()

        async def first() -> None:
            await value.wait()
            woken.set()

        async def second() -> None:
            await value.wait()

        one = asyncio.create_task(first())
        await asyncio.sleep(0)
        value.add(lambda: may_go_on.wait(10))
        other = asyncio.create_task(second())
        await asyncio.sleep(0)
        setting = asyncio.create_task(asyncio.to_thread(value.set, 1))
        try:
            await asyncio.wait_for(woken.wait(), 10)
            await asyncio.sleep(0)
            assert other.done(), "the second waiter learns of the value together with the first one"
        finally:
            may_go_on.set()
            await asyncio.gather(one, other, setting)

    asyncio.run(main())


def test_a_cancelled_waiter_leaves_the_others_waiting() -> None:
    async def main() -> None:
        value: Oneshot[int] = Oneshot()
        cancelled, stays = asyncio.create_task(value.wait()), asyncio.create_task(value.wait())
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert not stays.done()
        assert value.set(2)
        assert await stays == 2
        assert await value.wait() == 2

    asyncio.run(main())


def test_a_value_may_be_set_after_a_loop_of_its_waiters_was_closed() -> None:
    value: Oneshot[int] = Oneshot()
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(value.wait())
    loop.run_until_complete(asyncio.sleep(0))
    waiting.cancel()
    loop.run_until_complete(asyncio.wait([waiting]))
    loop.close()
    assert value.set(3)
    assert value.wait_blocking(0) == 3
