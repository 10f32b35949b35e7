"""Faults of the stores: fences, idempotency, readiness, durability, and what is decided in their transactions."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

CONFORMANCE = ("tests/storage/test_conformance.py",)

MUTANTS = (
    Mutant(
        name="landmarks of another transcript",
        of="P6",
        breaks="a page that is read while the transcript is replaced has entries of both",
        file="storage/sql/statements.sql",
        old="AND EXISTS (SELECT 1 FROM session WHERE session = ? AND history_id = ?)",
        new="AND EXISTS (SELECT 1 FROM session WHERE session = ? AND length(?) > 0)",
        tests=(
            "tests/storage/sqlite/test_transcripts.py"
            "::test_a_page_is_of_one_transcript_even_if_another_one_replaces_it_meanwhile",
        ),
    ),
    Mutant(
        name="landmarks that outlive an undo",
        of="P6",
        breaks="pages show entries that were undone",
        file="storage/sql/tables.py",
        old='self._database.write("drop_landmarks", row.session, last_n)',
        new="pass",
        tests=("tests/storage/test_model.py::test_stores_agree_on_a_long_walk",),
    ),
    Mutant(
        name="active sessions forgotten too early",
        of="P11",
        breaks="a start after a kill does not find a run, which stays running for ever",
        file="storage/sql/statements.sql",
        old="SELECT 1 FROM session WHERE session.session = active.session AND run_id IS NOT NULL AND holder > 0)",
        new="SELECT 1 FROM session WHERE session.session = active.session AND run_id IS NULL)",
        tests=(
            "tests/storage/sqlite/test_growth.py::test_a_start_after_a_kill_finds_each_run_and_looks_at_few_sessions",
        ),
    ),
    Mutant(
        name="merge of all that waits",
        of="P13",
        breaks="if rows are added faster than they are merged, each pass is longer than the last one, without end",
        file="storage/sql/merger.py",
        old="end = min(first + counted.rows, last)",
        new="end = last",
        tests=(
            "tests/storage/sqlite/test_packs.py"
            "::test_a_pass_stays_small_when_rows_are_added_faster_than_they_are_merged",
        ),
    ),
    Mutant(
        name="merge spoiled by a deletion",
        of="P14",
        breaks="while sessions are deleted often, no pass ends, so no row of anybody is merged",
        file="storage/sql/merger.py",
        old="if replacement.session not in self._dropped:",
        new="if replacement is not None:",
        tests=("tests/storage/sqlite/test_packs.py::test_rows_dropped_during_a_pass_spoil_it_for_no_other_session",),
    ),
    Mutant(
        name="merge of dropped rows",
        of="P5",
        breaks="events that were dropped while a pass merged their rows come back",
        file="storage/sql/merger.py",
        old="if row is None or dropped != new.rows - 1 or written != 1:",
        new="if row is None:",
        tests=("tests/storage/sqlite/test_packs.py::test_rows_dropped_while_they_are_merged_stay_dropped",),
    ),
    Mutant(
        name="fence by plain read",
        of="P11",
        breaks="a row that another host changed after it was read is overwritten: a stale run's output counts",
        file="storage/sql/statements.sql",
        old="""
    CAST(? AS double precision), CAST(? AS text))]]
) AS new
WHERE session.session = new.column1 AND session.fence = new.column2 AND session.next_seq = new.column3
""",
        new="""
    CAST(? AS double precision), CAST(? AS text))]]
) AS new
WHERE session.session = new.column1 AND new.column2 = new.column2 AND new.column3 = new.column3
""",
        tests=("tests/storage/sqlite/test_sqlite_file.py::test_a_row_changed_from_outside_is_never_overwritten",),
    ),
    Mutant(
        name="append by plain read",
        of="P11",
        breaks="an append overwrites a row that another host changed after it was read: a stale run's output counts",
        file="storage/sql/statements.sql",
        old="""
    CAST(? AS bigint))]]
) AS new
WHERE session.session = new.column1 AND session.fence = new.column2 AND session.next_seq = new.column3
""",
        new="""
    CAST(? AS bigint))]]
) AS new
WHERE session.session = new.column1 AND new.column2 = new.column2 AND new.column3 = new.column3
""",
        tests=("tests/storage/sqlite/test_sqlite_file.py::test_a_row_changed_from_outside_is_never_overwritten",),
    ),
    Mutant(
        name="append without a fence",
        of="P11",
        breaks="a run that lost its session keeps writing to its log",
        file="storage/transactions/session_log.py",
        old="""
    row = tables.get(lease.session)
    if row is None or row.run_id != lease.run_id or row.fence != lease.fence:
""",
        new="""
    row = tables.get(lease.session)
    if row is None or row.run_id is None:
""",
        tests=CONFORMANCE,
    ),
    Mutant(
        name="rescue without a new fence",
        of="P11",
        breaks="the holder that was given up writes beside the new one",
        file="storage/transactions/runs.py",
        old="""
    for row in tables.orphans():
        row.fence += 1
""",
        new="    for row in tables.orphans():",
        tests=CONFORMANCE,
    ),
    Mutant(
        name="visible before stored",
        of="P5 P11",
        breaks="a send is answered before it is durable: a crash at that moment loses an accepted message",
        file="storage/sql/writer.py",
        old="""
            self._prepared()
            connection.commit()
""",
        new="            self._prepared()",
        also=(
            (
                "            connection.begin(verbs)",
                """
            if counters.batches:
                connection.commit()
            connection.begin(verbs)
""",
            ),
        ),
        tests=("tests/storage/test_crashes.py", "tests/storage/test_conformance.py"),
    ),
    Mutant(
        name="readiness by sub-select",
        of="P13",
        breaks="a message stays in the mailbox and its session never runs again",
        file="storage/sql/statements.sql",
        old="    waiting = new.column18, ready_since = new.column19,",
        new="""
    waiting = new.column18, ready_since = CASE WHEN EXISTS (SELECT 1 FROM message
        WHERE message.session = new.column1 AND message.run_id IS NULL AND message.withdrawn_at IS NULL)
        THEN coalesce(new.column19, 0) END,
""",
        tests=CONFORMANCE,
    ),
    Mutant(
        name="idempotency across principals",
        of="P5",
        breaks="a message is answered with another user's, because both used the same key",
        file="storage/sql/statements.sql",
        old="FROM message WHERE session = ? AND idempotency_key = ?",
        new="FROM message WHERE session > 0 * ? AND idempotency_key = ?",
        tests=CONFORMANCE,
    ),
    Mutant(
        name="a key accepts any body",
        of="P5",
        breaks="a different message under a used key is taken for a repeat, and lost",
        file="storage/transactions/messages.py",
        old="                if known.body_hash != request.body_hash:",
        new="                if known is None:",
        tests=CONFORMANCE,
    ),
    Mutant(
        name="settle twice",
        of="P5",
        breaks="a stop settles a message as withdrawn that its run settles again",
        file="storage/transactions/stops.py",
        old="""
    withdrawn = row.waiting
    row.waiting = ()
""",
        new="""
    withdrawn = (*row.taken, *row.waiting)
    row.waiting = ()
""",
        tests=CONFORMANCE,
    ),
    Mutant(
        name="a commit that is repeated counts again",
        of="P5 P11",
        breaks="a run whose commit reply was lost is refused, or ends twice",
        file="storage/transactions/runs.py",
        old="""
        if row is None or ended is None or ended.fence != lease.fence:
            raise stale
""",
        new="""
        if row is None or ended is None or ended.fence:
            raise stale
""",
        tests=CONFORMANCE,
    ),
    Mutant(
        name="an append that is repeated counts again",
        of="P7",
        breaks="an agent's output is in the log twice after a lost reply",
        file="storage/transactions/runs.py",
        old="    if nth and nth == row.append_nth:",
        new="    if nth and nth == row.append_nth < 0:",
        tests=CONFORMANCE,
    ),
    Mutant(
        name="rollback loses to completed",
        of="P10",
        breaks="a rollback of a quick run leaves the run's answer in the transcript",
        file="storage/transactions/runs.py",
        old="""
    rolled_back = row.rolled_back
    log = EventLog(row)
""",
        new="""
    rolled_back = row.rolled_back and commit.status != "completed"
    log = EventLog(row)
""",
        tests=CONFORMANCE,
    ),
    Mutant(
        name="the last cause wins",
        of="P2",
        breaks="a second stop rewrites why the run was stopped, and the log has two reasons",
        file="storage/transactions/session_log.py",
        old="""
    if row.cause is not None:
        return takes_back
""",
        new="""
    if row.cause is cause:
        return takes_back
""",
        tests=CONFORMANCE,
    ),
    Mutant(
        name="an interrupt hits whoever runs",
        of="P2",
        breaks="a stop that was meant for a run that has ended kills the next one",
        file="storage/transactions/stops.py",
        old="    if row.run_id is None or (request.run_id is not None and request.run_id != row.run_id):",
        new="    if row.run_id is None:",
        tests=CONFORMANCE,
    ),
    Mutant(
        name="unbounded mailbox",
        of="P9",
        breaks="one session accepts messages without limit",
        file="storage/transactions/messages.py",
        old="    if not decision.start and waiting >= request.mailbox_limit:",
        new="    if not decision.start and waiting < 0:",
        tests=(*CONFORMANCE, "tests/host/test_reading.py"),
    ),
    Mutant(
        name="messages that wait have no bound in bytes",
        of="P9",
        breaks="one session's mailbox takes a hundred megabytes, which one run or one stop reads at once",
        file="storage/transactions/messages.py",
        old="    if size + more > limit:\n        raise MailboxFull(",
        new="    if size + more < 0:\n        raise MailboxFull(",
        tests=CONFORMANCE,
    ),
    Mutant(
        name="waiting contents stay in memory",
        of="P14",
        breaks="large messages that wait fill the host's memory",
        file="storage/sql/tables.py",
        old="        if characters > _KEPT_CHARACTERS:",
        new="        if characters < 0:",
        tests=("tests/storage/sqlite/test_sqlite_file.py",),
    ),
    Mutant(
        name="a refusal holds its batch",
        of="P14",
        breaks="each large message that is refused stays in memory until the collector comes",
        file="storage/sql/writer.py",
        old="(None, refusal.with_traceback(None))",
        new="(None, refusal)",
        tests=("tests/storage/sqlite/test_sqlite_file.py",),
    ),
    Mutant(
        name="a stopping run is steered",
        of="P5",
        breaks="a message is given to a stopping run, and ends with it unread",
        file="storage/transactions/messages.py",
        old="""
    if row.cause is not None:
        return Steered(messages=())
""",
        new="",
        tests=CONFORMANCE,
    ),
    Mutant(
        name="a steered message stays in the mailbox",
        of="P5",
        breaks="a message that steered a run is answered again by the next run",
        file="storage/transactions/messages.py",
        old="    row.waiting = tuple(mail for mail in row.waiting if mail not in taken)",
        new="",
        tests=CONFORMANCE,
    ),
    Mutant(
        name="question asked twice after a restart",
        of="P5",
        breaks="a person who has answered is asked the same again",
        file="storage/transactions/questions.py",
        old="""
    if _known(row, question.question_id):
        return Appended(events=())
""",
        new="",
        tests=(*CONFORMANCE, "tests/host/test_people.py"),
    ),
    Mutant(
        name="answer lost at parking",
        of="P5",
        breaks="a person answers while the run is unloaded from memory, and the run never resumes",
        file="storage/transactions/questions.py",
        old="""
    tables.save(row)
    return Parked(ready=not row.questions)
""",
        new="""
    tables.save(row)
    return Parked(ready=False)
""",
        tests=(*CONFORMANCE, "tests/host/test_people.py"),
    ),
    Mutant(
        name="a late answer counts",
        of="P5",
        breaks="a question that has expired is approved after all, and the dangerous call is made",
        file="storage/transactions/questions.py",
        old='    if given.decision != "expired" and question.due_at and given.at >= question.due_at:',
        new='    if given.decision != "expired" and question.due_at and given.at < 0:',
        tests=CONFORMANCE,
    ),
    Mutant(
        name="a foreign journal is played back",
        of="P14",
        breaks="who can write beside the store gives itself an admin key",
        file="storage/sqlite/write_connection.py",
        old="        set_journal_aside(self._path)",
        new="        assert set_journal_aside",
        tests=("tests/system/attacks/test_journal.py",),
    ),
    Mutant(
        name="the store is moved before its side files",
        of="P11",
        breaks="a kill during the move of a store loses the notes of its processes",
        file="storage/sqlite/relocation.py",
        old="""
            _copy(old + suffix, new + suffix)
""",
        new="            assert suffix",
        tests=("tests/storage/sqlite/test_relocation.py",),
    ),
    Mutant(
        name="events that were not archived are deleted",
        of="P5",
        breaks="what became old after the archive was written is lost",
        file="storage/sql/pruner.py",
        old="last_seq=old.events[-1].seq)",
        new="last_seq=math.inf)",
        tests=CONFORMANCE,
    ),
    Mutant(
        name="events are deleted before they are archived",
        of="P5",
        breaks="a full disk of the archive loses what was to be kept",
        file="host/maintenance.py",
        old="                    archived = await context.loop.run_in_executor(None, add)",
        new="",
        tests=("tests/host/test_event_archive.py",),
        also=(
            (
                "                    dropped = await store.drop_old_events(read, before=before)",
                "                    dropped = await store.drop_old_events(read, before=before)\n"
                "                    archived = await context.loop.run_in_executor(None, add)",
            ),
        ),
    ),
    Mutant(
        name="a node that reconnects accepts an older state",
        of="P11",
        breaks="after a failover that lost transactions, a host continues with runs that the database does not know",
        file="storage/postgres/write_connection.py",
        old="if batch is not None and batch < self._batch:",
        new="if batch is not None and batch < 0:",
        tests=("tests/storage/postgres/test_older_state.py",),
    ),
)
