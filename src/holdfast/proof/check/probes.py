"""One probe for each promise. A probe acts on the adapter, observes the effects from outside, and reports them.

The fake model runs in the judge's process behind a real HTTP server, so it observes when each request opens and closes.
Probes observe files, processes and durations from outside, too. A probe raises `Inconclusive` if it could not reach the
point that it tests; this does not count against the framework.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.proof.check.subject import AdapterFailed, Subject
from holdfast.proof.check.verdicts import Verdict, broken, kept
from holdfast.protocol.model import ModelRequest, ToolMessage, UserMessage
from holdfast.testing.model_server import Exchange, ModelServer, Reply
from holdfast.testing.model_server.wires import ChatWire

__all__ = ["PROBES", "Inconclusive", "ProbeBench", "answer"]

_STARTED_S = 20.0
_CANCEL_S = 30.0
_GONE_S = 1.0
_ANSWER_S = 20.0
_LATE_S = 1.0
_MANY = 20
_RUNS = 100
_LEAKED = 20
_BLOCKED = 48
_TOOL_S = 4.0
_IDLE_S = 20.0
_STUCK_S = 8.0


class Inconclusive(Exception):
    """The probe could not reach the point that it tests. The message gives the reason."""


class ProbeBench:
    """The tools of a probe: a started adapter, the fake model, and a folder.

    Parameters:
        subject: the started adapter.
        server: the fake model server.
        folder: folder for the files that tools write while they run.
    """

    def __init__(self, subject: Subject, server: ModelServer, folder: Path) -> None:
        self.subject = subject
        self.server = server
        self.folder = folder
        self._files = 0

    def file(self) -> Path:
        """Return an unused path for a file that a tool writes."""
        self._files += 1
        return self.folder / f"seen-{self._files}"

    async def submit(self, session: str, text: str) -> str:
        """Send a message to a session, and return the id of the resulting work."""
        return str(await self.subject.ask("submit", session, text))

    async def call(self, session: str, tool: str, **arguments: Any) -> tuple[str, Path]:
        """Make the model call a tool that writes a file; return the work's id and the path once the file exists."""
        file = self.file()
        work = await self.submit(session, f"call {tool} {json.dumps({'file': str(file), **arguments})}")
        if not await until(file.exists, _STARTED_S):
            raise Inconclusive(f"the tool {tool} did not start within {_STARTED_S:.0f} s{await self.why(work)}")
        return work, file

    async def why(self, work: str) -> str:
        """Return a description of how the work ended; empty if it has not ended."""
        try:
            return f"; the run answered {await self.subject.ask('result', work, limit_s=0.5)!r}"
        except AdapterFailed as error:
            return f"; the run failed: {short(str(error))}"
        except TimeoutError:
            return ""

    async def streaming(self, session: str, pieces: int, pace_ms: int) -> tuple[str, Exchange]:
        """Make the model stream; return the work's id and the model request once three chunks have been sent."""
        before = len(self.server.exchanges)
        work = await self.submit(session, f"stream {pieces} {pace_ms}")
        try:
            exchange = await self.server.requests(before + 1, limit_s=_STARTED_S)
            await exchange.until(pieces=3, limit_s=_STARTED_S)
        except TimeoutError:
            raise Inconclusive(f"the model was not called within {_STARTED_S:.0f} s{await self.why(work)}") from None
        return work, exchange

    async def cancel(self, session: str) -> float:
        """Cancel the session's work, and return how long the adapter's call took, in seconds."""
        self.subject.look()
        began = time.monotonic()
        await self.subject.ask("cancel", session, limit_s=_CANCEL_S)
        return time.monotonic() - began


Probe = Callable[[ProbeBench], Awaitable[tuple[Verdict, str]]]


def answer(request: ModelRequest) -> Reply:
    """Return the fake model's reply to the newest message.

    The message is ``reply …``, ``stream pieces pace_ms``, ``call tool {…}``, or a tool's result.
    """
    newest = next(
        (one for one in reversed(request.messages) if isinstance(one, UserMessage | ToolMessage)), request.messages[-1]
    )
    if isinstance(newest, ToolMessage):
        return Reply(text="the tool is done")
    order = getattr(newest, "content", "")
    if found := re.search(r"stream (\d+) (\d+)", order):
        return Reply(text="x" * 8 * int(found[1]), pace_s=int(found[2]) / 1000)
    if found := re.search(r"call (\w+) (\{.*\})", order):
        return Reply(calls=[(found[1], json.loads(found[2]))])
    return Reply(text=order.partition("reply ")[2], pace_s=0.02)


async def until(seen: Callable[[], bool], limit_s: float) -> bool:
    """Wait until `seen()` returns true; return False if `limit_s` seconds pass first."""
    end = time.monotonic() + limit_s
    while not seen():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.005)
    return True


def short(text: str) -> str:
    """Return a text on one line, truncated to at most 160 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 160 else f"{line[:157]}…"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


async def _together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run all coroutines concurrently, and return their results or errors."""
    return await asyncio.gather(*work, return_exceptions=True)


# ── many at once ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def _many(bench: ProbeBench) -> tuple[dict[int, str], list[list[str]]]:
    """Send many messages to one session at once; return the outcome of each, and the transcript afterwards."""
    await bench.subject.ask("open", "many", "ann")
    await bench.subject.ask("transcript", "many")  # raises NotOffered before anything is done

    async def one(n: int) -> str:
        try:
            work = await bench.submit("many", f"message-{n:02} reply answer-{n:02}")
            text = str(await bench.subject.ask("result", work, limit_s=60.0))
        except AdapterFailed as error:
            return f"refused: {error}"
        except TimeoutError:
            return "no end in 60 s"
        return "answered" if f"answer-{n:02}" in text else f"another answer: {text}"

    outcomes = await _together(*(one(n) for n in range(_MANY)))
    return dict(enumerate(outcomes)), await bench.subject.ask("transcript", "many")


async def answers(bench: ProbeBench) -> tuple[Verdict, str]:
    """Each of twenty messages sent to a session at once is either answered and stored, or refused with an error."""
    outcomes, entries = await _many(bench)
    said = [text for role, text in entries if role == "assistant"]
    asked = " ".join(text for role, text in entries if role == "user")
    answered = [n for n, outcome in outcomes.items() if outcome == "answered"]
    refused = [outcome for outcome in outcomes.values() if outcome.startswith("refused")]
    odd = [outcome for outcome in outcomes.values() if outcome != "answered" and not outcome.startswith("refused")]
    lost = [n for n in answered if f"message-{n:02}" not in asked or not any(f"answer-{n:02}" in one for one in said)]
    text = f"{len(answered)} answered, {len(refused)} refused, {len(odd)} neither; "
    text += f"{len(lost)} of the answered are not in the transcript afterwards"
    if refused:
        text += f"; a refusal reads: {short(refused[0])}"
    if odd:
        text += f"; one that is neither: {short(odd[0])}"
    if not answered:
        return broken(text)
    return broken(text) if lost or odd else kept(text)


async def one_at_a_time(bench: ProbeBench) -> tuple[Verdict, str]:
    """A session's runs do not overlap: each answer follows its own question."""
    outcomes, entries = await _many(bench)
    if not bench.server.exchanges:
        raise Inconclusive(f"no message was taken: {short(outcomes[0])}")
    spans = sorted((one.opened_at, one.ended_at) for one in bench.server.exchanges if one.ended is not None)
    beside = sum(1 for n, (began, _) in enumerate(spans) if any(end > began for _, end in spans[:n]))
    apart = 0
    for (role, text), (next_role, next_text) in itertools.pairwise([*entries, ["", ""]]):
        if role == "user" and (found := re.search(r"reply (answer-\d\d)", text)):
            apart += next_role != "assistant" or found[1] not in next_text
    text = f"{beside} of {len(spans)} model requests began while another was on; "
    text += f"{apart} questions in the transcript are not followed by their answer"
    return broken(text) if beside or apart else kept(text)


# ── cancel ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def model_closed(bench: ProbeBench) -> tuple[Verdict, str]:
    """A cancel closes the streaming model request, so that no more tokens are billed."""
    await bench.subject.ask("open", "s", "ann")
    _, exchange = await bench.streaming("s", 400, 20)
    began = asyncio.get_running_loop().time()
    took_s = await bench.cancel("s")
    with suppress(TimeoutError):
        await exchange.until(ended=True, limit_s=_GONE_S)
    if exchange.ended != "closed":
        return broken(
            f"cancel returned after {_ms(took_s)}; {_GONE_S:.0f} s later the request is "
            f"{'still open' if exchange.ended is None else 'through'}, {exchange.pieces} pieces were sent"
        )
    return kept(f"closed {_ms(exchange.ended_at - began)} after the cancel, at piece {exchange.pieces} of 401")


async def sync_tool(bench: ProbeBench) -> tuple[Verdict, str]:
    """An ordinary sync tool of a cancelled run stops running."""
    await bench.subject.ask("open", "s", "ann")
    return await _ended(bench, "beat")


async def forced_tool(bench: ProbeBench) -> tuple[Verdict, str]:
    """A sync tool can be given to an agent in such a way that a cancel ends the tool, whatever the tool does."""
    await bench.subject.ask("open", "s", "ann")
    way = await bench.subject.ask("force")
    verdict, evidence = await _ended(bench, "pound")
    return verdict, f"{way}: {evidence}"


async def _ended(bench: ProbeBench, tool: str) -> tuple[Verdict, str]:
    _, file = await bench.call("s", tool, seconds=_TOOL_S)
    took_s = await bench.cancel("s")
    at_return = file.stat().st_size
    await asyncio.sleep(0.5)
    more = file.stat().st_size - at_return
    text = f"cancel returned after {_ms(took_s)}; the tool wrote {more} times in the 0.5 s after that"
    if took_s > 0.8 * _TOOL_S and not more:
        return broken(f"{text}: the cancel waited until the tool had ended by itself")
    return broken(text) if more > 1 else kept(text)


async def process_tree(bench: ProbeBench) -> tuple[Verdict, str]:
    """A cancel kills a program that a tool started and all its children, even a child that has called setsid."""
    await bench.subject.ask("open", "s", "ann")
    _, file = await bench.call("s", "program", seconds=20.0)
    pid = int(file.read_text())
    took_s = await bench.cancel("s")
    began = time.monotonic()
    gone = await until(lambda: not _alive(pid), _GONE_S)
    seen_s = time.monotonic() - began
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    if gone:
        return kept(f"cancel returned after {_ms(took_s)}; the grandchild (setsid) was gone {_ms(seen_s)} later")
    return broken(f"cancel returned after {_ms(took_s)}; the grandchild (setsid) still ran {_GONE_S:.0f} s later")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def valid_transcript(bench: ProbeBench) -> tuple[Verdict, str]:
    """After a cancel during a tool call, the next request to the model is valid for providers."""
    await bench.subject.ask("open", "s", "ann")
    await bench.call("s", "idle", seconds=_IDLE_S)
    await bench.cancel("s")
    before = len(bench.server.exchanges)
    work = await bench.submit("s", "reply next")
    asked = asyncio.ensure_future(bench.server.requests(before + 1, limit_s=_ANSWER_S))
    ended = asyncio.ensure_future(bench.subject.ask("result", work, limit_s=_ANSWER_S))
    await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
    outcome, *_ = await _together(_done(ended)) if ended.done() else [None]
    if len(bench.server.exchanges) == before:
        asked.cancel()
        return broken(f"no further request reaches the model; the run ends with {short(str(outcome))}")
    exchange = bench.server.exchanges[before]
    await _together(_done(asked), _done(ended))
    if "reply next" not in json.dumps(exchange.body["messages"]):
        raise Inconclusive("the cancelled run continued and called the model again")
    roles = [str(message.get("role")) for message in exchange.body["messages"]]
    objection = ChatWire(exchange.body, 0).objection()
    if objection is not None:
        return broken(f"the model gets {', '.join(roles)}, and refuses: {short(objection)}")
    return kept(f"the model gets {', '.join(roles)}, and accepts it")


async def next_run(bench: ProbeBench) -> tuple[Verdict, str]:
    """After a cancel, the session's next message is answered."""
    waits = []
    for session, begin in (
        ("streaming", lambda: bench.streaming("streaming", 400, 20)),
        ("async tool", lambda: bench.call("async tool", "idle", seconds=_IDLE_S)),
        ("sync tool", lambda: bench.call("sync tool", "block", seconds=_TOOL_S)),
    ):
        await bench.subject.ask("open", session, "ann")
        await begin()
        await bench.cancel(session)
        began = time.monotonic()
        try:
            work = await bench.submit(session, "reply forward")
            text = await bench.subject.ask("result", work, limit_s=_ANSWER_S)
        except (AdapterFailed, TimeoutError) as error:
            return broken(f"after a cancel in a {session}: {short(f'{type(error).__name__} {error}')}")
        if "forward" not in text:
            return broken(f"after a cancel in a {session} the answer is {short(repr(text))}")
        waits.append(f"{session} {_ms(time.monotonic() - began)}")
    return kept(f"answered; time after a cancel while in: {', '.join(waits)}")


async def cancel_of_another(bench: ProbeBench) -> tuple[Verdict, str]:
    """A cancel in one session does not affect the runs of other sessions."""
    for session, user in (("one", "ann"), ("two", "ann"), ("three", "bob")):
        await bench.subject.ask("open", session, user)
    stopped, _ = await bench.streaming("one", 400, 20)
    others = [(await bench.streaming(session, 60, 20))[0] for session in ("two", "three")]
    took_s = await bench.cancel("one")
    texts = await _together(*(bench.subject.ask("result", work, limit_s=_ANSWER_S) for work in others))
    hurt = [short(str(text)) for text in texts if text != "x" * 480]
    if hurt:
        return broken(f"cancel returned after {_ms(took_s)}; {len(hurt)} of 2 other runs were hurt: {hurt[0]}")
    with suppress(AdapterFailed):
        try:
            await bench.subject.ask("result", stopped, limit_s=_LATE_S)
        except TimeoutError:
            raise Inconclusive("the cancelled run itself continues, so the result for other runs is unknown") from None
        return broken("the cancelled run itself answered in full")
    return kept("2 of 2 runs of other sessions (one of the same user) came whole")


async def stuck_threads(bench: ProbeBench) -> tuple[Verdict, str]:
    """Stuck tools of one user's cancelled runs do not delay another user's 10 ms tool."""
    await bench.subject.ask("open", "bob", "bob")
    order = f"call nap {json.dumps({'seconds': 0.01})}"

    async def nap() -> float:
        began = time.monotonic()
        text = await bench.subject.ask("result", await bench.submit("bob", order), limit_s=60.0)
        if "the tool is done" not in text:
            raise Inconclusive(f"the run with the tool nap did not complete normally; its answer: {text}")
        return time.monotonic() - began

    await nap()
    usual_s = await nap()
    files = []
    for n in range(_BLOCKED):
        await bench.subject.ask("open", f"ann-{n}", "ann")
        files.append(bench.file())
        order_n = json.dumps({"file": str(files[-1]), "seconds": _STUCK_S})
        await bench.submit(f"ann-{n}", f"call block {order_n}")
    if not await until(lambda: sum(file.exists() for file in files) >= 2, _STARTED_S):
        raise Inconclusive("the tools did not start")
    await asyncio.sleep(0.3)
    begun = sum(file.exists() for file in files)
    cancels = [asyncio.ensure_future(bench.cancel(f"ann-{n}")) for n in range(_BLOCKED)]
    await asyncio.sleep(0.3)
    try:
        slow_s = await nap()
    except TimeoutError:
        slow_s = 60.0
    finally:
        await _together(*(_done(one) for one in cancels))
    text = f"{_ms(slow_s)} beside {_BLOCKED} cancelled runs with stuck tools ({begun} had begun), {_ms(usual_s)} alone"
    return broken(text) if slow_s > usual_s + _LATE_S else kept(text)


async def _done(future: asyncio.Future[Any]) -> Any:
    return await future


# ── what is there ────────────────────────────────────────────────────────────────────────────────────────────────────


async def live_work(bench: ProbeBench) -> tuple[Verdict, str]:
    """Live work can be listed, including a stuck tool that survives a cancel; nothing else is listed."""
    await bench.subject.ask("open", "s", "ann")
    await bench.subject.ask("live")  # raises NotOffered before anything is done
    _, file = await bench.call("s", "beat", seconds=_STUCK_S)
    during = await bench.subject.ask("live")
    await bench.cancel("s")
    size = file.stat().st_size
    left = await bench.subject.ask("live")
    await asyncio.sleep(0.2)
    runs_on = file.stat().st_size > size + 1
    end = time.monotonic() + _STUCK_S + 2
    after = left
    while after and time.monotonic() < end:
        await asyncio.sleep(0.05)
        after = await bench.subject.ask("live")
    text = f"{len(during)} while it runs ({short(', '.join(during))}); {len(left)} after the cancel, "
    text += f"when the tool {'ran on' if runs_on else 'had ended'}; {len(after)} at the end"
    return broken(text) if not during or (runs_on and not left) or after else kept(text)


async def leaks(bench: ProbeBench) -> tuple[Verdict, str]:
    """A hundred runs leave no tasks, threads or file descriptors behind."""
    sessions = [f"s{n}" for n in range(5)]
    for session in sessions:
        await bench.subject.ask("open", session, "ann")

    async def through(session: str) -> None:
        await bench.subject.ask("result", await bench.submit(session, "reply hello"), limit_s=_ANSWER_S)

    async def hundred() -> dict[str, int]:
        for _ in range(_RUNS // len(sessions)):
            if failed := [one for one in await _together(*map(through, sessions)) if one]:
                raise Inconclusive(f"a run failed: {short(repr(failed[0]))}")
        await asyncio.sleep(0.3)
        return dict(await bench.subject.ask("inventory"))

    before = await hundred()  # warm-up: creates what sessions and pools keep for later runs
    after = await hundred()
    text = ", ".join(f"{kind} {count} → {after[kind]}" for kind, count in before.items())
    grown = max(after[kind] - count for kind, count in before.items())
    return broken(text) if grown >= _LEAKED else kept(text)


# ── kill -9 ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def kept_answers(bench: ProbeBench) -> tuple[Verdict, str]:
    """Messages answered before a kill -9 are in the transcript after the restart."""
    await bench.subject.ask("open", "s", "ann")
    await bench.subject.ask("transcript", "s")
    for n in range(5):
        await bench.subject.ask("result", await bench.submit("s", f"message-{n} reply answer-{n}"), limit_s=_ANSWER_S)
    await bench.subject.kill()
    await bench.subject.start()
    await bench.subject.ask("open", "s", "ann")
    entries = " ".join(text for _, text in await bench.subject.ask("transcript", "s"))
    there = sum(f"message-{n}" in entries and entries.count(f"answer-{n}") >= 2 for n in range(5))
    text = f"{there} of 5 questions and answers are there after the restart"
    return kept(text) if there == 5 else broken(text)


async def kept_messages(bench: ProbeBench) -> tuple[Verdict, str]:
    """Messages accepted before a kill -9 are answered after the restart, without being sent again."""
    await bench.subject.ask("open", "s", "ann")
    how = await bench.subject.ask("inbox")
    for n in range(5):
        await bench.submit("s", f"message-{n} reply answer-{n} {'and so on ' * 8}")
    await bench.subject.kill()
    await bench.subject.start()
    await bench.subject.ask("open", "s", "ann")
    end = time.monotonic() + _ANSWER_S
    there: set[int] = set()
    while len(there) < 5 and time.monotonic() < end:
        said = " ".join(text for role, text in await bench.subject.ask("transcript", "s") if role == "assistant")
        there = {n for n in range(5) if f"answer-{n}" in said}
        await asyncio.sleep(0.05)
    text = f"{len(there)} of 5 accepted messages were answered after the restart ({how})"
    return kept(text) if len(there) == 5 else broken(text)


PROBES: dict[str, Probe] = {
    "many at once": answers,
    "one run at a time": one_at_a_time,
    "model request closed": model_closed,
    "sync tool ended": sync_tool,
    "sync tool ended by force": forced_tool,
    "process tree ended": process_tree,
    "transcript valid": valid_transcript,
    "next run works": next_run,
    "cancel stays in its session": cancel_of_another,
    "stuck tools delay nobody": stuck_threads,
    "live work listed": live_work,
    "no leaks": leaks,
    "answers survive kill -9": kept_answers,
    "messages survive kill -9": kept_messages,
}
"""All probes, by the short name of the promise that each tests. A probe's docstring is the full text of its promise."""
