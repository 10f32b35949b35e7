"""Conformance suite for the channel port (`holdfast.channels.port`): run it on your own channel.

With pytest::

    @pytest.mark.parametrize("check", CHANNEL_CHECKS, ids=lambda check: check.__name__)
    def test_my_channel_conforms(check, tmp_path):
        run_channel_check(check, lambda: MyNetwork(tmp_path))

The subject creates a `Network`: a small network of the kind that the channel connects to. The suite simulates users of
this network.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from msgspec import structs

from holdfast.channels.port import Channel, Delivery, Incoming
from holdfast.errors import DeliveryFailed
from holdfast.testing.detectors.leaks import Inventory
from holdfast.testing.suites.check_runner import run_check

__all__ = ["CHANNEL_CHECKS", "ChannelCheck", "ChannelSubject", "Copy", "Network", "run_channel_check"]

_PATIENCE_S = 20.0
_QUIET_S = 0.1
"""How long to wait for a message that must not arrive, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A delivery as users see it.

    Parameters:
        content: text of the delivery, without the mark of a possible repeat.
        repeat: whether the delivery is marked as a possible repeat.
    """

    content: str
    repeat: bool = False


class Network(Protocol):
    """A network of the kind that the channel under test connects to, as the network's users see it."""

    @property
    def addresses(self) -> Sequence[str]:
        """Two addresses that exist on the network."""
        ...

    def channel(self) -> Channel:
        """Return a new channel to this network. All channels use the same account, as if the host had restarted."""
        ...

    async def write(self, address: str, content: str) -> str:
        """Write a message as a user, and return the ``incoming_id`` that the network assigned."""
        ...

    async def copies(self, address: str) -> Sequence[Copy]:
        """Return the deliveries that have arrived at an address, oldest first."""
        ...

    def outage(self) -> AbstractAsyncContextManager[None]:
        """Take the network down within the block."""
        ...


ChannelSubject = Callable[[], AbstractAsyncContextManager[Network]]
"""A function that returns a context manager, which yields a network that runs within the block."""
ChannelCheck = Callable[[ChannelSubject], Awaitable[None]]
"""A function that checks one rule for channels and raises `AssertionError` if the channel breaks the rule."""

_CHECKS: list[ChannelCheck] = []


def run_channel_check(check: ChannelCheck, subject: ChannelSubject) -> None:
    """Run one check on a new event loop, for at most 30 seconds.

    Raises:
        AssertionError: if the channel breaks a rule of the port; a note on the error names the rule.
        TimeoutError: if the check takes longer.
    """
    run_check(check, subject, port="holdfast/channels/port.py")


def _check(check: ChannelCheck) -> ChannelCheck:
    _CHECKS.append(check)
    return check


class _Inbox:
    """Inbox that accepts messages as a host does."""

    def __init__(self) -> None:
        self.taken: list[Incoming] = []
        self.refuses = 0
        self.held = asyncio.Event()
        self.held.set()
        self.began = 0
        self.overlapped = False
        self._at_work: set[str] = set()

    async def receive(self, incoming: Incoming) -> None:
        """Accept a message once ``held`` is set; raise `ConnectionError` while ``refuses`` is above 0."""
        address = incoming.address
        self.overlapped = self.overlapped or address in self._at_work
        self._at_work.add(address)
        self.began += 1
        try:
            await self.held.wait()
            if self.refuses:
                self.refuses -= 1
                raise ConnectionError("it was not taken")
            self.taken.append(incoming)
        finally:
            self._at_work.discard(address)

    def of(self, address: str) -> list[Incoming]:
        """Return the accepted messages from an address, each id once, in order of first arrival."""
        return list({one.incoming_id: one for one in self.taken if one.address == address}.values())

    async def until(self, seen: Callable[[], bool], what: str) -> None:
        """Wait until `seen()` returns true. Raise `AssertionError` with the text `what` after a timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                while not seen():  # noqa: ASYNC110 - the people's side has no events
                    await asyncio.sleep(0.002)
        assert seen(), f"{what}; timed out after {_PATIENCE_S:g} s; taken: {[one.content for one in self.taken]}"


@contextlib.asynccontextmanager
async def _open(network: Network, inbox: _Inbox) -> AsyncIterator[Channel]:
    channel = network.channel()
    async with channel.open(inbox.receive):
        yield channel


async def _deliver(channel: Channel, delivery: Delivery) -> None:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await channel.deliver(delivery)
    except DeliveryFailed as error:
        raise AssertionError(f"a delivery failed on a working network: {error}") from error
    except TimeoutError:
        raise AssertionError(f"a delivery on a working network took longer than {_PATIENCE_S:g} s") from None


# ── in ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@_check
async def what_people_write_comes_in_with_its_address_and_id(subject: ChannelSubject) -> None:
    """Text arrives unchanged, whatever its characters and lines, even if a user wrote it while the channel was down."""
    texts = ("before", "grüße\nin two lines 👋", "x" * 2000)
    async with subject() as network:
        inbox = _Inbox()
        here, there = network.addresses[:2]
        ids = [await network.write(here, texts[0])]
        async with _open(network, inbox) as channel:
            assert isinstance(channel, Channel), "a channel has a name, open and deliver"
            ids += [await network.write(here, text) for text in texts[1:]]
            other = await network.write(there, "elsewhere")
            await inbox.until(lambda: len(inbox.of(here)) == 3 and bool(inbox.of(there)), "four messages should come")
        assert [one.content for one in inbox.of(here)] == list(texts), (
            f"came in: {[one.content for one in inbox.of(here)]}"
        )
        assert [one.incoming_id for one in inbox.of(here)] == ids, "the ids are not the network's"
        assert [one.incoming_id for one in inbox.of(there)] == [other], "a message came in under another address"


@_check
async def messages_of_one_address_come_in_order_and_one_by_one(subject: ChannelSubject) -> None:
    """While `receive` processes a message, the next message from the same address waits."""
    async with subject() as network:
        inbox = _Inbox()
        here = network.addresses[0]
        inbox.held.clear()
        async with _open(network, inbox):
            written = [f"number {n}" for n in range(10)]
            for text in written:
                await network.write(here, text)
            await inbox.until(lambda: inbox.began > 0, "the first message should come")
            await asyncio.sleep(_QUIET_S)
            assert not inbox.overlapped, f"{inbox.began} messages of one address are being taken at the same time"
            inbox.held.set()
            await inbox.until(lambda: len(inbox.of(here)) == 10, "all messages should come")
        assert [one.content for one in inbox.of(here)] == written


@_check
async def what_was_not_taken_comes_again_under_its_id(subject: ChannelSubject) -> None:
    """If `receive` raises, the message is not acknowledged but received again, in order; no message gets lost."""
    async with subject() as network:
        inbox = _Inbox()
        here = network.addresses[0]
        inbox.refuses = 2
        async with _open(network, inbox):
            ids = [await network.write(here, f"number {n}") for n in range(3)]
            await inbox.until(lambda: len(inbox.of(here)) == 3, "what was refused should come again")
        assert [one.incoming_id for one in inbox.of(here)] == ids, "the order changed, or the ids did"


@_check
async def what_was_being_taken_when_the_channel_ended_comes_again(subject: ChannelSubject) -> None:
    """A message is acknowledged only after `receive` has returned, so a stop before then does not lose the message."""
    async with subject() as network:
        inbox = _Inbox()
        here = network.addresses[0]
        inbox.held.clear()
        async with _open(network, inbox):
            written = await network.write(here, "hello")
            await inbox.until(lambda: inbox.began == 1, "the message should come")
        assert not inbox.taken
        inbox.held.set()
        async with _open(network, inbox):
            await inbox.until(lambda: bool(inbox.taken), "the message should come again after the restart")
        assert inbox.taken[0].incoming_id == written, "it came again under another id: it would be answered twice"


@_check
async def what_was_taken_comes_again_under_its_id_or_not_at_all(subject: ChannelSubject) -> None:
    """After a restart, a message that was already received comes again with the same id, or not at all."""
    async with subject() as network:
        inbox = _Inbox()
        here = network.addresses[0]
        async with _open(network, inbox):
            first = await network.write(here, "first")
            await inbox.until(lambda: bool(inbox.taken), "the message should come")
        async with _open(network, inbox):
            second = await network.write(here, "second")
            await inbox.until(lambda: inbox.taken[-1].content == "second", "the newer message should come")
        assert [one.incoming_id for one in inbox.of(here)] == [first, second]


# ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@_check
async def deliveries_arrive_whole_and_in_order(subject: ChannelSubject) -> None:
    """Text arrives at its address unchanged, whatever its characters and lines, in the order of the calls."""
    texts = ["one", "grüße\nin two lines 👋", "x" * 2000]
    async with subject() as network, _open(network, _Inbox()) as channel:
        here, there = network.addresses[:2]
        for n, text in enumerate(texts):
            await _deliver(channel, Delivery(delivery_id=f"d{n}", address=here, content=text))
        found = [copy.content for copy in await network.copies(here)]
        assert found == texts, f"delivered {texts}, but people see {found}"
        assert not await network.copies(there), "something arrived at another address"


@_check
async def a_repeated_delivery_is_shown_once_or_marked(subject: ChannelSubject) -> None:
    """If a delivery is attempted again, users see it once, or further copies are marked as repeats."""
    async with subject() as network:
        here = network.addresses[0]
        async with _open(network, _Inbox()) as channel:
            await _deliver(channel, Delivery(delivery_id="d1", address=here, content="hello"))
            await _deliver(channel, Delivery(delivery_id="d1", address=here, content="hello", attempt=2))
        async with _open(network, _Inbox()) as channel:
            await _deliver(channel, Delivery(delivery_id="d1", address=here, content="hello", attempt=3))
        copies = await network.copies(here)
        assert copies and not copies[0].repeat, f"the first attempt is missing, or marked: {copies}"
        assert all(copy.repeat for copy in copies[1:]), f"repeats are not marked: {copies}"
        assert {copy.content for copy in copies} == {"hello"}, f"the text is changed: {copies}"


@_check
async def a_first_attempt_that_only_looks_like_a_repeat_is_shown(subject: ChannelSubject) -> None:
    """The same text with a different delivery id is delivered as a separate message."""
    async with subject() as network, _open(network, _Inbox()) as channel:
        here = network.addresses[0]
        for n in range(2):
            await _deliver(channel, Delivery(delivery_id=f"d{n}", address=here, content="hello"))
        copies = await network.copies(here)
        assert copies == [Copy(content="hello")] * 2, f"two messages with the same text are shown as {copies}"


@_check
async def a_failed_delivery_says_whether_to_try_again(subject: ChannelSubject) -> None:
    """During an outage, a delivery raises `DeliveryFailed` with a retry time; afterwards, the next attempt arrives. For
    an unknown address, a delivery raises `DeliveryFailed` without a retry time."""
    async with subject() as network, _open(network, _Inbox()) as channel:
        here = network.addresses[0]
        async with network.outage():
            error = await _failure(channel, Delivery(delivery_id="d1", address=here, content="hello"))
            assert error.retry_after_s is not None, f"retry_after_s is None, but a retry helps: {error}"
        await _deliver(channel, Delivery(delivery_id="d1", address=here, content="hello", attempt=2))
        copies = await network.copies(here)
        assert [copy.content for copy in copies][:1] == ["hello"] and all(copy.repeat for copy in copies[1:])
        error = await _failure(channel, Delivery(delivery_id="d2", address="unknown address", content="hello"))
        assert error.retry_after_s is None, f"no attempt can reach this address, but retry_after_s is set: {error}"


async def _failure(channel: Channel, delivery: Delivery) -> DeliveryFailed:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await channel.deliver(delivery)
    except DeliveryFailed as error:
        return error
    except TimeoutError:
        raise AssertionError("a failing delivery took too long; raise DeliveryFailed instead of retrying") from None
    except Exception as error:
        raise AssertionError(f"the delivery raised {type(error).__name__} instead of DeliveryFailed") from error
    raise AssertionError("a delivery that cannot arrive was reported as delivered; raise DeliveryFailed instead")


@_check
async def a_cancelled_delivery_may_be_made_again(subject: ChannelSubject) -> None:
    """A cancellation at any turn of the loop ends the attempt; after a retry, users see the message once, or further
    copies are marked as repeats."""
    async with subject() as network, _open(network, _Inbox()) as channel:
        here = network.addresses[0]
        for turns in range(20):
            delivery = Delivery(delivery_id=f"d{turns}", address=here, content=f"number {turns}")
            task = asyncio.create_task(channel.deliver(delivery))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=_PATIENCE_S)
            assert done, f"cancelled after {turns} turns, it keeps running"
            if task.cancelled():
                await _deliver(channel, structs.replace(delivery, attempt=2))
            copies = [copy for copy in await network.copies(here) if copy.content == delivery.content]
            assert copies, f"cancelled after {turns} turns and retried, the message is missing"
            unmarked = [copy for copy in copies if not copy.repeat]
            assert len(unmarked) <= 1, f"cancelled after {turns} turns and retried, it is there twice without a mark"


# ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@_check
async def what_it_delivers_does_not_come_in(subject: ChannelSubject) -> None:
    """A channel does not mistake its own messages for a user's; otherwise, an agent would answer itself forever."""
    async with subject() as network:
        inbox = _Inbox()
        here = network.addresses[0]
        async with _open(network, inbox) as channel:
            for n in range(3):
                await _deliver(channel, Delivery(delivery_id=f"d{n}", address=here, content=f"answer {n}"))
            await network.write(here, "a person")
            await inbox.until(lambda: bool(inbox.taken), "the person's message should come")
            await asyncio.sleep(_QUIET_S)
        found = [one.content for one in inbox.taken]
        assert found == ["a person"], f"came in: {found}"


@_check
async def an_outage_ends_by_itself(subject: ChannelSubject) -> None:
    """Messages written after an outage arrive without a restart of the channel."""
    async with subject() as network:
        inbox = _Inbox()
        here = network.addresses[0]
        async with _open(network, inbox):
            await network.write(here, "before")
            await inbox.until(lambda: len(inbox.of(here)) == 1, "the first message should come")
            async with network.outage():
                await asyncio.sleep(_QUIET_S)
            await network.write(here, "after")
            await inbox.until(lambda: len(inbox.of(here)) == 2, "the message after the outage should come")


@_check
async def a_closed_channel_leaves_nothing_behind(subject: ChannelSubject) -> None:
    """Closing a channel leaves no task, thread or descriptor behind, whatever the channel was doing."""

    async def use() -> None:
        async with subject() as network:
            inbox = _Inbox()
            inbox.held.clear()
            async with _open(network, inbox) as channel:
                await network.write(network.addresses[0], "is being taken")
                await inbox.until(lambda: inbox.began == 1, "the message should come")
                await _deliver(channel, Delivery(delivery_id="d1", address=network.addresses[0], content="hello"))

    await use()  # warm-up: makes what exists once per process
    await asyncio.to_thread(int)
    before = Inventory(("tasks", "threads", "fds"))
    await use()
    left = await asyncio.to_thread(before.left_since, patience_s=5.0)
    assert not left, "left behind: " + "; ".join(left)


CHANNEL_CHECKS: Sequence[ChannelCheck] = tuple(_CHECKS)
