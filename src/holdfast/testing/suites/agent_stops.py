"""Checks of the agents' suite for stopping: an interrupt ends everything, and the session keeps working."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence

import psutil

from holdfast.protocol.events import RunFinished
from holdfast.protocol.messages import TreeNode
from holdfast.protocol.stopping import StopReceipt
from holdfast.runtime import check_interrupt, current_interrupt
from holdfast.testing.suites.agent_driver import AgentSubject, Bench, hosted, said, until, within

__all__ = ["STOP_CHECKS"]

_CHECKS: list[Callable[[AgentSubject], Awaitable[None]]] = []
_SLEEPER = (sys.executable, "-S", "-c", "import time; time.sleep(1000)")
_TURNS = 400
_EVERY_TURN = 60
"""The sweep interrupts at each turn of the loop up to this number, then at every seventh turn."""
_STEP_TURNS = 30


def _check(check: Callable[[AgentSubject], Awaitable[None]]) -> Callable[[AgentSubject], Awaitable[None]]:
    _CHECKS.append(check)
    return check


async def _interrupted(bench: Bench, key: str = "s", *, outcome: str = "gone") -> StopReceipt:
    """Interrupt the session's run, check that the receipt has the given outcome, and return the receipt."""
    receipt = await within(bench.session(key).interrupt("enough"), "the interrupt should answer")
    assert isinstance(receipt, StopReceipt)
    named = [f"{left.kind} {left.name}" for left in receipt.abandoned]
    assert receipt.outcome == outcome, f"the outcome is {receipt.outcome} (left: {named or 'nothing'}), not {outcome}"
    return receipt


@_check
async def an_interrupt_ends_an_async_step_at_once(subject: AgentSubject) -> None:
    """An interrupt cancels the waiting step, the step cleans up, and the receipt reports ``gone`` without force."""
    events: list[str] = []

    async def step(text: str) -> str:
        if text == "wait":
            events.append("waits")
            try:
                await asyncio.sleep(1000.0)
            except asyncio.CancelledError:
                events.append("cancelled")
                raise
            finally:
                await asyncio.sleep(0)
                events.append("cleaned up")
        return said(text)

    async with hosted(subject.agent(step)) as bench:
        sent = await bench.session().send("wait")
        await until(lambda: "waits" in events, "the step should begin")
        receipt = await _interrupted(bench)
        assert events == ["waits", "cancelled", "cleaned up"], f"the step's life was {events}"
        assert receipt.forced == (), f"force was needed for {receipt.forced}"
        settled = await bench.session().message(sent.message_id)
        assert settled.state == "interrupted", f"the message is {settled.state}"
        await bench.goes_on()


@_check
async def an_interrupt_at_any_turn_of_the_loop_ends_everything(subject: AgentSubject) -> None:
    """An interrupt at any point of a run leaves nothing behind, and the session's next run works."""
    inside = 0
    stopping = False

    async def step(text: str) -> str:
        nonlocal inside
        inside += 1
        try:
            for _ in range(_STEP_TURNS):
                # After the interrupt, the step must not end by itself, or it might have ended before a slow receipt.
                await asyncio.sleep(1000.0 if stopping else 0.0)
            check_interrupt()
            return said(text)
        finally:
            inside -= 1

    async with hosted(subject.agent(step)) as bench:
        ended_first = turns = 0
        while ended_first < 3 and turns < _TURNS:
            key = f"after {turns} turns"
            sent = await bench.session(key).send("hello")
            for _ in range(turns):
                await asyncio.sleep(0)
            stopping = True
            receipt = await _interrupted(bench, key)
            stopping = False
            assert receipt.forced == (), f"{key}: force was needed for {receipt.forced}"
            assert inside == 0, f"{key}: the receipt is there, but the step is still running"
            settled = await within(bench.session(key).wait(sent.message_id), f"{key}: the message should be settled")
            assert settled.state in ("completed", "interrupted"), f"{key}: the message is {settled.state}"
            ended_first = ended_first + 1 if settled.state == "completed" else 0
            await bench.goes_on(key)
            turns += 1 if turns < _EVERY_TURN else 7


@_check
async def an_interrupt_is_seen_in_a_plain_step(subject: AgentSubject) -> None:
    """A thread that polls its interrupt has ended when the receipt arrives."""
    events: list[str] = []

    def step(text: str) -> str:
        if text == "wait":
            interrupt = current_interrupt()
            events.append("waits" if interrupt is not None else "knows no interrupt")
            try:
                if interrupt is not None:
                    interrupt.sleep_blocking(1000.0)
            finally:
                events.append("ended")
        return said(text)

    async with hosted(subject.agent(step)) as bench:
        await bench.session().send("wait")
        await until(lambda: bool(events), "the step should begin")
        assert events[0] == "waits", "the step's thread sees no interrupt; carry the context into it (contextvars)"
        await _interrupted(bench)
        assert events == ["waits", "ended"], "the receipt reports gone, but the step's thread is still alive"
        await bench.goes_on()


@_check
async def a_plain_step_that_does_not_listen_is_named_and_counts_no_more(subject: AgentSubject) -> None:
    """A stuck thread is in the receipt and the tree and delays no other session; its late result is dropped."""
    gate = threading.Event()
    events: list[str] = []

    def step(text: str) -> str:
        if text == "stuck":
            events.append("waits")
            gate.wait(20.0)
            events.append("returns")
            return "too late"
        return said(text)

    async with hosted(subject.agent(step), grace_s=0.1, abandon_after_s=0.1) as bench:
        try:
            await bench.session().send("stuck")
            await until(lambda: "waits" in events, "the step should begin")
            receipt = await _interrupted(bench, outcome="quarantined")
            assert any(left.kind == "thread" for left in receipt.abandoned), f"it names {receipt.abandoned}"
            assert _threads(await bench.session().tree()), "the tree does not show the thread that was left behind"
            await bench.goes_on()
        finally:
            gate.set()
        await until(lambda: "returns" in events, "the step should return")
        await bench.goes_on()
        await until(lambda: not _threads(bench.host.tree()), "the tree still shows a thread that has ended")
        told = [str(event) for event in await bench.log()]
        assert not any("too late" in one for one in told), "the log contains what the step returned after its run"


def _threads(node: TreeNode) -> list[str]:
    """Return the names of the threads in a tree."""
    own = [node.name] if node.kind == "thread" else []
    return own + [name for child in node.children for name in _threads(child)]


async def _program(subject: AgentSubject, step: Callable[[str], object], pids: list[int]) -> None:
    try:
        async with hosted(subject.agent(step)) as bench:
            await bench.session().send("start")
            await until(lambda: bool(pids), "the step should start a program")
            await _interrupted(bench)
            for pid in pids:
                assert not _lives(pid), f"the receipt reports gone, but the step's program {pid} is alive"
            await bench.goes_on()
    finally:
        for pid in filter(_lives, pids):
            os.kill(pid, signal.SIGKILL)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@_check
async def programs_of_an_async_step_die_with_its_run(subject: AgentSubject) -> None:
    """A program that the step awaits, and another in its own process session, are dead when the receipt arrives."""
    pids: list[int] = []
    programs: list[asyncio.subprocess.Process] = []

    async def step(text: str) -> str:
        if text == "start":
            programs.append(await asyncio.create_subprocess_exec(*_SLEEPER, start_new_session=True))
            programs.append(await asyncio.create_subprocess_exec(*_SLEEPER))
            pids.extend(program.pid for program in programs)
            await programs[1].wait()
        return said(text)

    try:
        await _program(subject, step, pids)
    finally:
        for program in programs:
            await program.wait()


@_check
async def programs_of_a_plain_step_die_with_its_run(subject: AgentSubject) -> None:
    """Programs that a plain function started with `subprocess` are dead when the receipt arrives."""
    pids: list[int] = []

    def step(text: str) -> str:
        if text == "start":
            program = subprocess.Popen(_SLEEPER, start_new_session=os.name == "posix")
            pids.append(program.pid)
            program.wait()
        return said(text)

    await _program(subject, step, pids)


@_check
async def an_interrupt_of_one_session_leaves_the_others_alone(subject: AgentSubject) -> None:
    """Runs of other sessions continue and answer, even if they share resources with the stopped run."""
    inside: set[str] = set()
    release = asyncio.Event()

    async def step(text: str) -> str:
        inside.add(text)
        await release.wait()
        return said(text)

    async with hosted(subject.agent(step)) as bench:
        asks = [asyncio.ensure_future(bench.session(key).ask(f"for {key}")) for key in ("b", "c")]
        sent = await bench.session("a").send("for a")
        await until(lambda: len(inside) == 3, "three steps should run at the same time")
        await _interrupted(bench, "a")
        release.set()
        answers = await within(asyncio.gather(*asks), "the other runs should end")
        for key, answer in zip(("b", "c"), answers, strict=True):
            assert answer.endswith(f"result of for {key}"), f"session {key} got the answer {answer!r}"
        assert (await bench.session("a").message(sent.message_id)).state == "interrupted"


@_check
async def a_newer_message_takes_the_place_of_a_run(subject: AgentSubject) -> None:
    """With the policy ``interrupt``, the run is stopped, its message is settled as interrupted, and the newer message
    is answered."""
    inside: list[str] = []

    async def step(text: str) -> str:
        inside.append(text)
        if text == "old":
            await asyncio.sleep(1000.0)
        return said(text)

    async with hosted(subject.agent(step)) as bench:
        old = await bench.session().send("old")
        await until(lambda: "old" in inside, "the step should begin")
        answer = await within(bench.session().ask("new", policy="interrupt"), "the newer message should be answered")
        assert answer.endswith("result of new"), f"the newer message got the answer {answer!r}"
        settled = await bench.session().message(old.message_id)
        assert settled.state == "interrupted", f"the older message is {settled.state}"
        await bench.sound()


@_check
async def a_run_that_is_over_its_time_is_interrupted(subject: AgentSubject) -> None:
    """The host's deadline stops a run in the same way as a user's interrupt, but with the cause ``deadline``."""

    async def step(text: str) -> str:
        if text == "wait":
            await asyncio.sleep(1000.0)
        return said(text)

    async with hosted(subject.agent(step), run_timeout_s=0.3) as bench:
        sent = await bench.session().send("wait")
        settled = await within(bench.session().wait(sent.message_id), "the run should be stopped at its deadline")
        assert settled.state == "interrupted", f"the message is {settled.state}"
        [finished] = [event for event in await bench.log() if isinstance(event, RunFinished)]
        assert finished.cause is not None and finished.cause.kind == "deadline", f"the cause is {finished.cause}"
        await bench.goes_on()


STOP_CHECKS: Sequence[Callable[[AgentSubject], Awaitable[None]]] = tuple(_CHECKS)
