"""Channels with one fault each. Each names the check that finds it."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from holdfast.channels import Delivery, Incoming, Receive
from holdfast.errors import DeliveryFailed
from holdfast.runtime import detached
from tests.testing.suites.maildir_channel import MaildirChannel

FAULTS: dict[str, type[MaildirChannel]] = {}


def found_by(*checks: str) -> Callable[[Any], Any]:
    """The checks that find it."""

    def note(channel: Any) -> Any:
        FAULTS.update(dict.fromkeys(checks, channel))
        return channel

    return note


@found_by("what_people_write_comes_in_with_its_address_and_id")
class Strips(MaildirChannel):
    async def _take(self, address: str, receive: Receive) -> None:
        async def stripped(incoming: Incoming) -> None:
            first = incoming.content.partition("\n")[0]
            await receive(Incoming(address=address, incoming_id=incoming.incoming_id, content=first))

        await super()._take(address, stripped)


@found_by("messages_of_one_address_come_in_order_and_one_by_one")
class AllAtOnce(MaildirChannel):
    async def _take(self, address: str, receive: Receive) -> None:
        folder = self._root / address / "in"

        async def one(path: Path) -> None:
            await receive(Incoming(address=address, incoming_id=path.name, content=path.read_text()))
            path.rename(folder / "taken" / path.name)

        await asyncio.gather(*(one(path) for path in sorted(folder.glob("*.txt"))), return_exceptions=True)


@found_by(
    "what_was_not_taken_comes_again_under_its_id",
    "what_was_being_taken_when_the_channel_ended_comes_again",
)
class AcknowledgesFirst(MaildirChannel):
    async def _take(self, address: str, receive: Receive) -> None:
        folder = self._root / address / "in"
        for path in sorted(folder.glob("*.txt")):
            taken = path.rename(folder / "taken" / path.name)
            try:
                await receive(
                    Incoming(address=address, incoming_id=f"{address}/{path.name}", content=taken.read_text())
                )
            except OSError:
                continue


_numbers = itertools.count()


@found_by("what_was_taken_comes_again_under_its_id_or_not_at_all")
class NumbersAnew(MaildirChannel):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        for path in root.glob("*/in/taken/*.txt"):
            path.rename(path.parent.parent / path.name)

    async def _take(self, address: str, receive: Receive) -> None:
        async def numbered(incoming: Incoming) -> None:
            number = str(next(_numbers))
            await receive(Incoming(address=address, incoming_id=number, content=incoming.content))

        await super()._take(address, numbered)


@found_by("deliveries_arrive_whole_and_in_order")
class Cuts(MaildirChannel):
    async def deliver(self, delivery: Delivery) -> None:
        short = delivery.content[:100]
        await super().deliver(Delivery(delivery_id=delivery.delivery_id, address=delivery.address, content=short))


@found_by("a_repeated_delivery_is_shown_once_or_marked", "a_cancelled_delivery_may_be_made_again")
class ForgetsIds(MaildirChannel):
    async def deliver(self, delivery: Delivery) -> None:
        fresh = f"{delivery.delivery_id}-{next(_numbers)}"
        await super().deliver(Delivery(delivery_id=fresh, address=delivery.address, content=delivery.content))
        await asyncio.sleep(0)


@found_by("a_first_attempt_that_only_looks_like_a_repeat_is_shown")
class ComparesTexts(MaildirChannel):
    async def deliver(self, delivery: Delivery) -> None:
        out = self._root / delivery.address / "out"
        if all(path.read_text() != delivery.content for path in out.glob("*.txt")):
            await super().deliver(delivery)


@found_by("a_failed_delivery_says_whether_to_try_again")
class HopesForTheBest(MaildirChannel):
    async def deliver(self, delivery: Delivery) -> None:
        try:
            await super().deliver(delivery)
        except DeliveryFailed:
            return


@found_by("what_it_delivers_does_not_come_in")
class HearsItself(MaildirChannel):
    async def _take(self, address: str, receive: Receive) -> None:
        await super()._take(address, receive)
        for path in sorted((self._root / address / "out").glob("*.txt")):
            await receive(Incoming(address=address, incoming_id=path.name, content=path.read_text()))


@found_by("an_outage_ends_by_itself")
class GivesUp(MaildirChannel):
    async def _look(self, receive: Receive) -> None:
        while self._root.is_dir():
            for address in self._addresses():
                await self._take(address, receive)
            await asyncio.sleep(0.001)


_kept: list[asyncio.Task[None]] = []


@found_by("a_closed_channel_leaves_nothing_behind")
class KeepsATask(MaildirChannel):
    @asynccontextmanager
    async def open(self, receive: Receive) -> AsyncIterator[None]:
        async def for_ever() -> None:
            await asyncio.get_running_loop().create_future()

        with detached():
            _kept.append(asyncio.create_task(for_ever(), context=contextvars.Context()))
        async with super().open(receive):
            yield


class KeepsAThread(MaildirChannel):
    """Found by what finds a kept task, too."""

    @asynccontextmanager
    async def open(self, receive: Receive) -> AsyncIterator[None]:
        with detached():
            threading.Thread(target=go_on.wait, args=(30,), name="of the channel", daemon=True).start()
        async with super().open(receive):
            yield


go_on = threading.Event()
"""Ends the threads of `KeepsAThread`."""


class Marks(MaildirChannel):
    """No fault: a network without ids, in which repeats are marked."""

    async def deliver(self, delivery: Delivery) -> None:
        mark = "(again) " if delivery.attempt > 1 else ""
        fresh = f"{delivery.delivery_id}-{next(_numbers)}"
        await super().deliver(Delivery(delivery_id=fresh, address=delivery.address, content=mark + delivery.content))
