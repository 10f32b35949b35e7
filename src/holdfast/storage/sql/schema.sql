-- The tables, for SQLite and PostgreSQL alike. One block, statements end with a semicolon at the end of a line.
-- Bodies are UTF-8 JSON.

-- name: schema
-- node: each opening of the store, with the epoch that identifies holders.
CREATE TABLE node (
    epoch INTEGER PRIMARY KEY AUTOINCREMENT,
    node_id text NOT NULL,
    opened_at double precision NOT NULL
);
-- session: one row per conversation; readiness and limits come from its counters alone.
--   waiting: number of queued messages.
--   ready_since, due_at: since when it waits to be claimed, and when the next message may be taken.
--   run: agent, state, attempt, start, cause, messages and questions of the active run. holder 0: parked.
--   question_due: when the first of the open questions is due.
--   last_run_id: the last ended run, which begins the chain of the session's runs.
--   history_id: the newest piece of the transcript, a run's or an edit's, which begins the chain of them.
--   events_since: time of the oldest stored event, or an earlier time; null if no event is stored.
--   workspace_pool: pool of the node on which the session first used files; null: none, or that node declared no pool.
--   listed_at: updated_at in whole seconds. Lists use an index on it: every run would write an index on updated_at.
CREATE TABLE session (
    session INTEGER PRIMARY KEY AUTOINCREMENT,
    principal text NOT NULL,
    key text NOT NULL,
    agent text NOT NULL,
    created_at double precision NOT NULL,
    updated_at double precision NOT NULL,
    next_seq bigint NOT NULL,
    next_n bigint NOT NULL,
    fence bigint NOT NULL,
    holder bigint NOT NULL,
    run_id text,
    run blob,
    append_nth bigint NOT NULL,
    append_seq bigint NOT NULL,
    sweep bigint NOT NULL,
    last_run_id text,
    history_id text,
    waiting bigint NOT NULL,
    ready_since double precision,
    due_at double precision NOT NULL,
    question_due double precision,
    deleted_at double precision,
    events_since double precision,
    listed_at bigint NOT NULL DEFAULT 0,
    workspace_pool text,
    UNIQUE (principal, key)
);
CREATE INDEX session_ready ON session (ready_since) WHERE ready_since IS NOT NULL;
CREATE INDEX session_question_due ON session (question_due) WHERE question_due IS NOT NULL;
CREATE INDEX session_listed ON session (listed_at);
CREATE INDEX session_of_principal ON session (principal, listed_at);
CREATE INDEX session_deleted ON session (deleted_at, session) WHERE deleted_at IS NOT NULL;
CREATE INDEX session_events ON session (events_since, session) WHERE events_since IS NOT NULL;
-- active: every session whose run has a holder, and some whose run has ended or is parked. A start checks only these.
CREATE TABLE active (
    session INTEGER PRIMARY KEY
);
-- Messages and runs have their ids first in their keys: ids sort by time, so that what many sessions write together is
-- on a few pages. With the session first, each row would cost a page in the write-ahead log.
-- message: an accepted message. It is queued while it has neither a run nor a withdrawal; then it follows its run.
CREATE TABLE message (
    session bigint NOT NULL,
    message_id text NOT NULL,
    seq bigint NOT NULL,
    at double precision NOT NULL,
    idempotency_key text,
    body_hash blob NOT NULL,
    batch bigint NOT NULL,
    due_at double precision NOT NULL,
    target_run_id text,
    run_id text,
    withdrawn_at double precision,
    body blob NOT NULL,
    PRIMARY KEY (message_id, session)
);
CREATE UNIQUE INDEX message_once ON message (session, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX message_waiting ON message (session, seq) WHERE run_id IS NULL AND withdrawn_at IS NULL;
CREATE INDEX message_withdrawn ON message (session) WHERE withdrawn_at IS NOT NULL;
CREATE INDEX message_key ON message (at, session, seq) WHERE idempotency_key IS NOT NULL;
-- event: a row is a pack of consecutive events; body as in `event_packs`.
--   commit_no: increases with every row, in commit order; 0 in rows of version 5 and older. Rows are written in this
--   order, and SQLite gives each new row the highest rowid, so rowids are in the same order.
CREATE TABLE event (
    session bigint NOT NULL,
    last_seq bigint NOT NULL,
    first_seq bigint NOT NULL,
    run_id text,
    at double precision NOT NULL,
    commit_no bigint NOT NULL DEFAULT 0,
    body blob NOT NULL,
    PRIMARY KEY (session, last_seq)
);
-- run: a run that has ended, what its commit wrote, and its transcript entries, a line of JSON each.
--   previous_run_id: the session's run before it. last_n: the last entry number assigned when it ended.
--   previous_id: the piece of the transcript before its own. whole: its own replaces all before (1) or
--   not (0). rolled_back: its messages are superseded and it has no piece of the transcript (1) or not (0).
CREATE TABLE run (
    run_id text NOT NULL,
    session bigint NOT NULL,
    previous_run_id text,
    next_run_id text,
    fence bigint NOT NULL,
    started_seq bigint NOT NULL,
    commit_seq bigint NOT NULL,
    end_seq bigint NOT NULL,
    last_n bigint NOT NULL,
    body blob NOT NULL,
    entries blob,
    previous_id text,
    whole bigint NOT NULL DEFAULT 0,
    rolled_back bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, session)
);
-- edit: a transcript that replaced another one, or none.
CREATE TABLE edit (
    session bigint NOT NULL,
    edit_id text NOT NULL,
    previous_id text,
    last_n bigint NOT NULL,
    entries blob,
    PRIMARY KEY (session, edit_id)
);
-- landmark: sparse index of a session's transcript: some of its pieces, by the number of the last entry. Undo drops the
-- landmarks of pieces that are no longer part of the transcript.
CREATE TABLE landmark (
    session bigint NOT NULL,
    last_n bigint NOT NULL,
    piece text NOT NULL,
    PRIMARY KEY (session, last_n)
);
-- kept: state that an agent keeps with the transcript entry of that number. It is read by number only, and stays for
-- undo and branches until the session is purged.
CREATE TABLE kept (
    session bigint NOT NULL,
    n bigint NOT NULL,
    body blob NOT NULL,
    PRIMARY KEY (session, n)
);
-- attachment: bytes, once per principal; at: when they were (last) uploaded.
CREATE TABLE attachment (
    principal text NOT NULL,
    digest text NOT NULL,
    at double precision NOT NULL,
    size_bytes bigint NOT NULL,
    about blob NOT NULL,
    body blob NOT NULL,
    PRIMARY KEY (principal, digest)
);
CREATE INDEX attachment_age ON attachment (at, principal, digest);
-- attachment_use: which sessions refer to an attachment.
CREATE TABLE attachment_use (
    principal text NOT NULL,
    digest text NOT NULL,
    session bigint NOT NULL,
    PRIMARY KEY (principal, digest, session)
);
CREATE INDEX attachment_use_session ON attachment_use (session);
-- api_key: keys as digests. agents: agents that it may use, as a JSON list.
CREATE TABLE api_key (
    key_id text PRIMARY KEY,
    principal text NOT NULL,
    role text NOT NULL,
    digest blob NOT NULL,
    created_at double precision NOT NULL,
    label text NOT NULL,
    revoked_at double precision,
    agents text
);
-- schedule: sends messages at set times.
--   revision: increases with every write. session: key of the session that gets the messages.
--   due_at: when to check it next; null while it is paused or finished. decided_at: when that was decided.
CREATE TABLE schedule (
    schedule INTEGER PRIMARY KEY AUTOINCREMENT,
    principal text NOT NULL,
    schedule_id text NOT NULL,
    revision bigint NOT NULL,
    session text NOT NULL,
    due_at double precision,
    decided_at double precision,
    body blob NOT NULL,
    UNIQUE (principal, schedule_id)
);
CREATE INDEX schedule_due ON schedule (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX schedule_decided ON schedule (decided_at) WHERE decided_at IS NOT NULL;

-- access_grant: what people granted to a session or a principal.
--   session: number of the session that has the access; 0 if all sessions of the principal have it.
CREATE TABLE access_grant (
    grant_id text PRIMARY KEY,
    principal text NOT NULL,
    session bigint NOT NULL,
    granted_at double precision NOT NULL,
    body blob NOT NULL
);
CREATE INDEX access_grant_of ON access_grant (principal, session);

-- stored: bytes that the rows of each principal take, and its sessions that are not deleted, counted as they are
-- written and dropped.
CREATE TABLE stored (
    principal text PRIMARY KEY,
    bytes bigint NOT NULL,
    sessions bigint NOT NULL DEFAULT 0
);
-- total: the number of sessions that are not deleted, under the name 'sessions'. It is written when a session is created
-- or deleted, not by every commit.
CREATE TABLE total (
    name text PRIMARY KEY,
    value bigint NOT NULL
);

-- name: migrate_1
-- From version 1 of the schema to version 2. In version 1 every run had a piece of the transcript, possibly empty.
DROP INDEX session_ready;
ALTER TABLE session RENAME COLUMN waiting_since TO ready_since;
ALTER TABLE session ADD COLUMN history_id text;
ALTER TABLE session ADD COLUMN question_due double precision;
ALTER TABLE run ADD COLUMN previous_id text;
ALTER TABLE run ADD COLUMN whole bigint NOT NULL DEFAULT 0;
ALTER TABLE run ADD COLUMN rolled_back bigint NOT NULL DEFAULT 0;
CREATE TABLE edit (
    session bigint NOT NULL,
    edit_id text NOT NULL,
    previous_id text,
    last_n bigint NOT NULL,
    entries blob,
    PRIMARY KEY (session, edit_id)
);
CREATE TABLE attachment (
    principal text NOT NULL,
    digest text NOT NULL,
    at double precision NOT NULL,
    size_bytes bigint NOT NULL,
    about blob NOT NULL,
    body blob NOT NULL,
    PRIMARY KEY (principal, digest)
);
CREATE TABLE attachment_use (
    principal text NOT NULL,
    digest text NOT NULL,
    session bigint NOT NULL,
    PRIMARY KEY (principal, digest, session)
);
CREATE INDEX attachment_use_session ON attachment_use (session);
CREATE INDEX piece ON run (session, last_n) WHERE entries IS NOT NULL;
UPDATE run SET previous_id = (
    SELECT before.run_id FROM run AS before
    WHERE before.session = run.session AND before.last_n < run.last_n AND before.entries IS NOT NULL
    ORDER BY before.last_n DESC LIMIT 1
) WHERE entries IS NOT NULL;
UPDATE session SET history_id = (
    SELECT run.run_id FROM run WHERE run.session = session.session AND run.entries IS NOT NULL
    ORDER BY run.last_n DESC LIMIT 1
), ready_since = CASE WHEN run_id IS NULL AND waiting > 0 THEN ready_since END;
DROP INDEX piece;
CREATE INDEX session_ready ON session (ready_since) WHERE ready_since IS NOT NULL;
CREATE INDEX session_question_due ON session (question_due) WHERE question_due IS NOT NULL;

-- name: migrate_2
-- From version 2 of the schema to version 3.
CREATE TABLE schedule (
    schedule INTEGER PRIMARY KEY AUTOINCREMENT,
    principal text NOT NULL,
    schedule_id text NOT NULL,
    revision bigint NOT NULL,
    session text NOT NULL,
    due_at double precision,
    decided_at double precision,
    body blob NOT NULL,
    UNIQUE (principal, schedule_id)
);
CREATE INDEX schedule_due ON schedule (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX schedule_decided ON schedule (decided_at) WHERE decided_at IS NOT NULL;

-- name: migrate_3
-- From version 3 of the schema to version 4. Kept agent state was part of the entries; `migration.move_kept` moves it.
CREATE TABLE kept (
    session bigint NOT NULL,
    n bigint NOT NULL,
    body blob NOT NULL,
    PRIMARY KEY (session, n)
);

-- name: migrate_4
-- From version 4 of the schema to version 5.
ALTER TABLE api_key ADD COLUMN agents text;
CREATE TABLE stored (
    principal text PRIMARY KEY,
    bytes bigint NOT NULL
);
INSERT INTO stored (principal, bytes) SELECT principal, sum(bytes) FROM (
    SELECT session.principal, length(message.body) AS bytes
    FROM message JOIN session ON session.session = message.session
    UNION ALL
    SELECT session.principal, length(event.body) FROM event JOIN session ON session.session = event.session
    UNION ALL
    SELECT session.principal, length(run.body) + coalesce(length(run.entries), 0)
    FROM run JOIN session ON session.session = run.session
    UNION ALL
    SELECT session.principal, coalesce(length(edit.entries), 0) FROM edit JOIN session ON session.session = edit.session
    UNION ALL
    SELECT session.principal, length(kept.body) FROM kept JOIN session ON session.session = kept.session
    UNION ALL
    SELECT principal, size_bytes FROM attachment
) AS counted GROUP BY principal;

-- name: migrate_5
-- From version 5 of the schema to version 6. `migration.set_landmarks` adds the landmarks.
ALTER TABLE session ADD COLUMN events_since double precision;
ALTER TABLE session ADD COLUMN listed_at bigint NOT NULL DEFAULT 0;
ALTER TABLE event ADD COLUMN commit_no bigint NOT NULL DEFAULT 0;
ALTER TABLE stored ADD COLUMN sessions bigint NOT NULL DEFAULT 0;
CREATE TABLE active (
    session INTEGER PRIMARY KEY
);
CREATE TABLE landmark (
    session bigint NOT NULL,
    last_n bigint NOT NULL,
    piece text NOT NULL,
    PRIMARY KEY (session, last_n)
);
CREATE TABLE total (
    name text PRIMARY KEY,
    value bigint NOT NULL
);
UPDATE session SET listed_at = CAST(updated_at AS bigint), events_since = (
    SELECT event.at FROM event WHERE event.session = session.session ORDER BY event.last_seq LIMIT 1
);
INSERT INTO active (session) SELECT session FROM session WHERE run_id IS NOT NULL AND holder > 0;
INSERT INTO stored (principal, bytes, sessions)
SELECT principal, 0, count(*) FROM session WHERE deleted_at IS NULL GROUP BY principal
ON CONFLICT (principal) DO UPDATE SET sessions = excluded.sessions;
INSERT INTO total (name, value) SELECT 'sessions', count(*) FROM session WHERE deleted_at IS NULL;
CREATE INDEX session_listed ON session (listed_at);
CREATE INDEX session_of_principal ON session (principal, listed_at);
CREATE INDEX session_deleted ON session (deleted_at, session) WHERE deleted_at IS NOT NULL;
CREATE INDEX session_events ON session (events_since, session) WHERE events_since IS NOT NULL;
CREATE INDEX message_key ON message (at, session, seq) WHERE idempotency_key IS NOT NULL;
CREATE INDEX attachment_age ON attachment (at, principal, digest);

-- name: migrate_6
-- From version 6 of the schema to version 7.
CREATE TABLE access_grant (
    grant_id text PRIMARY KEY,
    principal text NOT NULL,
    session bigint NOT NULL,
    granted_at double precision NOT NULL,
    body blob NOT NULL
);
CREATE INDEX access_grant_of ON access_grant (principal, session);

-- name: migrate_7
-- From version 7 of the schema to version 8.
ALTER TABLE session ADD COLUMN workspace_pool text;
