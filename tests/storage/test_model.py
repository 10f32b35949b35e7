"""Whatever is asked in whatever order, SQLite answers as the memory store does."""

import asyncio
import os
import shutil
import tempfile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from holdfast.errors import HoldfastError
from holdfast.protocol.events import TextDelta, encode_event
from holdfast.protocol.messages import Answer, Attachment, Entry, Question
from holdfast.protocol.stopping import Cause
from holdfast.storage import MemoryStore, SqliteStore
from holdfast.storage.port import Claim, EditHistory, Interrupt, Lease, RunCommit, Send
from tests.storage.audit import audit, recover

MEMORY_DISK = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Thousands of transactions: this test is about answers, not about what a disk keeps."""

KEYS = st.sampled_from(["a", "b"])
PRINCIPALS = st.sampled_from(["p", "p", "q"])


class StoresAgree(RuleBasedStateMachine):
    """The same verbs on both stores, compared answer by answer."""

    leases = Bundle("leases")

    @initialize(yielding=st.booleans())
    def begin(self, yielding):
        self.folder = tempfile.mkdtemp(dir=MEMORY_DISK)
        self.loop = asyncio.Runner()
        self.memory = MemoryStore(yielding=yielding)
        self.sqlite = SqliteStore(f"{self.folder}/store.db")
        self.at = 0.0
        self.ids = 0
        self.open()

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
        return expected

    @rule(
        target=leases,
        principal=PRINCIPALS,
        key=KEYS,
        policy=st.sampled_from(
            ["queue", "queue", "collect", "interrupt", "reject", "steer", "steer", "rollback", "nonsense"]
        ),
        room=st.booleans(),
        idempotency=st.sampled_from([None, None, None, "i", "j"]),
        body=st.sampled_from([b"x", b"x", b"x", b"y"]),
        agent=st.sampled_from([None, None, "other"]),
        limits=st.sampled_from([(100, 100), (2, 100), (0, 1)]),
        content=st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        digests=st.sampled_from([(), (), (), ("d1",), ("d1", "d2", "d1")]),
        retry_of=st.sampled_from([None, None, None, "last", "last", "r1"]),
    )
    def send(self, principal, key, policy, room, idempotency, body, agent, limits, content, digests, retry_of):
        if retry_of == "last":
            retry_of = self.last_run(principal, key)
        request = Send(
            principal=principal,
            key=key,
            agent=agent,
            default_agent="demo",
            message_id=self.fresh("m"),
            content=content,
            policy=policy,
            at=self.now(),
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
        result = self.both(lambda store: store.send(request))
        return getattr(getattr(result, "claim", None), "lease", None)

    def last_run(self, principal, key):
        """The id of the run that ended last, if there is any."""

        async def ask(store):
            found = await store.find_session(principal, key)
            runs = await store.runs(found[0], limit=9) if found else ()
            return next((run.run_id for run in runs if run.ended_at is not None), None)

        return self.do(ask(self.memory))

    @rule(lease=leases, step=st.integers(1, 5))
    def steer(self, lease, step):
        if lease is not None:
            at = self.now()
            self.both(lambda store: store.steer(lease, step=step, at=at))

    @rule(
        lease=leases,
        question=st.sampled_from(["q1", "q2", "q3"]),
        kind=st.sampled_from(["approval", "question"]),
        wait=st.sampled_from([0.0, 5.0, 1000.0]),
    )
    def suspend(self, lease, question, kind, wait):
        if lease is not None:
            at = self.now()
            asked = Question(
                question_id=question, kind=kind, text=question, asked_at=at, due_at=at + wait if wait else 0.0
            )
            self.both(lambda store: store.suspend(lease, asked))

    @rule(
        principal=PRINCIPALS,
        key=KEYS,
        question=st.sampled_from(["q1", "q2", "q3"]),
        decision=st.sampled_from(["approved", "denied", "answered", "answered", "expired"]),
        text=st.sampled_from(["", "yes"]),
    )
    def answer(self, principal, key, question, decision, text):
        given = Answer(question_id=question, decision=decision, text=text, by=principal, at=self.now())
        self.both(lambda store: store.answer(principal, key, given))

    @rule(lease=leases)
    def park(self, lease):
        if lease is not None:
            at = self.now()
            self.both(lambda store: store.park(lease, at=at))

    @rule(
        principal=PRINCIPALS,
        key=KEYS,
        edit=st.sampled_from(["undo", "undo", "compact", "branch", "import", "retry"]),
        entries=st.integers(0, 3),
        digest=st.sampled_from([None, None, "d1"]),
        expected_n=st.sampled_from([None, None, 0, 1, 2, 3, 4]),
        session_limit=st.sampled_from([100, 1]),
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

    @rule(target=leases, session=st.integers(1, 4), again=st.booleans())
    def claim(self, session, again):
        at, run_id = self.now(), f"r{self.ids}" if again else self.fresh("r")
        claim = self.both(lambda store: store.claim(session, run_id=run_id, at=at))
        return claim.lease if isinstance(claim, Claim) else None

    @rule(
        lease=leases,
        texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=4),
        nth=st.integers(0, 3),
    )
    def append(self, lease, texts, nth):
        if lease is not None:
            events = [encode_event(TextDelta(run_id=lease.run_id, text=text)) for text in texts]
            self.both(lambda store: store.append(lease, events, nth=nth))

    @rule(
        target=leases,
        lease=leases,
        status=st.sampled_from(["completed", "failed", "interrupted"]),
        entries=st.integers(0, 3),
        events=st.integers(0, 2),
        more=st.booleans(),
        fence=st.sampled_from([0, 0, 0, 1]),
        replaces=st.sampled_from([False, False, True]),
    )
    def commit(self, lease, status, entries, events, more, fence, replaces):
        if lease is None:
            return None
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
        return getattr(getattr(done, "claim", None), "lease", None)

    @rule(principal=PRINCIPALS, key=KEYS, run=st.one_of(st.none(), st.integers(1, 20)), stop=st.booleans())
    def interrupt(self, principal, key, run, stop):
        at = self.now()
        request = Interrupt(
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

    @rule(principal=PRINCIPALS, key=KEYS)
    def delete(self, principal, key):
        at = self.now()
        cause = Cause(kind="stop", reason="deleted")
        self.both(lambda store: store.delete_session(principal, key, at=at, cause=cause))

    @rule(target=leases, lease=leases, discard_from=st.sampled_from([None, 3]))
    def restart(self, lease, discard_from):
        if lease is not None:
            at = self.now()
            self.both(lambda store: store.restart(lease, at=at, discard_from=discard_from))
        return lease

    @rule(
        events=st.integers(0, 40),
        tombstones=st.integers(0, 40),
        keys=st.integers(0, 40),
        attachments=st.integers(0, 40),
    )
    def prune(self, events, tombstones, keys, attachments):
        self.both(
            lambda store: store.prune(
                events_before=float(events),
                tombstones_before=float(tombstones),
                idempotency_before=float(keys),
                attachments_before=float(attachments),
            )
        )

    @rule(target=leases)
    def crash_and_rescue(self):
        for store in (self.memory, self.sqlite):
            self.do(store.close())
        self.open()
        at = self.now()
        claims = self.both(lambda store: store.rescue(at=at))
        return claims[0].lease if claims else None

    @rule()
    def forget_what_is_kept(self):
        """Rows that are read again are the rows that were kept."""

        def forget(tables):
            tables.forget()

        self.do(self.sqlite._write("prune", forget))

    @rule(session=st.integers(1, 4), after=st.integers(0, 30), limit=st.integers(1, 6), run=st.integers(1, 20))
    def read(self, session, after, limit, run):
        async def everything(store):
            return (
                list(await store.read_events(session, after=after, limit=limit)),
                await store.oldest_seq(session),
                list(await store.run_events(session, f"r{run}")),
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
                list(await store.sessions(principal="p", limit=1, before=self.at)),
                list(await store.ready(limit=9)),
                list(await store.due_questions(before=self.at, limit=2)),
                await store.attachment("p", "d1"),
                await store.attachment("q", "d2"),
            )

        if hasattr(self, "loop"):
            self.both(everything)

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        try:
            self.both(audit)
            for store in (self.memory, self.sqlite):
                self.do(store.close())
            self.open()
            at = self.now()
            self.both(lambda store: recover(store, at=at))
            self.both(audit)
        finally:
            for store in (self.memory, self.sqlite):
                self.do(store.close())
            self.loop.close()
            shutil.rmtree(self.folder)


StoresAgree.TestCase.settings = settings(max_examples=30, stateful_step_count=40)
TestStoresAgree = StoresAgree.TestCase


class StoresAgreeLonger(StoresAgree):
    """The same, with many more examples."""


StoresAgreeLonger.TestCase.settings = settings(max_examples=600, stateful_step_count=60, derandomize=False)


TestStoresAgreeLonger = pytest.mark.nightly(pytest.mark.timeout(1800)(StoresAgreeLonger.TestCase))
