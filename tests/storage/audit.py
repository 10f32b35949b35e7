"""What must hold for every store at every moment, whatever happened before."""

import json
import sqlite3
from collections import Counter
from contextlib import closing
from itertools import pairwise

from holdfast.protocol.events import (
    MessageAccepted,
    MessageSettled,
    RunFinished,
    RunResumed,
    RunRolledBack,
    RunStarted,
    RunSuspended,
    Stored,
    decode_event,
)
from holdfast.protocol.messages import Answer
from holdfast.protocol.stopping import Cause
from holdfast.storage.port import Claim, RunCommit

COUNTED = (
    """SELECT session.principal, sum(length(message.body)) FROM message JOIN session USING (session) GROUP BY 1""",
    """SELECT session.principal, sum(length(event.body)) FROM event JOIN session USING (session) GROUP BY 1""",
    """SELECT session.principal, sum(length(run.body) + coalesce(length(run.entries), 0))
    FROM run JOIN session USING (session) GROUP BY 1""",
    """SELECT session.principal, sum(coalesce(length(edit.entries), 0))
    FROM edit JOIN session USING (session) GROUP BY 1""",
    """SELECT session.principal, sum(length(kept.body)) FROM kept JOIN session USING (session) GROUP BY 1""",
    """SELECT principal, sum(size_bytes) FROM attachment GROUP BY 1""",
    """SELECT principal, sum(length(body)) FROM access_grant GROUP BY 1""",
)
"""What counts as stored, table by table."""

NONE_OF = {
    "a run with a holder is not in the table of active sessions": """
        SELECT session FROM session WHERE run_id IS NOT NULL AND holder > 0
        AND session NOT IN (SELECT session FROM active)""",
    "a session is listed under another second": """
        SELECT session FROM session WHERE listed_at <> CAST(updated_at AS integer)""",
    "events are stored that are older than their session says": """
        SELECT session FROM session WHERE EXISTS (SELECT 1 FROM event WHERE event.session = session.session)
        AND coalesce(events_since > (SELECT at FROM event WHERE event.session = session.session
            ORDER BY last_seq LIMIT 1), 1)""",
    "rows are not in the order of the commits": """
        SELECT 1 FROM (SELECT commit_no, lag(commit_no) OVER (ORDER BY rowid) AS before FROM event WHERE commit_no > 0)
        WHERE commit_no <= before""",
    "packs of a session overlap": """
        SELECT 1 FROM (SELECT first_seq, last_seq,
            lag(last_seq) OVER (PARTITION BY session ORDER BY last_seq) AS before FROM event)
        WHERE first_seq > last_seq OR first_seq <= before""",
    "a number of sessions is wrong": """
        SELECT principal FROM stored WHERE sessions <> (SELECT count(*) FROM session
            WHERE session.principal = stored.principal AND deleted_at IS NULL)""",
    "the number of all sessions is wrong": """
        SELECT 1 WHERE coalesce((SELECT value FROM total WHERE name = 'sessions'), 0)
            <> (SELECT count(*) FROM session WHERE deleted_at IS NULL)""",
    "a grant outlives its session": """
        SELECT grant_id FROM access_grant WHERE session <> 0
        AND session NOT IN (SELECT session FROM session WHERE deleted_at IS NULL)""",
    "a landmark lies outside the transcript": """
        WITH RECURSIVE chain (session, piece) AS (
            SELECT session, history_id FROM session WHERE history_id IS NOT NULL
            UNION ALL
            SELECT run.session, run.previous_id FROM chain JOIN run ON run.run_id = chain.piece
                AND run.session = chain.session WHERE run.whole = 0 AND run.previous_id IS NOT NULL
        )
        SELECT landmark.session FROM landmark
        LEFT JOIN chain ON chain.session = landmark.session AND chain.piece = landmark.piece
        LEFT JOIN run ON run.run_id = landmark.piece AND run.session = landmark.session
        LEFT JOIN edit ON edit.edit_id = landmark.piece AND edit.session = landmark.session
        WHERE chain.piece IS NULL OR landmark.last_n <> coalesce(run.last_n, edit.last_n)""",
}
"""Queries of a store's file that return no rows, and what is wrong if they do."""

OPEN_RUN = ("running", "suspended", "stopping")


async def whole_log(store, session):
    events: list[Stored] = []
    while True:
        more = await store.read_events(session, after=events[-1].seq if events else 0, limit=100)
        if not more:
            return events
        events.extend(more)


async def audit(store):
    """Check every session; the logs by (principal, key)."""
    logs = {}
    for view in await store.sessions(principal=None, limit=10_000):
        session, again = await store.find_session(view.principal, view.key)
        assert again == view
        log = logs[view.principal, view.key] = await whole_log(store, session)
        oldest = await store.oldest_seq(session)
        assert oldest == (log[0].seq if log else view.seq + 1)
        assert all(after.seq == before.seq + 1 for before, after in pairwise(log)), "a hole in the log"
        assert not log or log[-1].seq == view.seq, "the counter and the log differ"
        await audit_session(store, session, view, log, whole=oldest == 1)
    ready = {item.session for item in await store.ready(limit=10_000)}
    due = {(item.principal, item.key) for item in await store.due_questions(before=1e12, limit=10_000)}
    for view in await store.sessions(principal=None, limit=10_000):
        session, _ = await store.find_session(view.principal, view.key)
        questions = await store.questions(session)
        if view.run_id is None:
            assert (session in ready) == (view.waiting > 0), "readiness and counters differ"
        elif session in ready:
            assert not questions, "a run that waits for an answer is not to be claimed"
        assert (view.state == "suspended") == bool(questions) or view.state == "deleted"
        assert ((view.principal, view.key) in due) == any(question.due_at for question in questions)
    return logs


def recounted(path):
    """The stored bytes of each principal of an SQLite store, added up anew."""
    counted: Counter[str] = Counter()
    with closing(sqlite3.connect(path)) as connection:
        for statement in COUNTED:
            counted.update(dict(connection.execute(statement)))
        for principal, body in connection.execute("SELECT principal, body FROM schedule"):
            counted[principal] += len(json.loads(body)["spec"]["text"])
    return counted


def audit_file(path):
    """Check what an SQLite store counts and derives, between two transactions."""
    with closing(sqlite3.connect(path)) as connection:
        for wrong, query in NONE_OF.items():
            assert connection.execute(query).fetchall() == [], wrong
        stored = Counter(dict(connection.execute("SELECT principal, bytes FROM stored")))
    assert +stored == +recounted(path)
    assert min(stored.values(), default=0) >= 0


async def audit_session(store, session, view, log, *, whole):
    events = [decode_event(stored) for stored in log]
    mailbox = await store.mailbox(session)
    assert len(mailbox) == view.waiting, "the counter and the mailbox differ"
    runs = {run.run_id: run for run in await store.runs(session, limit=10_000)}
    live = [run.run_id for run in runs.values() if run.state in OPEN_RUN]
    assert live == ([] if view.run_id is None else [view.run_id]), "one run at a time"
    entries = await store.transcript(session)
    assert all(before.n < after.n for before, after in pairwise(entries))
    deleted = view.state == "deleted"
    assert deleted == (bool(log) and log[-1].kind == "session.deleted") or not whole
    if not whole:
        return
    accepted = [event.message_id for event in events if isinstance(event, MessageAccepted)]
    assert max(Counter(accepted).values(), default=0) <= 1, "accepted twice"
    settled = [(event.message_id, event.state) for event in events if isinstance(event, MessageSettled)]
    assert max(Counter(message_id for message_id, _ in settled).values(), default=0) <= 1, "settled twice"
    started = [event.run_id for event in events if isinstance(event, RunStarted)]
    rolled_back = {event.run_id for event in events if isinstance(event, RunRolledBack)}
    shown = {entry.run_id for entry in entries}
    assert not shown & rolled_back, "what was rolled back is in the transcript"
    asked = [(event.run_id, event.question.question_id) for event in events if isinstance(event, RunSuspended)]
    answered = [(event.run_id, event.answer.question_id) for event in events if isinstance(event, RunResumed)]
    assert len(set(asked)) == len(asked), "asked twice"
    assert len(set(answered)) == len(answered), "answered twice"
    open_ = {(view.run_id, question.question_id) for question in await store.questions(session)}
    assert open_ <= set(asked) - set(answered)
    finished = {event.run_id: event.status for event in events if isinstance(event, RunFinished)}
    assert sorted(started) == sorted(runs), "runs and the log differ"
    waiting = {item.message.message_id for item in mailbox}
    for message_id in accepted:
        settlement = await store.settlement(session, message_id)
        assert settlement is not None, "an accepted message is lost"
        assert (settlement.state == "accepted") == (message_id in waiting)
        final = settlement.state not in ("accepted", "taken")
        if final and not deleted:
            assert (message_id, settlement.state) in settled
        if settlement.state == "superseded" and not deleted:
            assert settlement.run_id in rolled_back
            assert finished[settlement.run_id] == "interrupted"
        if not final:
            assert message_id not in dict(settled)
        if settlement.state == "taken":
            assert settlement.run_id == view.run_id
    for run_id, run in runs.items():
        assert (run.state in OPEN_RUN) == (run_id not in finished) or deleted
        if run_id in finished:
            assert finished[run_id] == run.state


async def recover(store, *, at):
    """What a host does after a crash: end what was running, then run what waits. Nothing may be left.

    Questions expire, so that what was parked is ready.
    """
    for view in await store.sessions(principal=None, limit=10_000):
        session, _ = await store.find_session(view.principal, view.key)
        for question in await store.questions(session):
            expired = Answer(question_id=question.question_id, decision="expired", at=at)
            await store.answer(view.principal, view.key, expired)
    for claim in await store.rescue(at=at):
        await finish(store, claim, at=at)
    run = 0
    while ready := await store.ready(limit=100):
        for item in ready:
            run += 1
            claim = await store.claim(item.session, run_id=f"r_after_{at}_{run}", at=at + 1e6)
            assert isinstance(claim, Claim)
            await finish(store, claim, at=at)
    for view in await store.sessions(principal=None, limit=10_000):
        assert view.state in ("idle", "deleted")
        session, _ = await store.find_session(view.principal, view.key)
        for stored in await whole_log(store, session):
            event = decode_event(stored)
            if isinstance(event, MessageAccepted):
                settlement = await store.settlement(session, event.message_id)
                assert settlement.state not in ("accepted", "taken"), "a message is stuck"


async def finish(store, claim, *, at):
    cause = claim.interrupt or Cause(kind="crash")
    await store.commit_run(RunCommit(lease=claim.lease, status="interrupted", at=at, cause=cause))
