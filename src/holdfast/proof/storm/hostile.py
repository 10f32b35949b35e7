"""A hostile principal in a storm: one user with a valid key who attacks the server while the others work.

The principal opens exports, transcripts and event streams without reading them. It sends more messages than a mailbox
holds and more writes than its rate limit allows, and opens more streams than its limit allows. It pipelines requests,
and sends incomplete request heads or single bytes. It also uploads files, creates schedules, interrupts idle sessions,
and reads with keys that are being revoked. Its agents run programs that try to leave their wall, and bombs: programs
that use more than its quotas. Messages that the
principal sends through its own `Load` are part of the history, so each accepted message is judged like any other. For
each kind of action, the history records how often the action was done, had an effect, and was refused.

Invariants

- The hostile principal uses only its own keys, and connects only to the storm's own server on loopback.
- The hostile principal's connections for each kind of action, and its uploaded bytes, are limited.
- One bomb is thrown at a time, so that each is ended for the resource that it takes.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal

import msgspec
import psutil

from holdfast import ids
from holdfast.client import Client
from holdfast.clock import system_clock
from holdfast.errors import HoldfastError, LimitExceeded, UnknownSession
from holdfast.proof.history import BombThrown, HoldingRead, HostileAct, HostileActed, StreamRevoked
from holdfast.proof.raw_connection import RawConnection
from holdfast.proof.storm.access import RemoteAccess
from holdfast.proof.storm.agent import PLAIN, REPLAYABLE
from holdfast.proof.storm.bombs import BOMBS, Bomb
from holdfast.proof.storm.bounds import HOSTILE
from holdfast.proof.storm.load import Load
from holdfast.proof.storm.past_events import past_events
from holdfast.proof.storm.plan import Piece, Plan, encode_plan
from holdfast.proof.storm.recorder import StormRecorder
from holdfast.proof.storm.server import OwnServer
from holdfast.proof.storm.session import StormSession
from holdfast.proof.storm.watch import note_processes
from holdfast.protocol.events import RunStarted

__all__ = ["ACTS", "Hostile"]

ACTS = (
    "unread exports",
    "unread transcripts",
    "unread streams",
    "streams to the bound",
    "flooded mailboxes",
    "flooded writes",
    "pipelined requests",
    "half heads",
    "slow drips",
    "large uploads",
    "schedules",
    "idle interrupts",
    "revoked streams",
    "wall probes",
    *(bomb.name for bomb in BOMBS),
)
"""Actions of the hostile principal. The storm fails if one of these actions never has an effect.

Where programs run without walls, no bombs are thrown."""

_HELD = 24
_POURS = 4
_PIPELINED = 64
_WRITERS, _WRITES = 16, 60
_UPLOAD_BYTES, _UPLOADS = 2_000_000, 24
_SCHEDULES = 5
_DRIPS = 20
_DRIP_S = 0.02
_ANSWER_S = 10.0
_BOMB_S = 60.0
_STREAMED_S = 0.5
_SILENT_S = 3.0
_WORD_S = 0.2
_WORDS: tuple[Piece, ...] = ("emit",) * 20
_CHUNK_BYTES = 1 << 16
_NAP_S = 0.2
_PROBES: tuple[Piece, ...] = ("probe",) * 3
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_REFUSED = frozenset({429, 503})


class _Key(msgspec.Struct):
    key_id: str


class _Made(msgspec.Struct):
    key: _Key
    secret: str


class Hostile:
    """The actions of one hostile principal. Use this class on one event loop only.

    Parameters:
        recorder: recorder of the history.
        server: the storm's own server.
        access: access to the server as the hostile principal.
        admin: administrator's client, which creates and revokes additional keys of the hostile principal.
        key: first API key of the hostile principal.
        port: the server's port.
        streams: the server's limit on open event streams per principal.
        load: load on the hostile principal's own sessions; its messages are part of the history.
        bombs: whether to throw bombs, for which programs must run behind walls.
        seed: random seed.
    """

    def __init__(
        self,
        recorder: StormRecorder,
        server: OwnServer,
        access: RemoteAccess,
        admin: Client,
        *,
        key: str,
        port: int,
        streams: int,
        load: Load,
        bombs: bool,
        seed: int,
    ) -> None:
        self.load = load
        self._recorder = recorder
        self._server = server
        self._access = access
        self._admin = admin
        self._key = key
        self._port = port
        self._streams = streams
        self._chance = random.Random(f"{seed}/hostile")
        self._large = StormSession(HOSTILE, f"{load.prefix}-large", REPLAYABLE, self._chance)
        self._prober = StormSession(HOSTILE, f"{load.prefix}-prober", REPLAYABLE, self._chance)
        self._bomber = StormSession(HOSTILE, f"{load.prefix}-bomber", PLAIN, self._chance)
        self._throws = bombs
        self._bombs = itertools.cycle(BOMBS)
        self._acts = ACTS if bombs else tuple(name for name in ACTS if name not in {bomb.name for bomb in BOMBS})
        self._idle = f"{load.prefix}-idle"
        self._did: Counter[str] = Counter()
        self._felt: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._held: dict[str, deque[RawConnection]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._uploads = 0
        self._schedules: list[str] = []
        self._timed = f"{load.prefix}-timed"
        self.runs: set[str] = set()
        """The ids of runs whose logs the history does not have, as far as `end` found them."""
        load.others += (self._large, self._prober, *((self._bomber,) if bombs else ()))
        for session in load.sessions:
            session.readers.clear()  # it reads in its own way

    def begin(self) -> None:
        """Start or resume all actions; each action is repeated until `let_go` or `end` is called."""
        acts: dict[str, Callable[[], Awaitable[None]]] = {
            "unread exports": lambda: self._unread("unread exports", f"/v1/sessions/{self._large.key}/export"),
            "unread transcripts": lambda: self._unread(
                "unread transcripts", f"/v1/sessions/{self._large.key}/transcript"
            ),
            "unread streams": lambda: self._unread("unread streams", f"/v1/sessions/{self._large.key}/events"),
            "streams to the bound": self._too_many_streams,
            "flooded mailboxes": self._flood_mailbox,
            "flooded writes": self._flood_writes,
            "pipelined requests": self._pipeline,
            "half heads": self._half_head,
            "slow drips": self._drip,
            "large uploads": self._upload,
            "schedules": self._schedule,
            "idle interrupts": self._interrupt_idle,
            "revoked streams": self._revoked_stream,
            "wall probes": self._probe_walls,
        }
        if self._throws:
            acts["bombs"] = lambda: self._throw(next(self._bombs))
        self._tasks = [asyncio.create_task(self._repeat(act), name=f"hostile {name}") for name, act in acts.items()]

    async def prepare(self) -> None:
        """Start the hostile load, and create the large session and the idle session that the actions use.

        The server must be up.
        """
        self.load.start()
        for number in range(_POURS):
            plan = Plan(name=f"{self.load.prefix}pour{number}", pieces=("pour",), span_s=0.0)
            await self._pour(plan)
        await self._access.session(HOSTILE, self._idle).send(
            encode_plan(Plan(name=f"{self.load.prefix}idle", pieces=("emit",), span_s=0.0)), agent=REPLAYABLE
        )

    async def end(self) -> None:
        """Release everything, record how often each action was done, and stop the hostile load. The server must be up.

        If an action or the load has failed, its error is raised.
        """
        await self.let_go()
        for schedule_id in self._schedules:
            with suppress(HoldfastError):
                await self._access.client(HOSTILE).find_schedule(schedule_id).delete()
        self._recorder.note(
            HostileActed,
            acts=tuple(
                HostileAct(name=name, did=self._did[name], felt=self._felt[name], refused=self._refused[name])
                for name in self._acts
            ),
        )
        await self.load.stop()
        for key in (self._idle, self._timed):
            with suppress(UnknownSession):
                async for event in past_events(self._access.session(HOSTILE, key)):
                    if isinstance(event, RunStarted):
                        self.runs.add(event.run_id)

    async def abandon(self) -> None:
        """Stop everything at once, and record nothing more."""
        with suppress(Exception):
            await self.let_go()
        await self.load.abandon()

    async def let_go(self) -> None:
        """Stop all actions, and drop every open connection. If an action has failed, its error is raised."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for held in self._held.values():
            while held:
                held.popleft().drop()
        for end in ends:
            if isinstance(end, Exception):
                raise end

    @property
    def broken(self) -> BaseException | None:
        """The error with which an action or the hostile load failed, if any."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                return task.exception()
        return self.load.broken

    def unfelt(self) -> list[str]:
        """Return the actions that have had no effect yet."""
        return [name for name in self._acts if not self._felt[name]]

    def read_holdings(self, moment: Literal["before", "beside", "after"] = "beside") -> None:
        """Record the memory use and the number of descriptors of the server's process, if the process is alive.

        The number is 0 if this user may not see it: a server hides its descriptors from all but root.
        """
        with suppress(psutil.Error, HoldfastError):
            process, descriptors = psutil.Process(self._server.pid), 0
            with suppress(psutil.AccessDenied):
                descriptors = process.num_fds()
            self._recorder.note(
                HoldingRead,
                incarnation=self._server.incarnation,
                moment=moment,
                memory=self._server.memory,
                descriptors=descriptors,
            )

    async def _repeat(self, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._access.up.wait()
            with suppress(OSError, TimeoutError, HoldfastError):
                await act()
            await asyncio.sleep(_NAP_S * self._chance.uniform(0.5, 1.5))

    # ── what it holds ────────────────────────────────────────────────────────────────────────────────────────────

    async def _line(self, act: str, *, key: str | None = None, small: bool = False, most: int = _HELD) -> RawConnection:
        """Drop the action's oldest connections until fewer than `most` are open, and open a new connection.

        Raises `OSError` if the connection cannot be opened.
        """
        held = self._held.setdefault(act, deque())
        while len(held) >= most:
            held.popleft().drop(reset=True)
        line = RawConnection(self._port, key or self._key)
        held.append(line)
        await line.open(small=small)
        return line

    def _count(self, act: str, status: int) -> bool:
        """Count an action by the HTTP status of the server's answer; return whether the request was accepted."""
        self._did[act] += 1
        let_in, refused = 200 <= status < 300, status in _REFUSED
        self._felt[act] += let_in or refused
        self._refused[act] += refused
        return let_in

    async def _asked(self, act: str, line: RawConnection, method: str, path: str, body: bytes = b"") -> bool:
        """Send a request, and read only the status of the answer; return whether the request was accepted.

        Raises:
            OSError, TimeoutError: if the server does not answer.
        """
        head, body = line.request(method, path, body)
        async with asyncio.timeout(_ANSWER_S):
            await line.say(head + body)
            return self._count(act, await line.status())

    async def _unread(self, act: str, path: str) -> None:
        await self._asked(act, await self._line(act, small=True), "GET", path)

    async def _too_many_streams(self) -> None:
        """Open streams until one is refused, and hold them for a moment."""
        act, path = "streams to the bound", f"/v1/sessions/{self._idle}/events"
        for _ in range(self._streams + 1):
            if not await self._asked(act, await self._line(act, small=True, most=self._streams + 1), "GET", path):
                break
        await asyncio.sleep(_STREAMED_S)
        held = self._held[act]
        while held:
            held.popleft().drop()

    # ── floods ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _pour(self, plan: Plan) -> None:
        await self.load.send(self._large, self.load.message(self._large, plan, "queue"))

    async def _flood_mailbox(self) -> None:
        act = "flooded mailboxes"
        full = self.load.refused["mailbox_full"]
        await self.load.flood()
        self._did[act] += 1
        refused = self.load.refused["mailbox_full"] - full
        self._felt[act] += refused > 0
        self._refused[act] += refused

    async def _flood_writes(self) -> None:
        """Send more writes at once than the principal's rate limit allows, over several connections."""
        act = "flooded writes"
        lines = [await self._line(act) for _ in range(_WRITERS)]
        request = b"".join(lines[0].request("POST", f"/v1/sessions/{self._idle}/interrupt", b'{"reason":"flood"}'))
        answers = await asyncio.gather(*(self._answers(line, request * _WRITES) for line in lines))
        self._did[act] += _WRITERS * _WRITES
        refused = sum(answer.count(b"HTTP/1.1 429") + answer.count(b"HTTP/1.1 503") for answer in answers)
        self._felt[act] += refused > 0
        self._refused[act] += refused

    async def _answers(self, line: RawConnection, requests: bytes) -> bytes:
        """Write all requests, and return what the server answers within a second."""
        answers = bytearray()
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0), asyncio.TaskGroup() as group:
                group.create_task(line.say(requests))
                while chunk := await line.take(_CHUNK_BYTES):
                    answers += chunk
        return bytes(answers)

    async def _pipeline(self) -> None:
        """Send many requests in one write; only the first answer's status is read."""
        act = "pipelined requests"
        line = await self._line(act, small=True)
        head, _ = line.request("GET", f"/v1/sessions/{self._large.key}/transcript")
        async with asyncio.timeout(_ANSWER_S):
            await line.say(head * _PIPELINED)
            self._count(act, await line.status())

    async def _upload(self) -> None:
        if self._uploads < _UPLOADS:
            self._uploads += 1
            act = "large uploads"
            await self._asked(act, await self._line(act), "POST", "/v1/attachments", os.urandom(_UPLOAD_BYTES))

    async def _schedule(self) -> None:
        act = "schedules"
        if len(self._schedules) < _SCHEDULES:
            schedule_id = ids.schedule_id()
            text = encode_plan(Plan(name=schedule_id, pieces=("emit",), span_s=0.0))
            client = self._access.client(HOSTILE)
            self._did[act] += 1
            try:
                await client.schedule(self._timed, text, every_s=1.0, schedule_id=schedule_id, agent=REPLAYABLE)
            except LimitExceeded:
                self._refused[act] += 1
            else:
                self._schedules.append(schedule_id)
            self._felt[act] += 1

    async def _interrupt_idle(self) -> None:
        act = "idle interrupts"
        await self._asked(
            act, await self._line(act), "POST", f"/v1/sessions/{self._idle}/interrupt", b'{"reason":"nothing is on"}'
        )

    async def _probe_walls(self) -> None:
        """Run programs that try to leave their wall, and wait for the last one to end."""
        act = "wall probes"
        plan = Plan(name=f"{self.load.prefix}{ids.message_id()}", pieces=_PROBES, span_s=0.0)
        message = self.load.message(self._prober, plan, "queue")
        self._did[act] += 1
        if await self.load.send(self._prober, message):
            handle = self._access.session(HOSTILE, self._prober.key)
            settled = await handle.wait(message.message_id or "", timeout_s=_ANSWER_S)
            self._felt[act] += settled.state == "completed"

    async def _throw(self, bomb: Bomb) -> None:
        """Throw a bomb, wait until its run has ended, and record what became of it."""
        plan = Plan(name=f"{self.load.prefix}{ids.message_id()}", pieces=("bomb",), span_s=0.0, bomb=bomb.name)
        message = self.load.message(self._bomber, plan, "queue")
        self._did[bomb.name] += 1
        if not await self.load.send(self._bomber, message):
            return
        handle = self._access.session(HOSTILE, self._bomber.key)
        settled = await handle.wait(message.message_id or "", timeout_s=_BOMB_S)
        if settled.state != "completed":
            return
        peak, reported = bomb.result(settled.text)
        self._felt[bomb.name] += reported
        self._refused[bomb.name] += "[refused: " in settled.text
        self._recorder.note(
            BombThrown,
            name=bomb.name,
            run_id=settled.run_id or "",
            quota=bomb.quota,
            overshoot=bomb.overshoot,
            peak=peak,
            reported=reported,
        )
        await note_processes(self._recorder, self._server.storm)

    # ── malformed requests ───────────────────────────────────────────────────────────────────────────────────────

    async def _half_head(self) -> None:
        act = "half heads"
        line = await self._line(act)
        head, _ = line.request("GET", f"/v1/sessions/{self._idle}")
        self._did[act] += 1
        self._felt[act] += await line.say(head[: len(head) // 2])

    async def _drip(self) -> None:
        act = "slow drips"
        line = await self._line(act)
        head, _ = line.request("GET", f"/v1/sessions/{self._idle}")
        self._did[act] += 1
        for byte in head[:_DRIPS]:
            if not await line.say(bytes([byte])):
                return
            await asyncio.sleep(_DRIP_S)
        self._felt[act] += 1

    # ── keys that are revoked ────────────────────────────────────────────────────────────────────────────────────

    async def _revoked_stream(self) -> None:
        """Read a busy stream with a separate key, revoke the key, and record when the last byte arrived."""
        act = "revoked streams"
        body = {"principal": HOSTILE, "role": "user", "label": "to be revoked"}
        made = msgspec.json.decode((await self._admin.request("POST", "/v1/keys", body=body)).content, type=_Made)
        incarnation = self._server.incarnation
        line = await self._line(act, key=made.secret)
        head, _ = line.request("GET", f"/v1/sessions/{self._large.key}/events")
        async with asyncio.timeout(_ANSWER_S):
            await line.say(head)
            if not self._count(act, await line.status()):
                return
        self._felt[act] -= 1  # only the end of the stream counts as an effect
        last_at = [system_clock.monotonic()]
        reading = asyncio.create_task(self._read(line, last_at), name="hostile reader of a revoked stream")
        try:
            await self._talk()
            await asyncio.sleep(_STREAMED_S)
            await self._admin.request("DELETE", f"/v1/keys/{made.key.key_id}")
            revoked_at = system_clock.monotonic()
            await asyncio.wait((reading,), timeout=_SILENT_S)
            ended = reading.done()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        if self._server.incarnation == incarnation and self._access.up.is_set():
            self._felt[act] += ended
            late_s = max(0.0, last_at[0] - revoked_at)
            self._recorder.note(StreamRevoked, key_id=made.key.key_id, late_s=late_s, ended=ended)

    async def _talk(self) -> None:
        """Start a run that emits text continuously, in the principal's large session."""
        plan = Plan(name=f"{self.load.prefix}{ids.message_id()}", pieces=_WORDS, span_s=_WORD_S)
        await self.load.send(self._large, self.load.message(self._large, plan, "interrupt"))

    async def _read(self, line: RawConnection, last_at: list[float]) -> None:
        """Read until the last chunk or the end of the connection; keep the time of the last read in `last_at`."""
        end = b""
        while not end.endswith(_LAST_CHUNK) and (chunk := await line.take(_CHUNK_BYTES)):
            last_at[0] = system_clock.monotonic()
            end = (end + chunk)[-len(_LAST_CHUNK) :]
