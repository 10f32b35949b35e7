"""The events of commits that nodes send each other over NATS, so that readers at other nodes need not read the store.

- A node sends the events of a session only after their commit, and only while another node follows the session. So the
  store has all events that are sent. A node that starts to follow reads the store until it receives events.
- Messages are encrypted with AES-GCM (NIST SP 800-38D). The key derives from a key in the store, which only the nodes
  can read. So NATS servers see no content, and only nodes can make a node show an event.
- Any message may be lost, late or repeated: receivers use only events that continue what they know, and read the store
  for the others.

Importing this module requires the extra ``nats``.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from holdfast import ids
from holdfast.clock import system_clock
from holdfast.storage.cluster import CommittedEvents, OnEvents, SessionEvents
from holdfast.storage.event_packs import unpack_events

__all__ = ["FOLLOW_S", "LiveEvents"]

FOLLOW_S: Final = 30.0
"""Time for which a node sends the events of a session after another node has asked for them."""
_CHANNELS: Final = 4096
"""Number of channels on which sessions are sent. A node has a subscription for each channel with a session that it
follows, and ignores the other sessions on it."""
_FOLLOWED_LIMIT: Final = 65_536
"""Maximum number of sessions that a node sends because others follow them."""
_MESSAGE_BYTES: Final = 524_288
"""Maximum size of the events in a message. NATS servers accept up to 1 MiB by default."""
_WAITING_BYTES: Final = 16_777_216
"""Maximum size of the events that wait to be sent, and of those that wait for the loop; more are left to reads."""
_EXPIRE_EVERY_S: Final = 5.0
_SENDERS: Final = 256
"""Maximum number of senders whose keys are kept."""
_HEADER: Final = struct.Struct(">32sQQQ")
"""Salt of the sender, number of the message, session, and seq of the last event."""


class LiveEvents:
    """The events that a node sends of its commits, and those that it receives of others.

    All methods are thread-safe, except those under "for the thread".
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listener: tuple[asyncio.AbstractEventLoop, OnEvents] | None = None
        self._key = b""
        self._salt = b""
        self._cipher: AESGCM
        self._ciphers: dict[bytes, AESGCM] = {}
        self._sent = 0
        self._followed_elsewhere: dict[int, float] = {}
        """Sessions that other nodes follow, each with the monotonic time until which it is sent."""
        self._followed: dict[int, float] = {}
        """Sessions that this node follows, each with the monotonic time of the last call of `follow`."""
        self._asked: dict[int, float] = {}
        """Sessions that this node follows, each with the monotonic time at which the others were last asked."""
        self._to_ask: dict[int, None] = {}
        self._channels: Counter[int] = Counter()
        """Number of followed sessions on each channel."""
        self._has_new_channels = False
        self._expire_at = 0.0
        self._waiting: deque[CommittedEvents] = deque()
        self._waiting_bytes = 0
        self._received: list[SessionEvents] = []
        self._received_bytes = 0

    def start(self, key: bytes) -> None:
        """Begin to use the key of the cluster, before anything else, and forget what was before."""
        self._key = key
        self._salt = ids.secret("").encode()
        self._sent = 0
        self._ciphers.clear()
        self._cipher = self._cipher_of(self._salt)
        with self._lock:
            for kept in (self._followed_elsewhere, self._followed, self._asked, self._to_ask, self._channels):
                kept.clear()
            self._waiting.clear()
            self._received.clear()
            self._waiting_bytes = self._received_bytes = 0

    def listen(self, on_events: OnEvents) -> None:
        """Pass the events of other nodes to `on_events`, on the current loop."""
        self._listener = (asyncio.get_running_loop(), on_events)

    def pass_on(self) -> None:
        """Pass on what was received. Called on the loop."""
        with self._lock:
            received, self._received = self._received, []
            self._received_bytes = 0
            listener = self._listener
        if received and listener is not None:
            listener[1](received)

    def follow(self, session: int) -> bool:
        """See `Signals.follow`. Return whether the others are to be asked."""
        now = system_clock.monotonic()
        with self._lock:
            if session not in self._followed:
                channel = session % _CHANNELS
                self._channels[channel] += 1
                self._has_new_channels = self._has_new_channels or self._channels[channel] == 1
            self._followed[session] = now
            if session in self._to_ask or now - self._asked.get(session, -FOLLOW_S) < FOLLOW_S / 3:
                return False
            self._to_ask[session] = None
            return True

    def add(self, commits: Iterable[CommittedEvents]) -> bool:
        """Queue committed events if other nodes follow their sessions. Return whether there are such events."""
        if not self._followed_elsewhere:
            return False
        now = system_clock.monotonic()
        is_added = False
        with self._lock:
            for commit in commits:
                size = len(commit.pack)
                if self._followed_elsewhere.get(commit.session, 0.0) < now or size > _MESSAGE_BYTES:
                    continue
                if self._waiting_bytes + size <= _WAITING_BYTES:
                    self._waiting.append(commit)
                    self._waiting_bytes += size
                    is_added = True
        return is_added

    # ── for the thread ───────────────────────────────────────────────────────────────────────────────────────────

    def note_followers(self, sessions: Iterable[int]) -> None:
        """Note that another node follows these sessions."""
        now = system_clock.monotonic()
        with self._lock:
            followed = self._followed_elsewhere
            followed.update(dict.fromkeys(sessions, now + FOLLOW_S))
            if len(followed) > _FOLLOWED_LIMIT:
                kept = sorted(followed.items(), key=lambda item: item[1])[-_FOLLOWED_LIMIT // 2 :]
                self._followed_elsewhere = dict(kept)

    def to_ask(self) -> list[int]:
        """Take the sessions whose events other nodes are to be asked for now."""
        now = system_clock.monotonic()
        with self._lock:
            asked, self._to_ask = list(self._to_ask), {}
            self._asked.update(dict.fromkeys(asked, now))
        return asked

    def changed_channels(self) -> set[int] | None:
        """Return the channels to receive, or None if they have not changed since the last call.

        Sessions that this node does not follow any more are dropped every few seconds.
        """
        now = system_clock.monotonic()
        with self._lock:
            if now >= self._expire_at:
                self._expire_at = now + _EXPIRE_EVERY_S
                self._drop_not_followed(now - FOLLOW_S)
            if not self._has_new_channels:
                return None
            self._has_new_channels = False
            return set(self._channels)

    def _drop_not_followed(self, before: float) -> None:
        for session in [session for session, at in self._followed.items() if at < before]:
            del self._followed[session]
            self._asked.pop(session, None)
            channel = session % _CHANNELS
            self._channels[channel] -= 1
            if not self._channels[channel]:
                del self._channels[channel]
                self._has_new_channels = True

    def connected(self) -> None:
        """Ask again for all sessions, and drop what waited, because there is a new connection."""
        with self._lock:
            self._to_ask = dict.fromkeys(self._followed)
            self._has_new_channels = True
            self._waiting.clear()
            self._waiting_bytes = 0

    def take(self) -> list[tuple[int, bytes]]:
        """Take the messages that are to be sent now, each with its channel."""
        with self._lock:
            taken, self._waiting = self._waiting, deque()
            self._waiting_bytes = 0
        return [(commit.session % _CHANNELS, self._sealed(commit)) for commit in taken]

    def hear(self, message: bytes) -> None:
        """Pass a message of another node to the loop, unless it is of a session that this node does not follow."""
        try:
            salt, number, session, last_seq = _HEADER.unpack_from(message)
            if session not in self._followed:
                return
            pack = self._cipher_of(salt).decrypt(_nonce(number), message[_HEADER.size :], message[: _HEADER.size])
        except (struct.error, InvalidTag):
            return  # not of a node of this store
        events = SessionEvents(session, tuple(unpack_events(last_seq, pack)))
        listener = self._listener
        with self._lock:
            if listener is None or self._received_bytes + len(pack) > _WAITING_BYTES:
                return
            is_first = not self._received
            self._received.append(events)
            self._received_bytes += len(pack)
        if is_first:
            with suppress(RuntimeError):  # the loop is closed
                listener[0].call_soon_threadsafe(self.pass_on)

    def _sealed(self, commit: CommittedEvents) -> bytes:
        self._sent += 1
        header = _HEADER.pack(self._salt, self._sent, commit.session, commit.last_seq)
        return header + self._cipher.encrypt(_nonce(self._sent), commit.pack, header)

    def _cipher_of(self, salt: bytes) -> AESGCM:
        """Return the cipher of a sender. Each opening of a store has a salt, so no two messages share key and nonce."""
        cipher = self._ciphers.get(salt)
        if cipher is None:
            if len(self._ciphers) >= _SENDERS:
                self._ciphers.clear()
            key = blake2b(salt, key=self._key, digest_size=32, person=b"live events").digest()
            cipher = self._ciphers[salt] = AESGCM(key)
        return cipher


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")
