"""Whatever is asked in whatever order, SQLite answers as the memory store does."""

import asyncio
import os
import random
import shutil
import tempfile
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.errors import HoldfastError, InvalidRequest, StaleFence
from holdfast.protocol.events import TextDelta, decode_event, encode_event
from holdfast.protocol.messages import Answer, Attachment, Entry, Question
from holdfast.protocol.schedules import ScheduleSpec
from holdfast.protocol.stopping import Cause
from holdfast.protocol.transcript import RunTranscript, memory_bytes
from holdfast.storage import MemoryStore, SqliteStore
from holdfast.storage.memory import tables as memory_tables
from holdfast.storage.port import (
    Claim,
    Committed,
    EditHistory,
    Fire,
    InterruptRequest,
    Lease,
    Parked,
    PutSchedule,
    RunCommit,
    Send,
)
from holdfast.storage.sql import active_sessions, merger, transcripts
from tests.storage.audit import audit, audit_file, recounted, recover

MEMORY_DISK = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Thousands of transactions: this test is about answers, not about what a disk keeps."""

KEYS = st.sampled_from(["a", "b"])
PICKS = st.integers(0, 11)
PRINCIPALS = st.sampled_from(["p", "p", "q"])

LIMITS = (
    (transcripts, "SPACING", 3),
    (active_sessions, "_KEPT", 1),
    (merger, "_FEWEST", 2),
)
"""Limits so small that what they limit happens in short tests too."""


class StoresAgree(RuleBasedStateMachine):
    """The same verbs on both stores, compared answer by answer."""

    @initialize(yielding=st.booleans())
    def begin(self, yielding):
        self.folder = tempfile.mkdtemp(dir=MEMORY_DISK)
        self.patches = pytest.MonkeyPatch()
        for module, name, value in LIMITS:
            self.patches.setattr(module, name, value)
        self.loop = asyncio.Runner()
        self.memory = MemoryStore(yielding=yielding)
        self.sqlite = SqliteStore(f"{self.folder}/store.db")
        self.at = 0.0
        self.ids = 0
        self.live = {}
        self.appended = {}
        self.taken = {}
        self.ended = {}
        self.keys = {}
        self.done: Counter[str] = Counter()
        self.old = []
        self.open()
        for principal, key in (("p", "a"), ("q", "b")):
            self.send_one(principal, key, content="hello", policy="queue", run_id=self.fresh("r"))

    def open(self):
        for store in (self.memory, self.sqlite):
            self.do(store.open(node_id="n", at=self.now()))

    def do(self, coroutine):
        async def bounded():
            async with asyncio.timeout(20):
                return await coroutine

        return self.loop.run(bounded())

    def now(self):
        self.at += 1.0
        return self.at

    def fresh(self, prefix):
        self.ids += 1
        return f"{prefix}{self.ids}"

    def both(self, ask):
        """The answer of both stores, or their refusal."""

        async def answer(store):
            try:
                return await ask(store)
            except HoldfastError as refusal:
                return type(refusal), refusal.message

        expected = self.do(answer(self.memory))
        actual = self.do(answer(self.sqlite))
        assert actual == expected
        if not (isinstance(expected, tuple) and expected and isinstance(expected[0], type)):
            self.done[type(expected).__name__] += 1
        return expected

    def written(self, lease, done):
        """Both stores share their verbs, so what they must refuse is said here too: who let go may write no more."""
        assert lease in self.live.values() or refused(done, StaleFence), f"written under the old {lease}"
        return done

    def claimed(self, claim):
        """A lease to write with from now on."""
        if isinstance(claim, Claim):
            self.old.append(self.live.get(claim.lease.session))
            self.live[claim.lease.session] = claim.lease
            self.taken[claim.lease] = claim

    def let_go(self, lease):
        """A lease was given back, now or before: by then another may have been given."""
        if self.live.get(lease.session) == lease:
            self.old.append(self.live.pop(lease.session))

    def lease(self, pick):
        """The newest lease of a session, or sometimes one that is old."""
        leases = [lease for lease in self.old if lease is not None] if pick >= 9 else list(self.live.values())
        return leases[pick % len(leases)] if leases else None

    @rule(
        principal=PRINCIPALS,
        key=KEYS,
        policy=st.sampled_from(
            ["queue", "queue", "collect", "interrupt", "reject", "steer", "steer", "rollback", "nonsense"]
        ),
        room=st.booleans(),
        idempotency=st.sampled_from([None, None, None, "i", "j"]),
        body=st.sampled_from([b"x", b"x", b"x", b"y"]),
        agent=st.sampled_from([None, None, "other"]),
        limits=st.sampled_from([(100, 100), (100, 100), (100, 100), (2, 100), (0, 1)]),
        content=st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        digests=st.sampled_from([(), (), (), (), ("d1",), ("d1", "d2", "d1")]),
        retry_of=st.sampled_from([None, None, None, None, None, None, "last", "last", "r1"]),
    )
    def send(self, principal, key, policy, room, idempotency, body, agent, limits, content, digests, retry_of):
        if retry_of == "last":
            retry_of = self.last_run(principal, key)
        self.send_one(
            principal,
            key,
            agent=agent,
            content=content,
            policy=policy,
            idempotency_key=idempotency,
            body_hash=body,
            run_id=self.fresh("r") if room else None,
            quiet_s=3.0,
            max_wait_s=7.0,
            mailbox_limit=limits[0],
            session_limit=limits[1],
            attachments=tuple(Attachment(digest=digest, media_type="text/plain") for digest in digests),
            retry_of=retry_of,
        )

    def send_one(self, principal, key, *, agent=None, **more):
        request = Send(
            principal=principal,
            key=key,
            agent=agent,
            default_agent="demo",
            message_id=self.fresh("m"),
            at=self.now(),
            **more,
        )
        result = self.both(lambda store: store.send(request))
        self.claimed(getattr(result, "claim", None))
        if request.idempotency_key is not None:
            used = (principal, key, request.idempotency_key)
            if not refused(result, HoldfastError):
                assert self.keys.setdefault(used, request.body_hash) == request.body_hash, "one key for two messages"

    def last_run(self, principal, key):
        """The id of the run that ended last, if there is any."""

        async def ask(store):
            found = await store.find_session(principal, key)
            runs = await store.runs(found[0], limit=9) if found else ()
            return next((run.run_id for run in runs if run.ended_at is not None), None)

        return self.do(ask(self.memory))

    @precondition(lambda self: self.live)
    @rule(pick=PICKS, step=st.integers(1, 5))
    def steer(self, pick, step):
        lease = self.lease(pick)
        if lease is not None:
            at = self.now()
            self.written(lease, self.both(lambda store: store.steer(lease, step=step, at=at)))

    @precondition(lambda self: self.live)
    @rule(
        pick=PICKS,
        question=st.sampled_from(["q1", "q2", "q3"]),
        kind=st.sampled_from(["approval", "question"]),
        wait=st.sampled_from([0.0, 5.0, 1000.0]),
    )
    def suspend(self, pick, question, kind, wait):
        lease = self.lease(pick)
        if lease is not None:
            at = self.now()
            asked = Question(
                question_id=question, kind=kind, text=question, asked_at=at, due_at=at + wait if wait else 0.0
            )
            self.written(lease, self.both(lambda store: store.suspend(lease, asked)))

    @rule(
        pick=PICKS,
        principal=PRINCIPALS,
        key=KEYS,
        question=st.sampled_from(["q1", "q2", "q3"]),
        decision=st.sampled_from(["approved", "denied", "answered", "answered", "expired", "expired"]),
        text=st.sampled_from(["", "yes"]),
    )
    def answer(self, pick, principal, key, question, decision, text):
        due = self.do(self.memory.due_questions(before=1e9, limit=9))
        if due and pick < 9:
            asked = due[pick % len(due)]
            principal, key, question = asked.principal, asked.key, asked.question.question_id
        given = Answer(question_id=question, decision=decision, text=text, by=principal, at=self.now())
        self.both(lambda store: store.answer(principal, key, given))

    @precondition(lambda self: self.live)
    @rule(pick=PICKS)
    def park(self, pick):
        lease = self.lease(pick)
        if lease is not None:
            at = self.now()
            if isinstance(self.both(lambda store: store.park(lease, at=at)), Parked):
                self.let_go(lease)

    @rule(
        principal=PRINCIPALS,
        key=KEYS,
        edit=st.sampled_from(["undo", "undo", "undo", "compact", "compact", "branch", "import", "retry"]),
        entries=st.integers(0, 3),
        digest=st.sampled_from([None, None, "d1"]),
        expected_n=st.sampled_from([None, None, None, None, 0, 2, 3]),
        session_limit=st.sampled_from([100, 100, 1]),
    )
    def edit(self, principal, key, edit, entries, digest, expected_n, session_limit):
        attachments = (Attachment(digest=digest, media_type="text/plain"),) if digest else ()
        request = EditHistory(
            principal=principal,
            key=key,
            edit=edit,
            at=self.now(),
            entries=[Entry(role="summary", content=str(n), attachments=attachments) for n in range(entries)],
            expected_n=expected_n,
            agent="made",
            session_limit=session_limit,
        )
        self.both(lambda store: store.edit_history(request))

    @rule(
        principal=PRINCIPALS,
        digest=st.sampled_from(["d1", "d2"]),
        size=st.integers(0, 4),
        limit=st.sampled_from([100, 5]),
    )
    def attach(self, principal, digest, size, limit):
        at = self.now()
        attachment = Attachment(digest=digest, media_type="text/plain", name=f"at {at}")
        self.both(lambda store: store.add_attachment(principal, attachment, b"\0" * size, at=at, limit_bytes=limit))

    @rule(session=st.integers(1, 4), again=st.booleans())
    def claim(self, session, again):
        at, run_id = self.now(), f"r{self.ids}" if again else self.fresh("r")
        claim = self.both(lambda store: store.claim(session, run_id=run_id, at=at))
        self.claimed(claim)

    @precondition(lambda self: self.live)
    @rule(
        pick=PICKS,
        texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=4),
        nth=st.integers(0, 3),
    )
    def append(self, pick, texts, nth):
        lease = self.lease(pick)
        if lease is not None:
            events = [encode_event(TextDelta(run_id=lease.run_id, text=text)) for text in texts]
            done = self.written(lease, self.both(lambda store: store.append(lease, events, nth=nth)))
            again = nth and self.appended.get(lease) == nth
            assert not again or not refused(done, InvalidRequest), "what was asked again was refused"
            if nth and events and not refused(done, HoldfastError):
                self.appended[lease] = nth

    @precondition(lambda self: self.live)
    @rule(
        pick=PICKS,
        status=st.sampled_from(["completed", "failed", "interrupted"]),
        entries=st.integers(0, 3),
        events=st.integers(0, 2),
        more=st.booleans(),
        fence=st.sampled_from([0, 0, 0, 1]),
        replaces=st.sampled_from([False, False, True]),
    )
    def commit(self, pick, status, entries, events, more, fence, replaces):
        lease = self.lease(pick)
        if lease is None:
            return
        commit = RunCommit(
            lease=Lease(lease.session, lease.run_id, lease.fence + fence),
            status=status,
            at=self.now(),
            text="t" * entries,
            cause=Cause(kind="deadline") if entries else None,
            error="E" if events else None,
            entries=[Entry(role="assistant", content=str(n)) for n in range(entries)],
            events=[encode_event(TextDelta(run_id=lease.run_id, text="the end"))] * events,
            next_run_id=self.fresh("r") if more else None,
            not_undone=("pay",) * events,
            replaces_history=replaces,
        )
        done = self.both(lambda store: store.commit_run(commit))
        if isinstance(done, Committed):
            self.let_go(lease)
            self.claimed(done.claim)

    @precondition(lambda self: self.live)
    @rule(pick=PICKS, status=st.sampled_from(["completed", "failed", "interrupted", "interrupted"]))
    def end_as_a_host_does(self, pick, status):
        """With the entries that a host makes of the log: of a run that did not complete, the last one is marked."""
        lease = self.lease(pick % 9)
        if lease is None:
            return
        claim = self.taken[lease]
        transcript = RunTranscript(lease.run_id, claim.messages)
        for event in self.do(self.memory.run_events(lease.session, lease.run_id)):
            transcript.feed(decode_event(event))
        cause = claim.interrupt or Cause(kind="user")
        commit = RunCommit(
            lease=lease,
            status=status,
            at=self.now(),
            cause=cause if status == "interrupted" else None,
            entries=transcript.entries(status=status, cause=cause),
        )
        if isinstance(self.both(lambda store: store.commit_run(commit)), Committed):
            self.let_go(lease)
            self.ended[lease.session, lease.run_id] = status
            self.done["Marked"] += status != "completed"

    @invariant()
    def what_did_not_complete_is_marked(self):
        """Whatever became of the session since: crashes, edits and rows that were read again."""
        for session in {session for session, _ in getattr(self, "ended", {})}:
            for store in (self.memory, self.sqlite):
                marks: dict[str, list[str | None]] = {}
                for entry in self.do(store.transcript(session)):
                    marks.setdefault(entry.run_id, []).append(entry.ended_by)
                for run_id in marks.keys() & {run for of, run in self.ended if of == session}:
                    completed = self.ended[session, run_id] == "completed"
                    assert [mark is None for mark in marks[run_id][:-1]] == [True] * (len(marks[run_id]) - 1)
                    assert (marks[run_id][-1] is None) == completed, (run_id, marks[run_id])

    @rule(principal=PRINCIPALS, key=KEYS, run=st.one_of(st.none(), st.integers(1, 20)), stop=st.booleans())
    def interrupt(self, principal, key, run, stop):
        at = self.now()
        request = InterruptRequest(
            principal=principal,
            key=key,
            cause=Cause(kind="user", reason=f"at {at}", at=at),
            at=at,
            run_id=None if run is None else f"r{run}",
        )
        self.both(lambda store: store.stop_session(request) if stop else store.interrupt(request))

    @rule(principal=PRINCIPALS, key=KEYS, message=st.integers(1, 20))
    def withdraw(self, principal, key, message):
        at = self.now()
        self.both(lambda store: store.withdraw(principal, key, f"m{message}", at=at))

    @rule(principal=PRINCIPALS, key=KEYS, sure=st.sampled_from([False, False, True]))
    def delete(self, principal, key, sure):
        if not sure:
            return
        at = self.now()
        cause = Cause(kind="stop", reason="deleted")
        self.keys.clear()
        self.both(lambda store: store.delete_session(principal, key, at=at, cause=cause))

    @precondition(lambda self: self.live)
    @rule(pick=PICKS, discard_from=st.sampled_from([None, 3]))
    def restart(self, pick, discard_from):
        lease = self.lease(pick)
        if lease is not None:
            at = self.now()
            self.both(lambda store: store.restart(lease, at=at, discard_from=discard_from))

    @rule(
        principal=PRINCIPALS,
        key=KEYS,
        name=st.sampled_from(["s", "t"]),
        every=st.sampled_from([1.0, 4.0, 5.0]),
        miss=st.sampled_from(["skip", "burst", "delay"]),
        overlap=st.sampled_from(["queue", "reject", "interrupt", "steer"]),
        agent=st.sampled_from([None, None, "gone"]),
        max_runs=st.sampled_from([None, None, 2]),
        limit=st.sampled_from([9, 9, 1]),
    )
    def put_schedule(self, principal, key, name, every, miss, overlap, agent, max_runs, limit):
        spec = ScheduleSpec(
            session=key, text="tick", every_s=every, jitter_s=1.0, miss=miss, overlap=overlap, agent=agent,
            max_runs=max_runs,
        )  # fmt: skip
        request = PutSchedule(principal=principal, schedule_id=name, spec=spec, at=self.now(), limit=limit)
        self.both(lambda store: store.put_schedule(request))

    @rule(principal=PRINCIPALS, name=st.sampled_from(["s", "t"]), what=st.sampled_from(["pause", "resume", "delete"]))
    def change_schedule(self, principal, name, what):
        at = self.now()
        if what == "delete":
            self.both(lambda store: store.delete_schedule(principal, name))
        else:
            self.both(lambda store: store.pause_schedule(principal, name, paused=what == "pause", at=at))

    @rule(
        pick=PICKS,
        room=st.booleans(),
        by_hand=st.sampled_from([False, False, True]),
        stale=st.sampled_from([0, 0, 0, 1]),
        wait=st.sampled_from([0.0, 5.0, 500.0]),
        back=st.sampled_from([0.0, 0.0, 0.0, 100_000.0]),
    )
    def fire(self, pick, room, by_hand, stale, wait, back):
        self.at += wait
        at = self.now() - back
        due = self.both(lambda store: _listed(store.due_schedules(now=at, limit=9)))
        if not due and by_hand:
            due = [found[0] for name in "st" if (found := self.do(self.memory.schedule("p", name))) is not None]
        if not due:
            return
        one = due[pick % len(due)]
        send = Send(
            principal=one.principal, key=one.spec.session, agent=one.spec.agent, default_agent="demo",
            message_id=self.fresh("m"), content=one.spec.text, policy=one.spec.overlap, at=at,
            run_id=self.fresh("r") if room else None, mailbox_limit=4,
            served=dict.fromkeys(("demo", "other", "made"), ""),
        )  # fmt: skip
        request = Fire(schedule=one.schedule, revision=one.revision - stale, send=send, by_hand=by_hand)
        fired = self.both(lambda store: store.fire_schedule(request))
        sent = getattr(fired, "sent", None)
        self.claimed(getattr(sent, "claim", None))
        if sent is not None:
            self.done["Tick"] += 1

    @rule(
        events=st.integers(0, 40),
        tombstones=st.integers(0, 40),
        keys=st.integers(0, 40),
        attachments=st.integers(0, 40),
    )
    def prune(self, events, tombstones, keys, attachments):
        self.keys.clear()
        """A merged row is dropped when all its events are old, so the SQLite store may keep more events."""
        for store in (self.memory, self.sqlite):
            self.do(
                store.prune(
                    events_before=float(events),
                    tombstones_before=float(tombstones),
                    idempotency_before=float(keys),
                    attachments_before=float(attachments),
                )
            )

    @rule()
    def crash_and_rescue(self):
        for store in (self.memory, self.sqlite):
            self.do(store.close())
        self.open()
        at = self.now()
        claims = self.both(lambda store: store.rescue(at=at))
        for claim in claims:
            self.claimed(claim)

    @rule()
    def forget_what_is_kept(self):
        """Rows that are read again are the rows that were kept."""

        def forget(tables):
            tables.forget()

        self.do(self.sqlite.backend.write("prune", forget))

    @rule(session=st.integers(1, 4), after=st.integers(0, 30), limit=st.integers(1, 6), run=st.integers(1, 20))
    def read(self, session, after, limit, run):
        async def everything(store):
            first = await self.memory.oldest_seq(session)
            assert await store.oldest_seq(session) <= first
            return (
                list(await store.read_events(session, after=max(after, first - 1), limit=limit))[:limit],
                [event for event in await store.run_events(session, f"r{run}") if event.seq >= first],
                list(await store.transcript(session, after=after // 4, limit=limit)),
                list(await store.transcript(session)),
                list(await store.mailbox(session)),
                list(await store.questions(session)),
                await store.settlement(session, f"m{run}"),
                await store.run(session, f"r{run}"),
                list(await store.runs(session, limit=limit)),
            )

        self.both(everything)

    @invariant()
    def views_agree(self):
        async def everything(store):
            return (
                list(await store.sessions(principal=None, limit=9)),
                list(await store.sessions(principal="p", limit=1, before=(self.at, 0))),
                list(await store.ready(limit=9)),
                list(await store.due_questions(before=self.at, limit=2)),
                await store.attachment("p", "d1"),
                await store.attachment("q", "d2"),
                list(await store.due_schedules(now=self.at, limit=3)),
                await store.next_schedule(),
                list(await store.schedules(principal=None, limit=9)),
                list(await store.schedules(principal="p", session="a", limit=1)),
                await store.schedule("p", "s"),
            )

        if hasattr(self, "loop"):
            self.both(everything)

    @invariant()
    def what_is_stored_is_counted(self):
        if not hasattr(self, "loop"):
            return
        rows = recounted(f"{self.folder}/store.db")
        memory = self.recounted_memory()
        for principal in ("p", "q"):
            assert self.do(self.sqlite.stored_bytes(principal)) == rows[principal]
            assert self.do(self.memory.stored_bytes(principal)) == memory[principal]
        assert dict(self.do(self.memory.most_stored(limit=9))) == +memory

    def recounted_memory(self):
        """The bytes that the store in memory has of each principal, added up anew."""
        counted: Counter[str] = Counter()
        tables = self.memory.backend.tables
        for session in tables.sessions.values():
            size = memory_tables._SESSION_BYTES + memory_tables._ROW_BYTES * len(session.messages)
            size += sum(len(body) for body in session.kept.values()) + sum(len(pack.body) for pack in session.log)
            size += sum(memory_bytes(row.entries) for row in session.history.values())
            if session.row.deleted_at is None or session.row.run_id is not None:
                size += sum(memory_tables._ROW_BYTES + len(run.view.text) for run in session.runs.values())
            counted[session.row.principal] += size
        for principal, attachments in tables.attachments.items():
            counted[principal] += sum(len(found.body) for found in attachments.values())
        for row in tables.schedules.values():
            counted[row.principal] += len(row.spec.text)
        return counted

    def audit_both(self):
        expected, actual = self.do(audit(self.memory)), self.do(audit(self.sqlite))
        assert actual.keys() == expected.keys()
        assert all(actual[name][-len(log) or len(actual[name]) :] == log for name, log in expected.items())

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        try:
            self.audit_both()
            for store in (self.memory, self.sqlite):
                self.do(store.close())
            audit_file(f"{self.folder}/store.db")
            self.open()
            at = self.now()
            self.both(lambda store: recover(store, at=at))
            self.audit_both()
        finally:
            for store in (self.memory, self.sqlite):
                self.do(store.close())
            self.loop.close()
            self.patches.undo()
            shutil.rmtree(self.folder)


def refused(answer, error):
    """Whether this is what `both` makes of such a refusal."""
    return isinstance(answer, tuple) and bool(answer) and isinstance(answer[0], type) and issubclass(answer[0], error)


async def _listed(reading):
    return list(await reading)


STEPS = {
    "send": (
        12,
        lambda pick: {
            "policy": pick("queue", "queue", "collect", "interrupt", "reject", "steer", "steer", "rollback"),
            "room": pick(True, True, True, False),
            "idempotency": pick(None, None, None, "i", "j"),
            "body": pick(b"x", b"x", b"x", b"y"),
            "agent": pick(None, None, "other"),
            "limits": pick((100, 100), (100, 100), (3, 100)),
            "content": pick("", "hello", "\0"),
            "digests": pick((), (), (), ("d1",), ("d1", "d2", "d1")),
            "retry_of": pick(None, None, None, "last"),
        },
    ),
    "steer": (5, lambda pick: {"step": pick(1, 2, 3)}),
    "suspend": (
        8,
        lambda pick: {
            "question": pick("q1", "q2", "q3"),
            "kind": pick("approval", "question", "question"),
            "wait": pick(0.0, 5.0, 1000.0, 1000.0, 1000.0),
        },
    ),
    "answer": (
        9,
        lambda pick: {
            "question": pick("q1", "q2", "q3"),
            "decision": pick("approved", "answered", "answered", "expired", "expired"),
            "text": pick("", "yes"),
        },
    ),
    "park": (3, lambda pick: {}),
    "edit": (
        4,
        lambda pick: {
            "edit": pick("undo", "undo", "undo", "compact", "compact", "branch", "import"),
            "entries": pick(0, 1, 2, 3),
            "digest": pick(None, None, "d1"),
            "expected_n": pick(None, None, 3),
            "session_limit": 100,
        },
    ),
    "attach": (2, lambda pick: {"digest": pick("d1", "d2"), "size": pick(0, 3), "limit": pick(5, 100)}),
    "claim": (6, lambda pick: {"session": pick(1, 2, 3, 4, 5, 6), "again": pick(False, False, True)}),
    "append": (4, lambda pick: {"texts": pick(["a"], ["a", "b"]), "nth": pick(0, 1, 2)}),
    "commit": (
        10,
        lambda pick: {
            "status": pick("completed", "completed", "failed", "interrupted"),
            "entries": pick(0, 1, 2, 3),
            "events": pick(0, 1),
            "more": pick(True, False),
            "fence": pick(0, 0, 0, 0, 0, 1),
            "replaces": pick(False, False, False, True),
        },
    ),
    "end_as_a_host_does": (
        6,
        lambda pick: {"status": pick("completed", "failed", "interrupted", "interrupted")},
    ),
    "interrupt": (2, lambda pick: {"run": None, "stop": pick(False, False, True)}),
    "put_schedule": (
        3,
        lambda pick: {
            "name": pick("s", "t"),
            "every": pick(1.0, 4.0, 5.0),
            "miss": pick("skip", "burst", "delay"),
            "overlap": pick("queue", "reject", "interrupt", "steer"),
            "agent": pick(None, None, None, "gone"),
            "max_runs": pick(None, None, None, 2),
            "limit": pick(9, 9, 1),
        },
    ),
    "change_schedule": (1, lambda pick: {"name": pick("s", "t"), "what": pick("pause", "resume", "resume", "delete")}),
    "fire": (
        6,
        lambda pick: {
            "room": pick(True, True, False),
            "by_hand": pick(False, False, True),
            "stale": pick(0, 0, 0, 1),
            "wait": pick(0.0, 0.0, 0.0, 5.0, 200.0),
            "back": pick(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 100_000.0),
        },
    ),
    "withdraw": (1, lambda pick: {"message": pick(*range(1, 60))}),
    "delete": (1, lambda pick: {"sure": pick(True, False, False, False)}),
    "restart": (2, lambda pick: {"discard_from": pick(None, 3)}),
    "prune": (
        1,
        lambda pick: {name: pick(0, 40, 200, 400) for name in ("events", "tombstones", "keys", "attachments")},
    ),
    "crash_and_rescue": (1, lambda pick: {}),
    "forget_what_is_kept": (2, lambda pick: {}),
    "read": (
        4,
        lambda pick: {"session": pick(1, 2, 3, 4), "after": pick(0, 7, 50), "limit": pick(1, 5), "run": pick(1, 9)},
    ),
}
"""How often each step is taken in a long walk, and with what."""
OF_A_SESSION = ("send", "answer", "edit", "interrupt", "withdraw", "delete", "put_schedule")
OF_A_RUN = ("steer", "suspend", "answer", "park", "append", "commit", "end_as_a_host_does", "restart", "fire")


def walk(seed, steps):
    """A walk of the machine that goes on for long, where Hypothesis begins anew after a few steps."""
    rng = random.Random(seed)
    machine = StoresAgree()
    machine.begin(yielding=bool(seed % 2))
    try:
        for _ in range(steps):
            (name,) = rng.choices(list(STEPS), [weight for weight, _ in STEPS.values()])
            arguments = STEPS[name][1](lambda *choices: rng.choice(choices))
            if name in OF_A_SESSION:
                arguments |= {"principal": rng.choice("ppq"), "key": rng.choice("abc" if name == "edit" else "ab")}
            elif name in ("attach", "change_schedule"):
                arguments["principal"] = rng.choice("ppq")
            if name in OF_A_RUN:
                arguments["pick"] = rng.randrange(10)
            getattr(machine, name)(**arguments)
            machine.views_agree()
            machine.what_did_not_complete_is_marked()
            machine.what_is_stored_is_counted()
    finally:
        machine.teardown()
    return machine.done


@pytest.mark.parametrize("seed", range(3))
def test_stores_agree_on_a_long_walk(seed):
    done = walk(seed, 600)
    assert (
        min(done[name] for name in ("Claim", "Committed", "Steered", "Answered", "Parked", "Edited", "Tick", "Marked"))
        > 0
    ), done


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 140))
def test_stores_agree_on_a_longer_walk(seed):
    walk(seed, 1000)


StoresAgree.TestCase.settings = settings(max_examples=30, stateful_step_count=40)
TestStoresAgree = StoresAgree.TestCase


class StoresAgreeLonger(StoresAgree):
    """The same, with many more examples."""


StoresAgreeLonger.TestCase.settings = settings(max_examples=300, stateful_step_count=60, derandomize=False)


TestStoresAgreeLonger = pytest.mark.nightly(pytest.mark.timeout(1800)(StoresAgreeLonger.TestCase))
