-- Statements that run on SQLite and on PostgreSQL alike.

-- name: add_node
INSERT INTO node (node_id, opened_at) VALUES (?, ?) RETURNING epoch

-- name: session_by_key
SELECT session, principal, key, agent, created_at, updated_at, next_seq, next_n, fence, holder, run_id, run,
       append_nth, append_seq, sweep, last_run_id, deleted_at, history_id, events_since, workspace_pool, waiting
FROM session WHERE principal = ? AND key = ?

-- name: session_by_number
SELECT session, principal, key, agent, created_at, updated_at, next_seq, next_n, fence, holder, run_id, run,
       append_nth, append_seq, sweep, last_run_id, deleted_at, history_id, events_since, workspace_pool, waiting
FROM session WHERE session = ?

-- name: sessions
-- Parameters: updated_at in whole seconds, updated_at and session of the last session of the previous page, limit; then
-- the same again. The index orders by whole seconds only, so the inner query finds the last second that the page needs.
SELECT session, principal, key, agent, created_at, updated_at, next_seq, next_n, fence, holder, run_id, run,
       append_nth, append_seq, sweep, last_run_id, deleted_at, history_id, events_since, workspace_pool, waiting
FROM session WHERE listed_at >= (SELECT min(listed_at) FROM (
    SELECT listed_at FROM session WHERE listed_at <= ? AND (updated_at, session) < (?, ?)
    ORDER BY listed_at DESC LIMIT ?
) AS found) AND listed_at <= ? AND (updated_at, session) < (?, ?) ORDER BY updated_at DESC, session DESC LIMIT ?

-- name: sessions_of_principal
-- As sessions, with the principal as the first parameter of both queries.
SELECT session, principal, key, agent, created_at, updated_at, next_seq, next_n, fence, holder, run_id, run,
       append_nth, append_seq, sweep, last_run_id, deleted_at, history_id, events_since, workspace_pool, waiting
FROM session WHERE listed_at >= (SELECT min(listed_at) FROM (
    SELECT listed_at FROM session WHERE principal = ? AND listed_at <= ? AND (updated_at, session) < (?, ?)
    ORDER BY listed_at DESC LIMIT ?
) AS found) AND principal = ? AND listed_at <= ? AND (updated_at, session) < (?, ?) ORDER BY updated_at DESC, session DESC LIMIT ?

-- name: orphans
-- The holder of a parked run is 0; epochs are above 0.
SELECT session FROM session
WHERE session IN (SELECT session FROM active) AND run_id IS NOT NULL AND holder > 0 AND holder <> ?

-- name: active
SELECT session FROM active ORDER BY session

-- name: mark_active
INSERT INTO active (session) VALUES [[(?)]] ON CONFLICT DO NOTHING

-- name: unmark_active
DELETE FROM active WHERE session = ? AND NOT EXISTS (
    SELECT 1 FROM session WHERE session.session = active.session AND run_id IS NOT NULL AND holder > 0)

-- name: ready
SELECT session, principal, key, agent, due_at, run
FROM session WHERE ready_since IS NOT NULL ORDER BY ready_since, session LIMIT ?

-- name: asking
-- As session_by_number.
SELECT session, principal, key, agent, created_at, updated_at, next_seq, next_n, fence, holder, run_id, run,
       append_nth, append_seq, sweep, last_run_id, deleted_at, history_id, events_since, workspace_pool, waiting
FROM session WHERE question_due < ? ORDER BY question_due, session LIMIT ?

-- name: live_sessions
SELECT sessions FROM stored WHERE principal = ?

-- name: all_live_sessions
SELECT value FROM total WHERE name = 'sessions'

-- name: add_total
INSERT INTO total (name, value) VALUES ('sessions', ?)
ON CONFLICT (name) DO UPDATE SET value = total.value + excluded.value

-- name: set_events_since
UPDATE session SET events_since = ? WHERE session = ?

-- name: add_sessions
INSERT INTO session (session, principal, key, created_at, events_since, listed_at, agent, updated_at, next_seq, next_n,
    fence, holder, run_id, run, append_nth, append_seq, sweep, last_run_id, history_id, waiting, ready_since, due_at,
    question_due, deleted_at, workspace_pool)
VALUES [[(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)]]

-- name: save_sessions
-- A row is (session; fence, next_seq and run_id as they were; then the columns in the order below). The write itself
-- checks them: a row that was changed concurrently is not written, and the row count shows it. The workspace_pool is not
-- checked: once a node has set it, it stays.
UPDATE session SET
    agent = new.column5, updated_at = new.column6, next_seq = new.column7, next_n = new.column8,
    fence = new.column9, holder = new.column10, run_id = new.column11, run = new.column12, append_nth = new.column13,
    append_seq = new.column14, sweep = new.column15, last_run_id = new.column16, history_id = new.column17,
    waiting = new.column18, ready_since = new.column19, due_at = new.column20, question_due = new.column21,
    deleted_at = new.column22, workspace_pool = coalesce(session.workspace_pool, new.column23)
FROM (VALUES
    [[(CAST(? AS bigint), CAST(? AS bigint), CAST(? AS bigint), CAST(? AS text),
    CAST(? AS text), CAST(? AS double precision), CAST(? AS bigint), CAST(? AS bigint),
    CAST(? AS bigint), CAST(? AS bigint), CAST(? AS text), CAST(? AS blob), CAST(? AS bigint),
    CAST(? AS bigint), CAST(? AS bigint), CAST(? AS text), CAST(? AS text),
    CAST(? AS bigint), CAST(? AS double precision), CAST(? AS double precision), CAST(? AS double precision),
    CAST(? AS double precision), CAST(? AS text))]]
) AS new
WHERE session.session = new.column1 AND session.fence = new.column2 AND session.next_seq = new.column3
    AND coalesce(session.run_id, '') = coalesce(new.column4, '')

-- name: save_appends
-- As save_sessions, for rows in which an append has changed only these columns.
UPDATE session SET next_seq = new.column5, append_nth = new.column6, append_seq = new.column7
FROM (VALUES
    [[(CAST(? AS bigint), CAST(? AS bigint), CAST(? AS bigint), CAST(? AS text), CAST(? AS bigint), CAST(? AS bigint),
    CAST(? AS bigint))]]
) AS new
WHERE session.session = new.column1 AND session.fence = new.column2 AND session.next_seq = new.column3
    AND coalesce(session.run_id, '') = coalesce(new.column4, '')

-- name: save_starts
-- As save_sessions, for rows in which the start of a run has changed only these columns.
UPDATE session SET
    agent = new.column5, updated_at = new.column6, next_seq = new.column7, fence = new.column8, holder = new.column9,
    run_id = new.column10, run = new.column11, append_nth = 0, append_seq = 0
FROM (VALUES
    [[(CAST(? AS bigint), CAST(? AS bigint), CAST(? AS bigint), CAST(? AS text), CAST(? AS text),
    CAST(? AS double precision), CAST(? AS bigint), CAST(? AS bigint), CAST(? AS bigint), CAST(? AS text),
    CAST(? AS blob))]]
) AS new
WHERE session.session = new.column1 AND session.fence = new.column2 AND session.next_seq = new.column3
    AND coalesce(session.run_id, '') = coalesce(new.column4, '')

-- name: save_ends
-- As save_sessions, for rows in which the end of a run has changed only these columns.
UPDATE session SET
    updated_at = new.column5, next_seq = new.column6, next_n = new.column7, last_run_id = new.column8,
    history_id = new.column9, run_id = NULL, run = NULL, append_nth = 0, append_seq = 0
FROM (VALUES
    [[(CAST(? AS bigint), CAST(? AS bigint), CAST(? AS bigint), CAST(? AS text), CAST(? AS double precision),
    CAST(? AS bigint), CAST(? AS bigint), CAST(? AS text), CAST(? AS text))]]
) AS new
WHERE session.session = new.column1 AND session.fence = new.column2 AND session.next_seq = new.column3
    AND coalesce(session.run_id, '') = coalesce(new.column4, '')

-- name: save_listed
UPDATE session SET listed_at = ? WHERE session = ?

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

-- name: add_plain_messages
-- As add_messages, for messages without an idempotency key, target run or withdrawal. Each parameter costs as much as a
-- column, and these columns are null in most rows.
INSERT INTO message (session, message_id, seq, at, body_hash, batch, due_at, run_id, body)
VALUES [[(?, ?, ?, ?, CAST('' AS blob), ?, ?, ?, ?)]]

-- name: take_message
UPDATE message SET run_id = ?
WHERE session = ? AND message_id = ? AND run_id IS NULL AND withdrawn_at IS NULL

-- name: withdraw_message
UPDATE message SET withdrawn_at = ?
WHERE session = ? AND message_id = ? AND run_id IS NULL AND withdrawn_at IS NULL

-- name: add_events
INSERT INTO event (session, last_seq, first_seq, run_id, at, commit_no, body) VALUES [[(?, ?, ?, ?, ?, ?, ?)]]

-- name: last_event_row
SELECT coalesce(max(rowid), 0) FROM event

-- name: small_events
-- The rows of a range that can be merged: small rows of runs, not in the compact form.
SELECT session, run_id, first_seq, last_seq, at, body FROM event
WHERE rowid > ? AND rowid <= ? AND run_id IS NOT NULL AND length(body) <= ? AND substr(body, 1, 1) <> x'01'
ORDER BY rowid

-- name: drop_merged_events
DELETE FROM event WHERE session = ? AND last_seq >= ? AND last_seq < ?

-- name: merge_event
UPDATE event SET first_seq = ?, at = ?, body = ? WHERE session = ? AND last_seq = ?

-- name: events_after
SELECT last_seq, body FROM event WHERE session = ? AND last_seq > ? ORDER BY last_seq LIMIT ?

-- name: oldest_event
SELECT first_seq FROM event WHERE session = ? ORDER BY last_seq LIMIT 1

-- name: next_seq
SELECT next_seq FROM session WHERE session = ?

-- name: run_events
SELECT last_seq, body FROM event WHERE session = ? AND last_seq >= ? AND run_id = ? ORDER BY last_seq

-- name: history_id
SELECT history_id FROM session WHERE session = ?

-- name: pieces
-- Parameters: bytes, the newest piece, session, bytes, session, after. Returns runs that are pieces, the newest first:
-- id, id of the previous piece, size, and the body if its size is at most `bytes`. Stops at a piece that ends before
-- `after`.
WITH RECURSIVE chain (piece, previous_id, size, body) AS (
    SELECT run_id, CASE whole WHEN 0 THEN previous_id END, length(entries),
        CASE WHEN length(entries) <= ? THEN entries END
    FROM run WHERE run_id = ? AND session = ?
    UNION ALL
    SELECT run.run_id, CASE run.whole WHEN 0 THEN run.previous_id END, length(run.entries),
        CASE WHEN length(run.entries) <= ? THEN run.entries END
    FROM chain JOIN run ON run.run_id = chain.previous_id AND run.session = ? WHERE run.last_n > ?
)
SELECT piece, previous_id, size, body FROM chain

-- name: chain
-- Parameters: the newest piece, session, session. As pieces, but returns all of them: id and number of the last entry.
WITH RECURSIVE chain (piece, previous_id, last_n) AS (
    SELECT run_id, CASE whole WHEN 0 THEN previous_id END, last_n FROM run WHERE run_id = ? AND session = ?
    UNION ALL
    SELECT run.run_id, CASE run.whole WHEN 0 THEN run.previous_id END, run.last_n
    FROM chain JOIN run ON run.run_id = chain.previous_id AND run.session = ?
)
SELECT piece, last_n FROM chain

-- name: landmark
-- Parameters: session, number of an entry, session, the newest piece. None, if the session shows another transcript now.
SELECT last_n, piece FROM landmark WHERE session = ? AND last_n >= ?
    AND EXISTS (SELECT 1 FROM session WHERE session = ? AND history_id = ?)
ORDER BY last_n LIMIT 1

-- name: add_landmarks
INSERT INTO landmark (session, last_n, piece) VALUES [[(?, ?, ?)]]
ON CONFLICT (session, last_n) DO UPDATE SET piece = excluded.piece

-- name: drop_landmarks
DELETE FROM landmark WHERE session = ? AND last_n > ?

-- name: long_transcripts
SELECT session, history_id FROM session WHERE history_id IS NOT NULL AND next_n > ?

-- name: pieces_within
-- Parameters: the newest piece, session, bytes, session, session. Unordered; a larger piece is null.
WITH RECURSIVE chain (piece) AS (
    SELECT CAST(? AS text)
    UNION ALL
    SELECT run.previous_id FROM chain JOIN run ON run.run_id = chain.piece AND run.session = ?
    WHERE run.whole = 0 AND run.previous_id IS NOT NULL
)
SELECT
    coalesce(run.last_n, edit.last_n),
    CASE WHEN coalesce(length(run.entries), length(edit.entries)) <= ? THEN coalesce(run.entries, edit.entries) END
FROM chain
LEFT JOIN run ON run.run_id = chain.piece AND run.session = ?
LEFT JOIN edit ON edit.edit_id = chain.piece AND edit.session = ?
WHERE run.entries IS NOT NULL OR edit.entries IS NOT NULL

-- name: transcript_bytes
-- Parameters: the newest piece, session, session, session. Returns the total bytes of all pieces.
WITH RECURSIVE chain (piece) AS (
    SELECT CAST(? AS text)
    UNION ALL
    SELECT run.previous_id FROM chain JOIN run ON run.run_id = chain.piece AND run.session = ?
    WHERE run.whole = 0 AND run.previous_id IS NOT NULL
)
SELECT coalesce(sum(coalesce(length(run.entries), length(edit.entries))), 0)
FROM chain
LEFT JOIN run ON run.run_id = chain.piece AND run.session = ?
LEFT JOIN edit ON edit.edit_id = chain.piece AND edit.session = ?

-- name: run_pieces
SELECT session, run_id FROM run WHERE entries IS NOT NULL

-- name: edit_pieces
SELECT session, edit_id FROM edit WHERE entries IS NOT NULL

-- name: run_piece
SELECT previous_id, whole, last_n, entries FROM run WHERE session = ? AND run_id = ?

-- name: edit_piece
SELECT previous_id, 1, last_n, entries FROM edit WHERE session = ? AND edit_id = ?

-- name: save_run_piece
UPDATE run SET entries = ? WHERE session = ? AND run_id = ?

-- name: save_edit_piece
UPDATE edit SET entries = ? WHERE session = ? AND edit_id = ?

-- name: add_edits
INSERT INTO edit (session, edit_id, previous_id, last_n, entries) VALUES [[(?, ?, ?, ?, ?)]]

-- name: add_kept
INSERT INTO kept (session, n, body) VALUES [[(?, ?, ?)]]

-- name: kept
SELECT body FROM kept WHERE session = ? AND n = ?

-- name: add_runs
INSERT INTO run (run_id, session, previous_run_id, next_run_id, fence, started_seq, commit_seq, end_seq, last_n, body,
    entries, previous_id, whole, rolled_back)
VALUES [[(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)]]

-- name: ended_run
SELECT body, fence, started_seq, commit_seq, end_seq, next_run_id, previous_run_id, last_n, rolled_back FROM run
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

-- name: tombstones
-- Parameters: the time before which they are old; time and session of the last one of the previous batch; limit.
SELECT deleted_at, session FROM session
WHERE deleted_at < ? AND (deleted_at, session) > (?, ?) AND run_id IS NULL ORDER BY deleted_at, session LIMIT ?

-- name: sessions_with_events
SELECT events_since, session FROM session
WHERE events_since < ? AND (events_since, session) > (?, ?) ORDER BY events_since, session LIMIT ?

-- name: oldest_events
SELECT last_seq, at FROM event WHERE session = ? ORDER BY last_seq LIMIT ?

-- name: oldest_packs
SELECT last_seq, at, body FROM event WHERE session = ? ORDER BY last_seq LIMIT ?

-- name: messages_with_keys
SELECT at, session, seq, message_id FROM message
WHERE idempotency_key IS NOT NULL AND at < ? AND (at, session, seq) > (?, ?, ?) ORDER BY at, session, seq LIMIT ?

-- name: forget_idempotency_key
UPDATE message SET idempotency_key = NULL
WHERE message_id = ? AND session = ? AND (withdrawn_at IS NOT NULL
    OR EXISTS (SELECT 1 FROM run WHERE run.session = message.session AND run.run_id = message.run_id))

-- name: old_attachments
SELECT at, principal, digest FROM attachment
WHERE at < ? AND (at, principal, digest) > (?, ?, ?) ORDER BY at, principal, digest LIMIT ?

-- name: prune_events
DELETE FROM event WHERE session = ? AND last_seq < ? RETURNING length(body)

-- name: purge_message
DELETE FROM message WHERE message_id = ? AND session = ? RETURNING length(body)

-- name: purge_withdrawn_messages
DELETE FROM message WHERE session = ? AND withdrawn_at IS NOT NULL RETURNING length(body)

-- name: purge_run
DELETE FROM run WHERE run_id = ? AND session = ? RETURNING length(body) + coalesce(length(entries), 0)

-- name: purge_edits
DELETE FROM edit WHERE session = ? RETURNING coalesce(length(entries), 0)

-- name: purge_kept
DELETE FROM kept WHERE session = ? RETURNING length(body)

-- name: purge_attachment_uses
DELETE FROM attachment_use WHERE session = ?

-- name: purge_session
DELETE FROM session WHERE session = ?

-- name: attachment
SELECT about FROM attachment WHERE principal = ? AND digest = ?

-- name: attachment_body
SELECT body FROM attachment WHERE principal = ? AND digest = ?

-- name: attached_bytes
SELECT coalesce(sum(size_bytes), 0) FROM attachment WHERE principal = ?

-- name: add_attachment
INSERT INTO attachment (principal, digest, at, size_bytes, about, body) VALUES (?, ?, ?, ?, ?, ?)

-- name: touch_attachment
UPDATE attachment SET at = ? WHERE principal = ? AND digest = ? AND at < ?

-- name: use_attachments
INSERT INTO attachment_use (principal, digest, session) VALUES [[(?, ?, ?)]] ON CONFLICT DO NOTHING

-- name: drop_unused_attachment
DELETE FROM attachment WHERE principal = ? AND digest = ? AND NOT EXISTS (
    SELECT 1 FROM attachment_use
    WHERE attachment_use.principal = attachment.principal AND attachment_use.digest = attachment.digest)
RETURNING size_bytes

-- name: stored_bytes
SELECT bytes FROM stored WHERE principal = ?

-- name: most_stored
SELECT principal, bytes FROM stored ORDER BY bytes DESC, principal LIMIT ?

-- name: add_stored
INSERT INTO stored (principal, bytes, sessions) VALUES [[(?, ?, ?)]]
ON CONFLICT (principal) DO UPDATE SET
    bytes = stored.bytes + excluded.bytes, sessions = stored.sessions + excluded.sessions

-- name: add_schedule
INSERT INTO schedule (principal, schedule_id, revision, session, due_at, decided_at, body)
VALUES (?, ?, ?, ?, ?, ?, ?)

-- name: save_schedule
-- The last parameters: the row, and the revision that was read: a concurrently changed row is not written.
UPDATE schedule SET revision = ?, session = ?, due_at = ?, decided_at = ?, body = ? WHERE schedule = ? AND revision = ?

-- name: put_off_schedule
-- Sets when to check a row with an unreadable body again; the body stays.
UPDATE schedule SET due_at = ?, decided_at = ? WHERE schedule = ?

-- name: drop_schedule
DELETE FROM schedule WHERE schedule = ? AND revision = ?

-- name: schedule_by_id
SELECT schedule, principal, schedule_id, revision, session, body FROM schedule WHERE principal = ? AND schedule_id = ?

-- name: schedule_by_number
SELECT schedule, principal, schedule_id, revision, session, body FROM schedule WHERE schedule = ?

-- name: schedules_of
SELECT count(*) FROM schedule WHERE principal = ?

-- name: due_schedules
-- Parameters: now, the time after which a decision was made under a clock that was set back, limit. Principals take
-- turns. Bodies may be large: only those returned are read.
SELECT schedule, principal, schedule_id, revision, session, body FROM (
    SELECT schedule AS number, row_number() OVER (PARTITION BY principal ORDER BY due_at, schedule) AS turn
    FROM schedule WHERE due_at <= ? OR decided_at > ? ORDER BY turn, due_at, schedule LIMIT ?
) AS due JOIN schedule ON schedule.schedule = due.number ORDER BY turn, due_at, schedule

-- name: next_schedule
SELECT min(due_at) FROM schedule WHERE due_at IS NOT NULL

-- name: schedules
SELECT schedule, principal, schedule_id, revision, session, body FROM schedule ORDER BY schedule LIMIT ?

-- name: schedules_of_principal
SELECT schedule, principal, schedule_id, revision, session, body FROM schedule WHERE principal = ? ORDER BY schedule LIMIT ?

-- name: schedules_of_session
SELECT schedule, principal, schedule_id, revision, session, body FROM schedule WHERE principal = ? AND session = ? ORDER BY schedule LIMIT ?

-- name: add_key
INSERT INTO api_key (key_id, principal, role, digest, created_at, label, revoked_at, agents)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)

-- name: keys
SELECT key_id, principal, role, digest, created_at, label, revoked_at, agents FROM api_key ORDER BY created_at, key_id

-- name: revoke_key
UPDATE api_key SET revoked_at = ? WHERE key_id = ? AND revoked_at IS NULL

-- name: add_grant
INSERT INTO access_grant (grant_id, principal, session, granted_at, body) VALUES (?, ?, ?, ?, ?)

-- name: grants_of_principal
SELECT body FROM access_grant WHERE principal = ? ORDER BY granted_at, grant_id

-- name: grants_of_session
-- Those of the session, and those of its principal.
SELECT body FROM access_grant WHERE principal = ? AND session IN (0, ?) ORDER BY granted_at, grant_id

-- name: grant
SELECT body FROM access_grant WHERE principal = ? AND grant_id = ?

-- name: count_grants
SELECT count(*) FROM access_grant WHERE principal = ?

-- name: drop_grant
DELETE FROM access_grant WHERE principal = ? AND grant_id = ? RETURNING length(body)

-- name: drop_grants_of_session
DELETE FROM access_grant WHERE principal = ? AND session = ? RETURNING length(body)
