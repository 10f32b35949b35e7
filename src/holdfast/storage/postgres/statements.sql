-- The statements and tables that only PostgreSQL has. A block with the name of a shared block replaces it.

-- name: postgres_tables
-- Follows the shared tables, in the same transaction.
--   node.lease_until: end of the node's lease, by the database's clock. ended: another node took over its runs.
--   workspace_pool: pool that the node declares; null if it declares none.
ALTER TABLE node ADD COLUMN lease_until timestamptz NOT NULL DEFAULT clock_timestamp();
ALTER TABLE node ADD COLUMN ended boolean NOT NULL DEFAULT false;
ALTER TABLE node ADD COLUMN workspace_pool text COLLATE "C";
-- writer: a node's last transaction, by which a lost reply of a commit is resolved, and which fences the node: each of
-- its transactions begins with an update of its row. Heartbeats write only the table node, so neither waits for the other.
CREATE TABLE writer (
    epoch bigint PRIMARY KEY,
    batch bigint NOT NULL,
    ended boolean NOT NULL DEFAULT false
);
-- active: as in SQLite, but each node has rows of its own. No node removes the rows of another that may still write.
DROP TABLE active;
CREATE TABLE active (
    epoch bigint NOT NULL,
    session bigint NOT NULL,
    PRIMARY KEY (epoch, session)
);
-- Parts of large attachments are read without the rest.
ALTER TABLE attachment ALTER COLUMN body SET STORAGE EXTERNAL;
-- These rows change with each run: keep room on their pages, and look after them often.
ALTER TABLE session SET (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE stored SET (fillfactor = 50, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0.0);
ALTER TABLE node SET (fillfactor = 50, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0.0);
ALTER TABLE writer SET (fillfactor = 50, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0.0);

-- name: migrate_postgres_1
-- From version 1 of the tables to version 2. Nodes of version 1 may still be in use: they ignore both columns.
ALTER TABLE session ADD COLUMN workspace_pool text COLLATE "C";
ALTER TABLE node ADD COLUMN workspace_pool text COLLATE "C";

-- name: schema_table
-- holdfast_schema: version of the tables, and the oldest version that a Holdfast may know and still use them.
CREATE TABLE IF NOT EXISTS holdfast_schema (
    version bigint NOT NULL,
    usable_from bigint NOT NULL
)

-- name: schema_exists
SELECT to_regclass('holdfast_schema') IS NOT NULL, to_regclass('session') IS NOT NULL

-- name: lock_schema
LOCK TABLE holdfast_schema IN ACCESS EXCLUSIVE MODE

-- name: schema_version
SELECT version, usable_from FROM holdfast_schema

-- name: set_schema_version
WITH former AS (DELETE FROM holdfast_schema)
INSERT INTO holdfast_schema (version, usable_from) VALUES (?, ?)

-- name: server
SELECT current_setting('server_version_num')::int, current_setting('server_version'),
    pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on'

-- name: register_node
INSERT INTO node (node_id, opened_at, lease_until, workspace_pool)
VALUES (?, ?, clock_timestamp() + make_interval(secs => ?), ?) RETURNING epoch

-- name: other_nodes
SELECT epoch, node_id, lease_until, extract(epoch FROM lease_until - clock_timestamp())::double precision
FROM node WHERE NOT ended AND lease_until > clock_timestamp() AND epoch <> ? ORDER BY lease_until

-- name: register_writer
INSERT INTO writer (epoch, batch) VALUES (?, 0)

-- name: heartbeat
UPDATE node SET lease_until = clock_timestamp() + make_interval(secs => ?)
WHERE epoch = ? AND NOT ended RETURNING epoch

-- name: leave
-- The end of a node that closes its store: whoever looks may take over what it left.
UPDATE node SET lease_until = clock_timestamp() WHERE epoch = ? AND NOT ended

-- name: begin_batch
-- Parameters: the number of this transaction, epoch, the number of the one before, and the limits of the transaction.
-- Fails with a square root of a negative number if the epoch was ended, or if the database went back to an older state.
WITH written AS (
    UPDATE writer SET batch = ? WHERE epoch = ? AND batch = ? AND NOT ended RETURNING 1
) SELECT sqrt((count(*) - 1)::double precision), set_config('statement_timeout', ?, true),
    set_config('lock_timeout', ?, true), set_config('idle_in_transaction_session_timeout', ?, true)
FROM written

-- name: last_batch
-- Waits for a transaction of the writer that is still in progress.
SELECT batch, ended FROM writer WHERE epoch = ? FOR UPDATE

-- name: overdue_nodes
-- Locks them, so that none renews its lease while it is ended. A node that another node is ending is left to it.
SELECT epoch FROM node WHERE NOT ended AND lease_until < clock_timestamp() AND epoch <> ?
ORDER BY epoch FOR UPDATE SKIP LOCKED

-- name: end_nodes
UPDATE node SET ended = true WHERE epoch = ANY(?)

-- name: cut_writers
-- Ends the connections on which these nodes have a transaction in progress. A node that is stopped within a pipeline
-- would hold its locks for as long as it is stopped: none of PostgreSQL's timeouts runs there. If a transaction in
-- progress has updated a row, the row's xmax is the id of that transaction.
SELECT count(pg_terminate_backend(holder.pid)) FROM writer
JOIN pg_locks AS holder ON holder.locktype = 'transactionid' AND holder.granted AND holder.transactionid = writer.xmax
JOIN pg_stat_activity AS activity ON activity.pid = holder.pid AND activity.usename = current_user
WHERE writer.epoch = ANY(?)

-- name: end_writers
-- Waits for transactions of theirs that are in progress; all later ones fail.
UPDATE writer SET ended = true WHERE epoch = ANY(?)

-- name: held_sessions
SELECT session.session FROM active JOIN session ON session.session = active.session
WHERE active.epoch = ANY(?) AND session.run_id IS NOT NULL AND session.holder = active.epoch

-- name: held_runs
-- The runs that this node holds.
SELECT session.session, session.run_id, session.fence FROM active JOIN session ON session.session = active.session
WHERE active.epoch = ? AND session.run_id IS NOT NULL AND session.holder = active.epoch

-- name: next_lease_end
-- Seconds until the first lease of another node ends; null if there is no other node.
SELECT extract(epoch FROM min(lease_until) - clock_timestamp())::double precision FROM node
WHERE NOT ended AND epoch <> ?

-- name: last_seqs
SELECT session, next_seq - 1 FROM session WHERE session = ANY(?)

-- name: ready_for
-- Parameters: workspace_pool, time, the same plus `CLOCKS_DIFFER_S`, agents, limit. A message that was accepted after the
-- second time is due, as in the transaction `claim`. A parked run that was interrupted may be ended in any pool. Parked
-- runs have a limit of their own.
SELECT session, principal, key, agent, due_at, run FROM (
    SELECT *, row_number() OVER (PARTITION BY parked ORDER BY nth, ready_since, session) AS place FROM (
        SELECT *, row_number() OVER (PARTITION BY principal, parked ORDER BY ready_since, session) AS nth FROM (
            SELECT session, principal, key, agent, due_at, run, ready_since, run_id IS NOT NULL AS parked,
                CASE WHEN run_id IS NOT NULL THEN convert_from(run, 'UTF8')::json END AS live,
                workspace_pool IS NULL OR workspace_pool = CAST(? AS text) AS is_here
            FROM session WHERE ready_since IS NOT NULL AND (run_id IS NOT NULL OR due_at <= ? OR ready_since > ?)
        ) AS waiting
        WHERE coalesce(live ->> 'agent', agent) = ANY(?) AND (is_here OR live -> 'cause' IS NOT NULL)
    ) AS found
) AS placed WHERE place <= ? ORDER BY nth, ready_since, session

-- name: sessions_without_pool
SELECT workspace_pool, count(*) FROM session WHERE ready_since IS NOT NULL AND workspace_pool IS NOT NULL
    AND workspace_pool NOT IN (
        SELECT workspace_pool FROM node
        WHERE workspace_pool IS NOT NULL AND NOT ended AND lease_until > clock_timestamp()
    )
GROUP BY workspace_pool ORDER BY workspace_pool

-- name: listen
LISTEN holdfast

-- name: notify
-- A statement of its own, after the commits that it tells about.
SELECT pg_notify('holdfast', payload) FROM unnest(CAST(? AS text[])) AS payload

-- name: drop_active
DELETE FROM active WHERE epoch = ANY(?)

-- name: drop_writers
DELETE FROM writer WHERE epoch = ANY(?)

-- name: drop_nodes
DELETE FROM node WHERE ended AND lease_until < clock_timestamp() - interval '7 days'

-- name: active
SELECT session FROM active WHERE epoch = ? ORDER BY session

-- name: mark_active
INSERT INTO active (epoch, session) VALUES [[(?, ?)]] ON CONFLICT DO NOTHING

-- name: unmark_active
-- Only the node that has this row gives its sessions a holder in its name, in the transactions of its one writer.
DELETE FROM active WHERE epoch = ? AND session = ? AND NOT EXISTS (
    SELECT 1 FROM session WHERE session.session = active.session AND run_id IS NOT NULL AND holder = active.epoch)

-- name: lock_sessions
-- In the order of their numbers, so that two transactions that lock several sessions cannot wait for each other.
SELECT session FROM session WHERE session = ANY(?) ORDER BY session FOR NO KEY UPDATE

-- name: lock_more_sessions
-- The transaction has locks already, so it must not wait.
SELECT session FROM session WHERE session = ANY(?) ORDER BY session FOR NO KEY UPDATE NOWAIT

-- name: unchanged_sessions
-- A row is (session; fence, next_seq and run_id as they were).
SELECT 1 FROM session JOIN (VALUES
    [[(CAST(? AS bigint), CAST(? AS bigint), CAST(? AS bigint), CAST(? AS text))]]
) AS old ON session.session = old.column1 AND session.fence = old.column2 AND session.next_seq = old.column3
    AND coalesce(session.run_id, '') = coalesce(old.column4, '')

-- name: session_numbers
SELECT nextval('session_session_seq') FROM generate_series(1, ?)

-- name: add_events
-- commit_no: the transaction's id in the high bits, and a number within the transaction in the low ones.
INSERT INTO event (session, last_seq, first_seq, run_id, at, commit_no, body)
VALUES [[(?, ?, ?, ?, ?, (pg_current_xact_id()::text::bigint << 20) + ?, ?)]]

-- name: feed
-- Parameters: commit_no of the last row read, limit. A feed of all sessions. Transactions commit in another order than
-- their ids, so a reader may not pass the oldest one that is still in progress: its rows would be missed.
SELECT commit_no, session, last_seq, body FROM event
WHERE commit_no > ? AND commit_no < (pg_snapshot_xmin(pg_current_snapshot())::text::bigint << 20)
ORDER BY commit_no LIMIT ?

-- name: add_total
-- A row for each node, so that nodes that create sessions do not wait for each other.
INSERT INTO total (name, value) VALUES ('sessions ' || CAST(? AS text), ?)
ON CONFLICT (name) DO UPDATE SET value = total.value + excluded.value

-- name: all_live_sessions
SELECT coalesce(sum(value), 0)::bigint FROM total WHERE name LIKE 'sessions %%'

-- name: add_stored
-- Returns the sums, which other nodes change too.
INSERT INTO stored (principal, bytes, sessions) VALUES [[(?, ?, ?)]]
ON CONFLICT (principal) DO UPDATE SET
    bytes = stored.bytes + excluded.bytes, sessions = stored.sessions + excluded.sessions
RETURNING principal, bytes, sessions

-- name: table_sizes
SELECT relname, pg_total_relation_size(oid) FROM pg_class
WHERE relkind = 'r' AND relname = ANY(?)
    AND relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = to_regclass('holdfast_schema'))
ORDER BY 2 DESC, 1
