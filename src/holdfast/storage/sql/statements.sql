-- Statements that run on SQLite and on PostgreSQL alike.

-- name: add_node
INSERT INTO node (node_id, opened_at) VALUES (?, ?) RETURNING epoch

-- name: last_session
SELECT coalesce(max(session), 0) FROM session

-- name: session_by_key
SELECT session, principal, key, agent, created_at, updated_at, next_seq, next_n, fence, holder, run_id, run,
       append_nth, append_seq, sweep, last_run_id, deleted_at, waiting
FROM session WHERE principal = ? AND key = ?

-- name: session_by_number
SELECT session, principal, key, agent, created_at, updated_at, next_seq, next_n, fence, holder, run_id, run,
       append_nth, append_seq, sweep, last_run_id, deleted_at, waiting
FROM session WHERE session = ?

-- name: sessions
SELECT session, principal, key, agent, created_at, updated_at, next_seq, next_n, fence, holder, run_id, run,
       append_nth, append_seq, sweep, last_run_id, deleted_at, waiting
FROM session ORDER BY updated_at DESC, session DESC LIMIT ?

-- name: sessions_before
SELECT session, principal, key, agent, created_at, updated_at, next_seq, next_n, fence, holder, run_id, run,
       append_nth, append_seq, sweep, last_run_id, deleted_at, waiting
FROM session WHERE updated_at < ? ORDER BY updated_at DESC, session DESC LIMIT ?

-- name: sessions_of_principal
SELECT session, principal, key, agent, created_at, updated_at, next_seq, next_n, fence, holder, run_id, run,
       append_nth, append_seq, sweep, last_run_id, deleted_at, waiting
FROM session WHERE principal = ? ORDER BY updated_at DESC, session DESC LIMIT ?

-- name: sessions_of_principal_before
SELECT session, principal, key, agent, created_at, updated_at, next_seq, next_n, fence, holder, run_id, run,
       append_nth, append_seq, sweep, last_run_id, deleted_at, waiting
FROM session WHERE principal = ? AND updated_at < ? ORDER BY updated_at DESC, session DESC LIMIT ?

-- name: orphans
SELECT session FROM session WHERE run_id IS NOT NULL AND holder <> ?

-- name: ready
SELECT session, principal, key, agent, due_at
FROM session WHERE run_id IS NULL AND waiting > 0 ORDER BY waiting_since, session LIMIT ?

-- name: live_sessions
SELECT count(*) FROM session WHERE principal = ? AND deleted_at IS NULL

-- name: all_live_sessions
SELECT count(*) FROM session WHERE deleted_at IS NULL

-- name: add_sessions
INSERT INTO session (session, principal, key, created_at, agent, updated_at, next_seq, next_n, fence, holder, run_id,
    run, append_nth, append_seq, sweep, last_run_id, waiting, waiting_since, due_at, deleted_at)
VALUES [[(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)]]

-- name: save_sessions
-- A row is (session, fence and next_seq as they were, then the columns in the order below). The fence and the counter are
-- checked by the write itself: a row that somebody else changed is not written, and the number of rows tells it.
UPDATE session SET
    agent = new.column4, updated_at = new.column5, next_seq = new.column6, next_n = new.column7,
    fence = new.column8, holder = new.column9, run_id = new.column10, run = new.column11, append_nth = new.column12,
    append_seq = new.column13, sweep = new.column14, last_run_id = new.column15, waiting = new.column16,
    waiting_since = new.column17, due_at = new.column18, deleted_at = new.column19
FROM (VALUES
    [[(CAST(? AS bigint), CAST(? AS bigint), CAST(? AS bigint), CAST(? AS text), CAST(? AS double precision),
    CAST(? AS bigint), CAST(? AS bigint), CAST(? AS bigint), CAST(? AS bigint), CAST(? AS text), CAST(? AS blob),
    CAST(? AS bigint), CAST(? AS bigint), CAST(? AS bigint), CAST(? AS text), CAST(? AS bigint),
    CAST(? AS double precision), CAST(? AS double precision), CAST(? AS double precision))]]
) AS new
WHERE session.session = new.column1 AND session.fence = new.column2 AND session.next_seq = new.column3

-- name: waiting_messages
SELECT body, batch, due_at, target_run_id FROM message
WHERE session = ? AND run_id IS NULL AND withdrawn_at IS NULL ORDER BY seq

-- name: taken_message
SELECT body, batch, due_at, target_run_id FROM message WHERE session = ? AND message_id = ?

-- name: message_by_id
SELECT message_id, seq, body_hash, run_id, withdrawn_at FROM message WHERE session = ? AND message_id = ?

-- name: message_by_idempotency_key
SELECT message_id, seq, body_hash, run_id, withdrawn_at FROM message WHERE session = ? AND idempotency_key = ?

-- name: add_messages
INSERT INTO message (session, message_id, seq, at, idempotency_key, body_hash, batch, due_at, target_run_id, run_id,
    withdrawn_at, body)
VALUES [[(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)]]

-- name: take_message
UPDATE message SET run_id = ?
WHERE session = ? AND message_id = ? AND run_id IS NULL AND withdrawn_at IS NULL

-- name: withdraw_message
UPDATE message SET withdrawn_at = ?
WHERE session = ? AND message_id = ? AND run_id IS NULL AND withdrawn_at IS NULL

-- name: add_events
INSERT INTO event (session, last_seq, first_seq, run_id, at, body) VALUES [[(?, ?, ?, ?, ?, ?)]]

-- name: events_after
SELECT last_seq, body FROM event WHERE session = ? AND last_seq > ? ORDER BY last_seq LIMIT ?

-- name: oldest_event
SELECT first_seq FROM event WHERE session = ? ORDER BY last_seq LIMIT 1

-- name: next_seq
SELECT next_seq FROM session WHERE session = ?

-- name: run_events
SELECT last_seq, body FROM event WHERE session = ? AND last_seq >= ? AND run_id = ? ORDER BY last_seq

-- name: entries_after
WITH RECURSIVE chain (run_id, previous_run_id, last_n) AS (
    SELECT run.run_id, run.previous_run_id, run.last_n
    FROM session JOIN run ON run.run_id = session.last_run_id AND run.session = session.session
    WHERE session.session = ? AND run.last_n > ?
    UNION ALL
    SELECT run.run_id, run.previous_run_id, run.last_n
    FROM chain JOIN run ON run.run_id = chain.previous_run_id AND run.session = ?
    WHERE run.last_n > ?
)
SELECT run.entries FROM chain JOIN run ON run.run_id = chain.run_id AND run.session = ?
WHERE run.entries IS NOT NULL ORDER BY chain.last_n LIMIT ?

-- name: add_runs
INSERT INTO run (run_id, session, previous_run_id, next_run_id, fence, started_seq, commit_seq, end_seq, last_n, body,
    entries)
VALUES [[(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)]]

-- name: ended_run
SELECT body, fence, started_seq, commit_seq, end_seq, next_run_id, previous_run_id FROM run
WHERE session = ? AND run_id = ?

-- name: ended_runs
-- The newest first.
WITH RECURSIVE chain (run_id, depth) AS (
    SELECT last_run_id, 1 FROM session WHERE session = ? AND last_run_id IS NOT NULL
    UNION ALL
    SELECT run.previous_run_id, chain.depth + 1
    FROM chain JOIN run ON run.run_id = chain.run_id AND run.session = ?
    WHERE chain.depth < ? AND run.previous_run_id IS NOT NULL
)
SELECT run.body FROM chain JOIN run ON run.run_id = chain.run_id AND run.session = ? ORDER BY chain.depth

-- name: sessions_to_prune
SELECT session FROM session
WHERE session > ? AND session <= ? AND (SELECT event.at FROM event WHERE event.session = session.session ORDER BY event.last_seq LIMIT 1) < ?

-- name: events_to_keep
SELECT min(last_seq) FROM event WHERE session = ? AND (at >= ? OR last_seq >= ?)

-- name: prune_events
DELETE FROM event WHERE session = ? AND last_seq < ?

-- name: forget_idempotency_keys
UPDATE message SET idempotency_key = NULL
WHERE idempotency_key IS NOT NULL AND at < ? AND (withdrawn_at IS NOT NULL
    OR EXISTS (SELECT 1 FROM run WHERE run.session = message.session AND run.run_id = message.run_id))
    AND session > ? AND session <= ?

-- name: tombstones
SELECT session FROM session WHERE session > ? AND session <= ? AND deleted_at < ? AND run_id IS NULL

-- name: purge_message
DELETE FROM message WHERE message_id = ? AND session = ?

-- name: purge_withdrawn_messages
DELETE FROM message WHERE session = ? AND withdrawn_at IS NOT NULL

-- name: purge_events
DELETE FROM event WHERE session = ?

-- name: purge_run
DELETE FROM run WHERE run_id = ? AND session = ?

-- name: purge_session
DELETE FROM session WHERE session = ?

-- name: add_key
INSERT INTO api_key (key_id, principal, role, digest, created_at, label, revoked_at) VALUES (?, ?, ?, ?, ?, ?, ?)

-- name: keys
SELECT key_id, principal, role, digest, created_at, label, revoked_at FROM api_key ORDER BY created_at, key_id

-- name: revoke_key
UPDATE api_key SET revoked_at = ? WHERE key_id = ? AND revoked_at IS NULL
