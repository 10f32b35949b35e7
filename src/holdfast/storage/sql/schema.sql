-- The tables, for SQLite and PostgreSQL alike. One block, statements end with a semicolon at the end of a line.
-- Bodies are UTF-8 JSON.

-- name: schema
-- node: each opening of the store, with the epoch that holders are named by.
CREATE TABLE node (
    epoch INTEGER PRIMARY KEY AUTOINCREMENT,
    node_id text NOT NULL,
    opened_at double precision NOT NULL
);
-- session: one row per conversation; readiness and bounds come from its counters alone.
--   waiting, waiting_since, due_at: how many messages wait, since when, and before when nothing is taken.
--   run: agent, state, attempt, start, cause and messages of the run that is on.
--   last_run_id: the run that ended last, which begins the chain of the session's runs.
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
    waiting bigint NOT NULL,
    waiting_since double precision,
    due_at double precision NOT NULL,
    deleted_at double precision,
    UNIQUE (principal, key)
);
CREATE INDEX session_ready ON session (waiting_since) WHERE run_id IS NULL AND waiting > 0;
-- Messages and runs have their ids first in their keys: ids sort by time, so that what many sessions write together lies
-- together on a few pages. With the session first, each row would cost a page in the write-ahead log.
-- message: what was accepted. It waits while it has neither a run nor a withdrawal; then it follows its run.
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
-- event: a row is a pack of events that were written together; body has a line "<kind> <json>" for each.
CREATE TABLE event (
    session bigint NOT NULL,
    last_seq bigint NOT NULL,
    first_seq bigint NOT NULL,
    run_id text,
    at double precision NOT NULL,
    body blob NOT NULL,
    PRIMARY KEY (session, last_seq)
);
-- run: a run that has ended, what its commit wrote, and its transcript entries, a line of JSON each.
--   previous_run_id: the session's run before it. last_n: the number of the transcript's last entry after it.
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
    PRIMARY KEY (run_id, session)
);
-- api_key: keys as digests.
CREATE TABLE api_key (
    key_id text PRIMARY KEY,
    principal text NOT NULL,
    role text NOT NULL,
    digest blob NOT NULL,
    created_at double precision NOT NULL,
    label text NOT NULL,
    revoked_at double precision
);
