"""Faults of several hosts on one store: fences, signals, receipts of others, take-overs, lost claims."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

CLUSTER = "tests/host/test_cluster.py"
LIVE_EVENTS = "tests/storage/postgres/test_live_events.py"
TAKE_OVER = "tests/host/test_cluster_takeover.py"
POOLS = "tests/storage/postgres/test_workspace_pools.py"
STOPPED_PROGRAMS = "test_the_programs_of_a_stopped_host_are_dead_when_others_take_its_runs_over"

MUTANTS = (
    Mutant(
        name="owner in place of the run",
        of="P4 P11",
        breaks="a late write of an ended run counts, because the same host holds the next run of the session",
        file="storage/transactions/session_log.py",
        old="""
    row = tables.get(lease.session)
    if row is None or row.run_id != lease.run_id or row.fence != lease.fence:
        raise stale_fence(tables, lease, row)
    return row
""",
        new="""
    row = tables.get(lease.session)
    if row is None or row.run_id is None or row.holder != tables.epoch:
        raise stale_fence(tables, lease, row)
    return row
""",
        tests=("tests/storage/test_conformance.py",),
    ),
    Mutant(
        name="decision on a cached row",
        of="P4",
        breaks="a host decides on what it remembers of a session, although another host has changed it since",
        file="storage/sql/tables.py",
        old='            self._database.write_rows("unchanged_sessions", unchanged, exact=True)',
        new="            unchanged.clear()",
        tests=("tests/storage/postgres/test_races.py::test_a_refusal_rests_on_no_cached_row",),
    ),
    Mutant(
        name="claim of a foreign agent",
        of="P5",
        breaks="a host claims a run whose agent only another host has, and ends it as failed",
        file="storage/transactions/runs.py",
        old="    if not is_served(row, served):",
        new="    if served is not None and not served:",
        tests=(
            "tests/storage/postgres/test_signals.py"
            "::test_runs_of_agents_that_the_rescuer_does_not_have_are_parked_for_others",
        ),
    ),
    Mutant(
        name="claim without the files",
        of="P5",
        breaks="a host runs a session whose files only another host has, and its agent finds an empty folder",
        file="storage/transactions/runs.py",
        old="    if needs_files and is_elsewhere(tables, row):",
        new="    if row.deleted_at is not None and is_elsewhere(tables, row):",
        tests=(f"{POOLS}::test_only_nodes_with_the_files_of_a_session_start_its_runs",),
    ),
    Mutant(
        name="start without the files",
        of="P5",
        breaks="a message starts its run on the host that accepts it, although only another has its files",
        file="storage/transactions/messages.py",
        old="    room = request.run_id is not None and (row is None or not is_elsewhere(tables, row))",
        new="    room = request.run_id is not None",
        tests=(f"{POOLS}::test_only_nodes_with_the_files_of_a_session_start_its_runs",),
    ),
    Mutant(
        name="next run without the files",
        of="P5",
        breaks="the host that ends an interrupted run of another pool starts the session's next run without its files",
        file="storage/transactions/runs.py",
        old="is_served(row, commit.served) and not is_elsewhere(tables, row)",
        new="is_served(row, commit.served)",
        tests=(f"{POOLS}::test_an_interrupted_run_is_ended_without_its_files_and_the_next_waits_for_them",),
    ),
    Mutant(
        name="stop of this host only",
        of="P1 P3",
        breaks="a stop leaves the session's background work on other hosts alive, and its receipt says gone",
        file="storage/transactions/stops.py",
        old='    return tuple(tables.ask_others(row.session, "stop", encode_json(request)))',
        new="    return ()",
        tests=("tests/host/test_cluster_background.py",),
    ),
    Mutant(
        name="pool erased by another host",
        of="P5",
        breaks="a write of another host erases which hosts have the session's files",
        file="storage/sql/statements.sql",
        old="workspace_pool = coalesce(session.workspace_pool, new.column23)",
        new="workspace_pool = new.column23",
        tests=(f"{POOLS}::test_a_write_of_another_node_does_not_erase_the_pool",),
    ),
    Mutant(
        name="background work that begins after its stop",
        of="P3",
        breaks="background work of a session begins although a stop was recorded before, and nothing ends it",
        file="storage/postgres/cluster.py",
        old="or row.run_id != run_id or row.cause is not None:",
        new="or row.run_id != run_id:",
        tests=(
            "tests/host/test_cluster_background.py"
            "::test_work_that_begins_after_a_stop_that_its_host_does_not_know_yet_is_stopped",
        ),
    ),
    Mutant(
        name="background work that nobody finds",
        of="P3",
        breaks="background work begins before the store knows of it: a stop at another host may miss it",
        file="host/background.py",
        old="            if noted is not None and not await asyncio.shield(noted):\n                return None\n",
        new="",
        tests=("tests/host/test_cluster_background.py::test_background_work_begins_once_other_hosts_can_find_it",),
    ),
    Mutant(
        name="receipt without the holder",
        of="P3",
        breaks="an interrupt at another host answers gone, while the run still works",
        file="host/suspension.py",
        old="        elif self._context.store.cluster is not None:\n            return None\n",
        new="",
        tests=(f"{CLUSTER}::test_an_interrupt_from_any_host_returns_the_true_receipt_of_the_holder",),
    ),
    Mutant(
        name="only signals wake a holder",
        of="P1",
        breaks="an interrupt whose signal was lost never reaches the run",
        file="host/cluster_watch.py",
        old="        await self._follower.poll()",
        new="        await asyncio.sleep(0)",
        tests=(f"{CLUSTER}::test_an_interrupt_from_any_host_returns_the_true_receipt_of_the_holder",),
    ),
    Mutant(
        name="claim without reconciliation",
        of="P5",
        breaks="a claim whose reply was lost for good holds its session as long as the host lives",
        file="host/cluster_watch.py",
        old="                await self._reclaim(lease)",
        new="                self._unknown.discard(lease)",
        tests=(f"{CLUSTER}::test_a_claim_whose_reply_was_lost_for_good_is_found_by_its_holder",),
    ),
    Mutant(
        name="take-over only at a start",
        of="P11",
        breaks="the runs of a killed host stay running until some host is restarted",
        file="host/cluster_watch.py",
        old="                    await self._try(self._recovery.take_over())",
        new="                    await asyncio.sleep(0)",
        tests=(f"{TAKE_OVER}::test_the_runs_of_a_killed_host_go_on_elsewhere_within_its_lease_and_a_second",),
    ),
    Mutant(
        name="heartbeat outside of the database",
        of="P4 P11",
        breaks="a host counts its lease as renewed without the database, and runs beside the host that takes over",
        file="storage/postgres/node_lease.py",
        old="            self._drop()\n            return False",
        new="            self._set_end(sent_at + self._lease_s)\n            self._drop()\n            return False",
        tests=("tests/host/test_postgres.py::test_runs_are_stopped_before_a_lease_ends_that_cannot_be_renewed",),
    ),
    Mutant(
        name="programs that outlive the lease",
        of="P3 P4",
        breaks="the programs of a frozen host go on beside the run that took over",
        file="runtime/processes/reaper.py",
        old="            self._lease = None\n            self._kill_now()",
        new="            self._lease = None",
        tests=(f"{TAKE_OVER}::{STOPPED_PROGRAMS}",),
    ),
    Mutant(
        name="foreign programs that outlive the lease",
        of="P3 P4",
        breaks="a program that a library started in a run goes on while its host is frozen, beside the next attempt",
        file="runtime/processes/zygote.py",
        old="            self._clear_up(lambda: process_tags.end_scopes(",
        new="            assert callable(lambda: process_tags.end_scopes(",
        tests=(f"{TAKE_OVER}::{STOPPED_PROGRAMS}",),
    ),
    Mutant(
        name="take-over behind a stopped transaction",
        of="P11",
        breaks="a host that was stopped within a transaction keeps its runs for as long as it is stopped",
        file="storage/postgres/shared_use.py",
        old='        database.execute(statement("cut_writers"), (overdue,))\n',
        new="",
        tests=(
            "tests/storage/postgres/test_races.py"
            "::test_a_node_that_stops_within_a_transaction_does_not_hold_up_the_take_over",
        ),
    ),
    Mutant(
        name="the same attempt at another host",
        of="P4 P11",
        breaks="a run that a drained host hands over has one attempt at two hosts, and its restart is not counted",
        file="storage/transactions/questions.py",
        old="    row.attempt += restarts",
        new="    row.attempt += 0",
        tests=("tests/host/test_cluster_handover.py",),
    ),
    Mutant(
        name="a second stop that another host ignores",
        of="P2",
        breaks="a user who stops a run again, at another host, waits for the whole grace period of the first stop",
        file="storage/transactions/stops.py",
        old="""        tables.ask_others(row.session, "interrupt", encode_json(asked))""",
        new="        assert asked",
        tests=(f"{CLUSTER}::test_a_second_stop_at_another_host_shortens_the_grace_period",),
    ),
    Mutant(
        name="a take-over beyond the slots",
        of="P13",
        breaks="the host that takes the runs of a dead one over starts more of them than it has slots",
        file="host/recovery.py",
        old=" or self._has_too_many()):",
        new="):",
        tests=(f"{CLUSTER}::test_a_host_takes_over_as_many_runs_as_it_has_slots_and_leaves_the_others",),
    ),
    Mutant(
        name="events before their commit",
        of="P7",
        breaks="a reader at another host is shown events that are never stored",
        file="storage/postgres/write_connection.py",
        old="""
            connection.execute("COMMIT")
            failpoints""",
        new="""
            self._signals.publish(self._sharing.commits)
            connection.execute("COMMIT")
            failpoints""",
        tests=(f"{LIVE_EVENTS}::test_events_of_a_transaction_that_fails_are_not_sent",),
    ),
    Mutant(
        name="events after a gap",
        of="P3 P7",
        breaks="a host that missed the event of an interrupt does not look for it when it receives the next event",
        file="host/log_follower.py",
        old="            if events[0].seq <= live.seen + 1:",
        new="            if events:",
        tests=(f"{LIVE_EVENTS}::test_an_interrupt_whose_event_was_lost_is_found_by_the_next_event",),
    ),
    Mutant(
        name="events of strangers",
        of="P7 P14",
        breaks="anyone who may publish over NATS can show events to readers, and read those of others",
        file="storage/postgres/live_events.py",
        old="blake2b(salt, key=self._key, ",
        new="blake2b(salt, ",
        tests=(f"{LIVE_EVENTS}::test_foreign_and_altered_messages_are_ignored",),
    ),
    Mutant(
        name="events that the store has lost",
        of="P7",
        breaks="after a failover that lost events, readers miss those that have their numbers now",
        file="host/log_follower.py",
        old="                    self._on_lost_events(live, stored)",
        new="                    assert stored",
        tests=("tests/host/test_lost_events.py::test_streams_end_that_showed_events_which_the_store_has_lost",),
    ),
    Mutant(
        name="any version continues a run",
        of="P11",
        breaks="after a rolling deploy, new code replays the journal of old code",
        file="storage/transactions/session_log.py",
        old='row.run_version in ("", version) or row.cause is not None',
        new="row.run_version is not None",
        tests=("tests/storage/test_conformance.py",),
    ),
    Mutant(
        name="the store offers runs of other versions",
        of="P11",
        breaks="a host asks for the same run with each poll, and is refused each time",
        file="storage/postgres/statements.sql",
        old="""
            AND (live -> 'version' IS NULL OR (live ->> 'agent') || '@' || (live ->> 'version') = ANY(?)
""",
        new="""
            AND (live -> 'version' IS NULL OR (live ->> 'agent') || '@' || (live ->> 'version') <> ALL(?) OR true
""",
        tests=("tests/host/test_cluster_versions.py",),
    ),
    Mutant(
        name="each host gives a principal its whole limit",
        of="P9",
        breaks="ten hosts let a principal have ten times the runs that it may have",
        file="host/slot_queue.py",
        old="max(1, self._context.settings.principal_runs // hosts)",
        new="max(1, self._context.settings.principal_runs // max(1, hosts - hosts))",
        tests=("tests/host/test_cluster_run_limits.py",),
    ),
    Mutant(
        name="the principal that waits longest first",
        of="P13",
        breaks="sessions of a principal with very many waiting ones keep a host from finding those of all others",
        file="storage/postgres/statements.sql",
        old="(PARTITION BY parked ORDER BY nth, ready_since, session)",
        new="(PARTITION BY parked ORDER BY ready_since, session)",
        tests=("tests/storage/postgres/test_ready.py",),
    ),
    Mutant(
        name="a late claim starts its run",
        of="P4 P8",
        breaks="a host whose claim was answered late runs a message that another host has run already",
        file="host/run_launcher.py",
        old="        if self._is_late(claim):",
        new="        if self._is_late(claim) and not claim:",
        tests=("tests/host/test_cluster_late_claims.py",),
    ),
    Mutant(
        name="a claim outlives its epoch",
        of="P4 P8",
        breaks="a host starts a run that it claimed in an epoch which others have ended since",
        file="host/run_launcher.py",
        old="claim.epoch != store.cluster.epoch or ",
        new="",
        tests=("tests/host/test_cluster_late_claims.py",),
    ),
)
