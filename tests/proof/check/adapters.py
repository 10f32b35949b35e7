"""An agent runtime of the standard library alone, that keeps every promise; and the same with one fault each.

``Right`` runs sync tools in processes, kills what a run started, and writes its sessions to a file before it accepts.
A class of `FAULTS` breaks the promise that it is named after, and the probe has to see it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, ClassVar


class Right:
    """Keeps every promise."""

    packages: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.sessions: dict[str, list[dict[str, Any]]] = {}
        self.waiting: dict[str, list[str]] = {}
        self.locks: dict[str, asyncio.Lock] = {}
        self.names: dict[asyncio.Task[str], tuple[str, str]] = {}
        self.ends: dict[str, asyncio.Task[str]] = {}
        self.number = 0
        self.kept: Path

    async def start(self, setting: Any) -> None:
        self.setting = setting
        self.tools = {tool.__name__: tool for tool in (*setting.tools, setting.forced_tool)}
        self.kept = Path(setting.folder) / "kept.json"
        if self.kept.exists():
            self.sessions, self.waiting = json.loads(self.kept.read_text())
        for session, texts in self.waiting.items():
            for text in texts:
                self.begin(session, text)

    def keep(self) -> None:
        new = self.kept.with_suffix(".new")
        new.write_text(json.dumps([self.sessions, self.waiting]))
        new.rename(self.kept)

    async def open(self, session: str, user: str) -> None:
        self.sessions.setdefault(session, [])
        self.waiting.setdefault(session, [])

    async def submit(self, session: str, text: str) -> str:
        self.waiting[session].append(text)
        self.keep()
        return self.begin(session, text)

    def begin(self, session: str, text: str) -> str:
        self.number += 1
        work = f"work-{self.number}"
        task = asyncio.get_running_loop().create_task(self.run(session, text))
        self.ends[work] = task
        self.names[task] = session, work
        task.add_done_callback(lambda task: self.names.pop(task))
        return work

    async def run(self, session: str, text: str) -> str:
        async with self.locks.setdefault(session, asyncio.Lock()):
            entries = [*self.sessions[session], {"role": "user", "content": text}]
            try:
                while True:
                    said, calls = await self.ask(entries)
                    if not calls:
                        break
                    entries.append({"role": "assistant", "content": "", "tool_calls": calls})
                    results = {call["id"]: "interrupted" for call in calls}
                    try:
                        for call in calls:
                            results[call["id"]] = await self.use(call["function"])
                    finally:
                        self.results(entries, results)
                entries.append({"role": "assistant", "content": said})
                return said
            finally:
                self.sessions[session] = entries
                self.waiting[session].remove(text)
                self.keep()

    def results(self, entries: list[dict[str, Any]], results: dict[str, str]) -> None:
        entries.extend({"role": "tool", "tool_call_id": id, "content": text} for id, text in results.items())

    async def use(self, function: dict[str, str]) -> str:
        tool, arguments = self.tools[function["name"]], json.loads(function["arguments"])
        if asyncio.iscoroutinefunction(tool):
            running = asyncio.get_running_loop().create_task(tool(**arguments))
        else:
            running = asyncio.get_running_loop().create_task(self.sync(tool, arguments))
        return str(await self.guarded(running))

    async def guarded(self, running: asyncio.Task[Any]) -> Any:
        before = set(_descendants(os.getpid()))
        try:
            return await running
        except asyncio.CancelledError:
            for pid in _descendants(os.getpid()):
                if pid not in before:
                    os.kill(pid, signal.SIGKILL)
            raise

    async def sync(self, tool: Any, arguments: dict[str, Any]) -> Any:
        file = tool.__code__.co_filename
        program = (
            f"import importlib.util as u, json, sys; s = u.spec_from_file_location('k', {file!r}); "
            "m = sys.modules['k'] = u.module_from_spec(s); s.loader.exec_module(m); "
            f"getattr(m, {tool.__name__!r})(**json.loads(sys.argv[1]))"
        )
        process = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", program, json.dumps(arguments))
        return await process.wait()

    async def ask(self, entries: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        address = self.setting.model_url.removeprefix("http://").removesuffix("/v1")
        host, _, port = address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            body = json.dumps({"model": "fake", "stream": True, "messages": entries}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            return await self.read(reader)
        finally:
            self.hang_up(writer)

    async def read(self, reader: asyncio.StreamReader) -> tuple[str, list[dict[str, Any]]]:
        if b" 200 " not in await reader.readline():
            raise RuntimeError("the model refuses")
        said, calls = "", list[dict[str, Any]]()
        while (line := await reader.readline()) and b"[DONE]" not in line:
            if not line.startswith(b"data: "):
                continue
            delta = json.loads(line[6:])["choices"][0]["delta"]
            said += delta.get("content") or ""
            for piece in delta.get("tool_calls", ()):
                if "id" in piece:
                    calls.append(piece)
                else:
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        return said, calls

    def hang_up(self, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def result(self, work: str) -> str:
        task = self.ends[work]
        await asyncio.wait({task})
        if task.cancelled():
            raise RuntimeError("cancelled")
        del self.ends[work]
        return task.result()

    async def cancel(self, session: str) -> None:
        running = [task for task, (owner, _) in self.names.items() if owner == session]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def transcript(self, session: str) -> list[list[str]]:
        return [[one["role"], one["content"]] for one in self.sessions.get(session, ())]

    async def force(self) -> str:
        return "all sync tools are processes"

    async def live(self) -> list[str]:
        return [work for _, work in self.names.values()]

    async def inbox(self) -> str:
        return "a file is written before submit returns"

    async def close(self) -> None:
        for task in list(self.names):
            task.cancel()


def _descendants(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        try:
            parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except (ValueError, OSError):
            continue
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


# ── one fault each ───────────────────────────────────────────────────────────────────────────────────────────────────


class _NoLock(Right):
    """Runs of a session read the same transcript, and the last one writes."""

    async def run(self, session: str, text: str) -> str:
        self.locks.pop(session, None)
        return await super().run(session, text)


class ManyAtOnce(_NoLock):
    pass


class OneRunAtATime(_NoLock):
    pass


class ModelRequestClosed(Right):
    """The request is read by somebody who is not told of the cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.open_writers: list[asyncio.StreamWriter] = []

    def hang_up(self, writer: asyncio.StreamWriter) -> None:
        self.open_writers.append(writer)


class _Threads(Right):
    """Sync tools run in the loop's pool of threads, which nobody can end."""

    async def sync(self, tool: Any, arguments: dict[str, Any]) -> Any:
        return await asyncio.to_thread(tool, **arguments)


class SyncToolEnded(_Threads):
    pass


class SyncToolEndedByForce(_Threads):
    pass


class StuckToolsDelayNobody(_Threads):
    pass


class LiveWorkListed(_Threads):
    pass


class ProcessTreeEnded(Right):
    """Only the process that the tool itself started is known."""

    async def guarded(self, running: asyncio.Task[Any]) -> Any:
        return await running


class TranscriptValid(Right):
    """A call that was cancelled has no result."""

    def results(self, entries: list[dict[str, Any]], results: dict[str, str]) -> None:
        super().results(entries, {id: text for id, text in results.items() if text != "interrupted"})


class NextRunWorks(Right):
    """A cancel does not give the session free."""

    async def cancel(self, session: str) -> None:
        await super().cancel(session)
        self.locks[session] = asyncio.Lock()
        await self.locks[session].acquire()

    async def run(self, session: str, text: str) -> str:
        if session in self.locks and self.locks[session].locked():
            raise RuntimeError("the session is busy")
        return await super().run(session, text)


class CancelStaysInItsSession(Right):
    """One flag for all."""

    async def cancel(self, session: str) -> None:
        for name in self.sessions:
            await super().cancel(name)


class NoLeaks(Right):
    """Each run leaves a task behind that waits for ever."""

    async def run(self, session: str, text: str) -> str:
        waits = asyncio.get_running_loop().create_task(asyncio.sleep(3600))
        waits.add_done_callback(lambda _: time.monotonic())
        return await super().run(session, text)


class AnswersSurviveKill(Right):
    """It is written when the process ends in good order."""

    def keep(self) -> None:
        pass


class MessagesSurviveKill(Right):
    """A message is accepted before it is written."""

    async def submit(self, session: str, text: str) -> str:
        work = self.begin(session, text)
        asyncio.get_running_loop().call_later(0.5, self.waiting[session].append, text)
        return work

    async def run(self, session: str, text: str) -> str:
        await asyncio.sleep(1.0)
        return await super().run(session, text)


FAULTS: dict[str, type[Right]] = {
    "many at once": ManyAtOnce,
    "one run at a time": OneRunAtATime,
    "model request closed": ModelRequestClosed,
    "sync tool ended": SyncToolEnded,
    "sync tool ended by force": SyncToolEndedByForce,
    "process tree ended": ProcessTreeEnded,
    "transcript valid": TranscriptValid,
    "next run works": NextRunWorks,
    "cancel stays in its session": CancelStaysInItsSession,
    "stuck tools delay nobody": StuckToolsDelayNobody,
    "live work listed": LiveWorkListed,
    "no leaks": NoLeaks,
    "answers survive kill -9": AnswersSurviveKill,
    "messages survive kill -9": MessagesSurviveKill,
}
"""By promise: the runtime that breaks it."""


# ── adapters that do not work ────────────────────────────────────────────────────────────────────────────────────────


class OtherShape(Right):
    """The transcript is of dicts."""

    async def transcript(self, session: str) -> Any:
        return self.sessions[session] or [{}]


class NoJson(Right):
    """An answer that cannot be sent."""

    async def transcript(self, session: str) -> Any:
        return object()


class Garbles(Right):
    """It writes into what is not its own."""

    async def start(self, setting: Any) -> None:
        await super().start(setting)
        for number in range(3, 40):
            try:
                os.write(number, b"garbage\n")
            except OSError:
                continue


class Exits(Right):
    """The process ends without a word."""

    async def start(self, setting: Any) -> None:
        os._exit(3)


class HasHalf(Right):
    """Two of the methods are not there."""

    live = None  # type: ignore[assignment]
    inbox = None  # type: ignore[assignment]


class HangsInOpen(Right):
    """No session ever opens."""

    async def open(self, session: str, user: str) -> None:
        await asyncio.sleep(3600)


# ── runtimes of which a probe learns nothing ─────────────────────────────────────────────────────────────────────────


class OnlyMarks(Right):
    """A cancel is noted, and nothing ends."""

    async def cancel(self, session: str) -> None:
        pass


class RefusesAll(Right):
    """No session takes more than the plain question."""

    async def submit(self, session: str, text: str) -> str:
        if session != "control":
            raise RuntimeError("too busy")
        return await super().submit(session, text)
