"""Readers of a storm: they connect, read at their own pace, disconnect, and resume at their cursor."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

from holdfast.errors import ServerUnreachable, StorageError, Unavailable
from holdfast.proof.history import ReaderClosed, ReaderConnected, ReaderGap, ReaderReceived, digest
from holdfast.proof.limits import Limits
from holdfast.proof.storm.access import HostAccess
from holdfast.proof.storm.recorder import StormRecorder
from holdfast.protocol.events import Gap, format_cursor

__all__ = ["StormReader"]

_FRAMES = 64


class StormReader:
    """One reader of one session, which uses many connections in succession.

    The attribute ``number`` is the session's public number, or 0 while the number is unknown.

    Parameters:
        name: name of the reader in the history.
        where: principal and key of the session.
        chance: source of all random choices.
    """

    def __init__(
        self, access: HostAccess, recorder: StormRecorder, name: str, where: tuple[str, str], *, chance: random.Random
    ) -> None:
        self.name = name
        self.where = where
        self.number = 0
        self.position = 0
        self._access = access
        self._recorder = recorder
        self._chance = chance
        self._connection = 0
        self._frames: list[tuple[int, str]] = []
        self._patient = chance.random() < 0.5
        self._slow_s = 0.02 if chance.random() < 0.15 else 0.0

    async def roam(self) -> None:
        """Connect and disconnect repeatedly, until cancelled."""
        while True:
            await self._access.up.wait()
            if self.number:
                await self._visit(self._chance.uniform(0.2, 3.0), until=None)
            await asyncio.sleep(self._chance.uniform(0.01, 0.3))

    async def catch_up(self, newest: int, limits: Limits) -> None:
        """Read up to the event with seq `newest`, and record whether that event arrived within ``answer_s``."""
        if self.number and self.position < newest:
            await self._visit(limits.answer_s, until=newest)

    async def _visit(self, seconds: float, until: int | None) -> None:
        principal, key = self.where
        self._connection += 1
        self._recorder.note(
            ReaderConnected,
            reader=self.name,
            connection=self._connection,
            principal=principal,
            session=key,
            after=self.position,
        )
        why = "lost"
        try:
            async with asyncio.timeout(seconds):
                why = await self._read(until)
        except TimeoutError:
            why = "left" if until is None else "stalled"
        except asyncio.CancelledError:
            why = "left"
            raise
        except (ServerUnreachable, StorageError, Unavailable) as error:
            why = "ended" if "ended the stream" in error.message else "lost"
        finally:
            self._flush()
            self._recorder.note(ReaderClosed, reader=self.name, connection=self._connection, why=why)

    async def _read(self, until: int | None) -> str:
        session = self._access.watching(*self.where, patient=self._patient and until is None)
        after = format_cursor(self.position, self.number) if self.position else None
        async with aclosing(session.events(after=after)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Gap):
                    self._flush()
                    self._recorder.note(
                        ReaderGap,
                        reader=self.name,
                        connection=self._connection,
                        after=event.after,
                        until=event.until,
                        reason=event.reason,
                    )
                    self.position = event.until
                    continue
                self._frames.append((event.seq, digest(event)))
                self.position = event.seq
                if len(self._frames) >= _FRAMES or event.kind == "run.finished":
                    self._flush()
                if until is not None and event.seq >= until:
                    return "caught_up"
                if self._slow_s:
                    await asyncio.sleep(self._slow_s)
        return "ended"

    def _flush(self) -> None:
        if self._frames:
            self._recorder.note(
                ReaderReceived, reader=self.name, connection=self._connection, frames=tuple(self._frames)
            )
            self._frames = []
