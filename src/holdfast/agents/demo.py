"""The demo agent, for trying out stops and crashes: its commands do real work and need no API key.

The agent is replayable, because its tasks, threads and programs run in idempotent calls through `Run.call`. If the
server is killed during a run, the run resumes after the restart, and reports that it has resumed.
"""

from __future__ import annotations

import asyncio
import functools
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

from holdfast.agents.agent import Agent
from holdfast.agents.run import Call, Run
from holdfast.runtime import Scope, current_interrupt

__all__ = ["HELP", "agent"]

HELP = """\
I am the demo agent. I need no key, and what I do is real work that you can stop, kill and resume:

  count <text>    count the words of a text (any other request is counted too)
  steps <n>       n steps of half a second; kill -9 the server in the middle and start it again
  stream <n>      emit n words slowly
  parallel <n>    n branches at once: tasks, threads and process trees in turn
  tree            a tree of stubborn processes that ignore SIGTERM, until you stop me
  child <request> hand the request to a child agent
  resist <s>      ignore the interrupt for s seconds while I clean up
  background <s>  work for s seconds after this run, then report back as a message
  fail            raise an error
  help            this text
"""

PACE_S = 0.5
GRACE_S = 0.5
"""Grace period of the stubborn programs, so that a stop of them takes less than a second."""

_LIMIT = 1000
_TREE_S = 3600.0
_STUBBORN = """\
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
time.sleep(float(sys.argv[1]))
"""


def count_words(text: str) -> int:
    """Count the words of the text."""
    return len(text.split())


async def _nap(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


def _nap_in_thread(seconds: float) -> float:
    interrupt = current_interrupt()
    assert interrupt is not None  # it runs in a call
    interrupt.sleep_blocking(seconds)
    return seconds


async def _run_tree(call: Call, *, seconds: float = _TREE_S) -> int:
    """Run a program that forks, leaves its session and ignores SIGTERM; return its exit code."""
    async with Scope("stubborn programs", grace_s=GRACE_S) as scope:
        process = await scope.process([sys.executable, "-S", "-c", _STUBBORN, str(seconds)], name="stubborn tree")
        await call.output(f"process tree {process.pid}\n")
        return await process.wait()


async def _count(run: Run, text: str) -> None:
    words = await run.call(count_words, text, idempotent=True)
    await run.emit(f"{words} word{'' if words == 1 else 's'}.")


async def _steps(run: Run, text: str) -> None:
    total = _number(text, 5)
    for number in range(1, total + 1):
        await run.step(f"step {number} of {total}")
        await run.call(_nap, PACE_S, name=f"step {number}", idempotent=True)
        await run.emit(f"Step {number} of {total} is done.\n")
    if run.attempt > 1:
        await run.emit(f"{run.replayed} of them were not done again: their results were in the journal.\n")


async def _stream(run: Run, text: str) -> None:
    for number in range(1, _number(text, 20) + 1):
        await run.emit(f"word{number} ")
        await run.interrupt.sleep(PACE_S / 5)


async def _parallel(run: Run, text: str) -> None:
    def branch(number: int) -> Callable[[], Awaitable[str]]:
        async def work() -> str:
            match number % 3:
                case 1:
                    await run.call(_nap, PACE_S, name="task", idempotent=True)
                    return "task"
                case 2:
                    await run.call(_nap_in_thread, PACE_S, name="thread", idempotent=True)
                    return "thread"
                case _:
                    await run.call(functools.partial(_run_tree, seconds=PACE_S), name="process tree", idempotent=True)
                    return "process tree"

        return work

    total = _number(text, 6)
    await run.emit(f"{total} branches at once.\n")
    done = await run.parallel(*(branch(number) for number in range(1, total + 1)))
    kinds = ", ".join(f"{done.count(kind)} × {kind}" for kind in ("task", "thread", "process tree") if kind in done)
    await run.emit(f"All are done: {kinds}.")


async def _tree(run: Run, text: str) -> None:
    await run.emit(
        f"A tree of stubborn processes is up; they ignore SIGTERM. Interrupt me: after {GRACE_S:g} s, none is left.\n"
    )
    await run.call(_run_tree, name="process tree", idempotent=True, timeout_s=_TREE_S + 100.0)


async def _child(run: Run, text: str) -> None:
    answer = await run.delegate(agent, text or "count the words of this")
    await run.emit(f"The child answered: {answer}")


async def _resist(run: Run, text: str) -> None:
    seconds = min(float(_number(text, 2)), 60.0)
    await run.emit(f"Interrupt me: I will clean up for {seconds:g} s first.\n")
    try:
        await run.interrupt.sleep(600.0)
    finally:
        async with run.interrupt.shield():
            await asyncio.sleep(seconds)


async def _background(run: Run, text: str) -> None:
    seconds = float(_number(text, 5))

    async def work() -> str:
        await asyncio.sleep(seconds)
        return f"the background work of {seconds:g} s is done"

    run.background(work, name="background")
    await run.emit(f"In the background for {seconds:g} s: an interrupt leaves it alone, a stop ends it.")


async def _fail(run: Run, text: str) -> None:
    raise RuntimeError(text or "it was asked to fail")


async def _help(run: Run, text: str) -> None:
    await run.emit(HELP)


_REQUESTS: dict[str, Callable[[Run, str], Awaitable[None]]] = {
    "count": _count,
    "steps": _steps,
    "stream": _stream,
    "parallel": _parallel,
    "tree": _tree,
    "child": _child,
    "resist": _resist,
    "background": _background,
    "fail": _fail,
    "help": _help,
}


def _number(text: str, default: int) -> int:
    found = re.search(r"\d+", text)
    return default if found is None else max(1, min(int(found[0]), _LIMIT))


async def _work(run: Run) -> AsyncIterator[str]:
    """Handle each message of the run: look up its command and run it."""
    if run.attempt > 1:
        yield f"(Resumed after a restart: this is attempt {run.attempt} of the same run.)\n"
    for number, message in enumerate(run.messages):
        if number:
            yield "\n"
        word, _, rest = message.content.strip().partition(" ")
        request = _REQUESTS.get(word.lower().rstrip(":"))
        if request is None:
            await _count(run, message.content)
            if number == len(run.messages) - 1:
                yield " Send help to see what else I can do."
        else:
            await request(run, rest.strip())


agent = Agent(name="demo", work=_work, replayable=True, description="a scripted workbench; send help")
"""The default agent of `holdfast serve`."""
