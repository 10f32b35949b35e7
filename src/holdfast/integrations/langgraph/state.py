"""The graph state that LangGraph saves: kept in memory during a run, and packed into text for the log.

Invariants
- A saver serves one run. After the saver is closed, it rejects every write.
- Only the state that a later run needs is packed: the newest state of the graph and of each subgraph with memory. While
  a run waits for people, the state of the subgraphs in progress is packed too.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from langgraph.checkpoint.memory import InMemorySaver

from holdfast.errors import LimitExceeded, RunClosed, RunFailed

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.base import ChannelVersions, Checkpoint, CheckpointMetadata

    from holdfast.protocol.messages import Entry

__all__ = ["Kept", "RunSaver", "fingerprint", "owner", "pack", "unpack"]

_log = logging.getLogger("holdfast.agents")

FORM = "langgraph 1"
_LEVEL = 1
_WHOLE = b"\0"  # marks data that is not compressed
_WHOLE_BYTES = 4096
_INSIDE = ":"  # in the namespace of a subgraph in progress, before the id of its task


class Kept(msgspec.Struct, array_like=True):
    """The rows of a `RunSaver`, in the form that `pack` stores.

    Parameters:
        before: `fingerprint` of the transcript before the run.
        saved: rows of checkpoints: namespace, id, checkpoint, metadata, id of the previous checkpoint.
        blobs: rows of channel values: namespace, channel, version, value.
        writes: rows of a task's writes: namespace, checkpoint id, task, index, channel, value, path of the task.
    """

    before: bytes = b""
    saved: list[tuple[str, str, tuple[str, bytes], tuple[str, bytes], str | None]] = msgspec.field(default_factory=list)
    blobs: list[tuple[str, str, str | int | float, tuple[str, bytes]]] = msgspec.field(default_factory=list)
    writes: list[tuple[str, str, str, int, str, tuple[str, bytes], str]] = msgspec.field(default_factory=list)


class RunSaver(InMemorySaver):
    """LangGraph's checkpoints of one run.

    Parameters:
        thread_id: id of the LangGraph thread that the run uses.
    """

    def __init__(self, thread_id: str) -> None:
        super().__init__()
        self._thread_id = thread_id
        self._over: list[bool] = []  # shared by the copies that LangGraph makes

    def close(self) -> None:
        """Make further saves raise `RunClosed`. Thread-safe."""
        self._over.append(True)

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Save a state.

        Raises:
            RunClosed: if the saver is closed.
            RunFailed: if a value cannot be serialized.
        """
        self._check_open()
        try:
            return super().put(config, checkpoint, metadata, new_versions)
        except (TypeError, ValueError) as error:
            raise _cannot_save(error) from error

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Save a node's writes. Raises the same errors as `put`."""
        self._check_open()
        try:
            super().put_writes(config, writes, task_id, task_path)
        except (TypeError, ValueError) as error:
            raise _cannot_save(error) from error

    def _check_open(self) -> None:
        if self._over:
            raise RunClosed("the run has ended", hint="results of nodes after the end of the run are discarded")

    def rows(self, *, inside: bool, deltas: Iterable[str] = ()) -> Kept:
        """Return the rows that a later run needs.

        Parameters:
            inside: whether to include the subgraphs in progress, because the run itself is in progress.
            deltas: names of the channels whose values are stored as changes to an older state.
        """
        kept = Kept()
        delta = frozenset(deltas)
        for namespace, saved in self.storage[self._thread_id].items():
            if saved and (inside or _INSIDE not in namespace):
                self._add(kept, namespace, delta)
        return kept

    def _add(self, kept: Kept, namespace: str, deltas: frozenset[str]) -> None:
        saved = self.storage[self._thread_id][namespace]
        current: str | None = max(saved)
        missing = set(deltas)
        while current is not None and current in saved:
            checkpoint, metadata, before = saved[current]
            kept.saved.append((namespace, current, checkpoint, metadata, before))
            for (task, index), (_, channel, value, path) in self.writes[self._thread_id, namespace, current].items():
                kept.writes.append((namespace, current, task, index, channel, value, path))
            for channel, version in self.serde.loads_typed(checkpoint)["channel_versions"].items():
                value = self.blobs.get((self._thread_id, namespace, channel, version), ("empty", b""))
                if value[0] != "empty":
                    missing.discard(channel)
                    row = (namespace, channel, version, value)
                    if row not in kept.blobs:
                        kept.blobs.append(row)
            current = before if missing else None

    def load(self, kept: Kept) -> None:
        """Load the rows of an earlier run or attempt."""
        thread = self._thread_id
        for namespace, checkpoint_id, checkpoint, metadata, before in kept.saved:
            self.storage[thread][namespace][checkpoint_id] = (checkpoint, metadata, before)
        for namespace, channel, version, value in kept.blobs:
            self.blobs[thread, namespace, channel, version] = value
        for namespace, checkpoint_id, task, index, channel, value, path in kept.writes:
            self.writes[thread, namespace, checkpoint_id][task, index] = (task, channel, value, path)


def _cannot_save(error: Exception) -> RunFailed:
    return RunFailed(
        f"the graph's state does not serialize: {error}",
        hint="use only text, numbers, lists, dicts, messages, dataclasses and pydantic models as state",
    )


def fingerprint(entries: Iterable[Entry]) -> bytes:
    """Return a hash of a transcript's content, independent of entry numbers."""
    digest = hashlib.blake2b(digest_size=16)
    for entry in entries:
        said = (entry.role, entry.content, entry.call_id, entry.name, entry.partial, entry.status, entry.ended_by)
        digest.update(msgspec.msgpack.encode(said))
    return digest.digest()


def owner(graph: str) -> str:
    """Return the owner of a graph's state, which is the first line of the text that `pack` returns."""
    return f"{FORM} {graph}"


def pack(kept: Kept, graph: str, *, limit_bytes: int) -> str:
    """Return the rows as text. Raises `LimitExceeded` if the packed rows exceed `limit_bytes`."""
    body = msgspec.msgpack.encode(kept)
    packed = base64.b64encode(zlib.compress(body, _LEVEL) if len(body) > _WHOLE_BYTES else _WHOLE + body).decode()
    if len(packed) > limit_bytes:
        raise LimitExceeded(
            f"the graph's state takes {len(packed):,} bytes; the limit is {limit_bytes:,}",
            hint="store large data in files or a database and refer to it in the state, or raise state_limit_bytes",
        )
    return f"{owner(graph)}\n{packed}"


def unpack(text: str, graph: str) -> Kept | None:
    """Return the rows that were packed for this graph.

    If the text belongs to another graph or is unreadable, return None, so that the session stays usable.
    """
    head, _, packed = text.partition("\n")
    if head != owner(graph):
        return None
    try:
        body = base64.b64decode(packed)
        body = body[len(_WHOLE) :] if body.startswith(_WHOLE) else zlib.decompress(body)
        return msgspec.msgpack.decode(body, type=Kept)
    except (ValueError, zlib.error, msgspec.DecodeError) as error:
        _log.warning("the state of the graph %r is unreadable and starts over: %s", graph, error)
        return None
