"""Faults of hosts and servers: readers, drains, stops, places, owners."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = (
    Mutant(
        name="steer delivered before durable",
        of="P5 P6",
        breaks="a message takes effect although the log, after a crash, shows it as not taken",
        file="host/run_host.py",
        old="""
        steered = await self._insist(
            "steer", lambda: context.store.steer(lease, step=step, at=context.now()), self._note_steered
        )
        return await self._steered_at(step) if self.unsure else steered.messages
""",
        new="""
        waiting = await context.store.mailbox(self._actor.session)
        context.start_task(
            self._insist("steer", lambda: context.store.steer(lease, step=step, at=context.now()), self._note_steered),
            "steer",
        )
        return [item.message for item in waiting if item.message.policy == "steer"]
""",
        tests=("tests/host/test_steering.py",),
    ),
    Mutant(
        name="what waits is forgotten after a run",
        of="P13",
        breaks="a message that arrived during a run never runs if the host was full at the run's end",
        file="host/run_launcher.py",
        old="""
        if committed.waiting:
            queue.enqueue_when_due(
""",
        new="""
        if committed.waiting < 0:
            queue.enqueue_when_due(
""",
        tests=("tests/host/test_reading.py", "tests/host/test_sessions_explored.py"),
    ),
    Mutant(
        name="a place is not given on",
        of="P13",
        breaks="sessions wait for a slot forever although one is free",
        file="host/slot_queue.py",
        old="""
        self.admission.release(principal)
        self._admit()
""",
        new="        self.admission.release(principal)",
        tests=("tests/host/test_reading.py",),
    ),
    Mutant(
        name="principals do not take turns",
        of="P13",
        breaks="a principal with many sessions keeps all others from running",
        file="host/admission.py",
        old="""
            waiting = self._line.pop(principal)
            session = waiting.popleft()
            self._awaiting_slot.discard(session)
            if waiting:
                self._line[principal] = waiting  # moves to the end, so that other principals are next
""",
        new="""
            waiting = self._line[principal]
            session = waiting.popleft()
            self._awaiting_slot.discard(session)
            if not waiting:
                del self._line[principal]
""",
        tests=("tests/host/test_reading.py",),
    ),
    Mutant(
        name="places without a cap",
        of="P14",
        breaks="one principal takes all slots of the host",
        file="host/admission.py",
        old="        if self._running >= self._max_runs or held >= self.principal_runs:",
        new="        if self._running >= self._max_runs:",
        tests=("tests/host/test_reading.py",),
    ),
    Mutant(
        name="a stop by the callback of nobody",
        of="P1",
        breaks="a recorded interrupt is not carried out when its caller goes away",
        file="host/stop_coordinator.py",
        old="""
            if run is not None:
                stops.append(run.stop(cause, grace_s=grace_s))
""",
        new="""
            if run is not None:
                context.loop.call_later(0.0, run.stop, cause)
""",
        tests=("tests/host/test_stopping.py", "tests/host/test_adversarial_agents.py"),
    ),
    Mutant(
        name="drain that waits for people",
        of="P12",
        breaks="a shutdown takes its whole deadline because a question is open",
        file="host/drain.py",
        old="""
            if run.is_quiescent:
                self._cut_short(run)
        await
""",
        new="""
            if run.is_quiescent:
                continue
        await
""",
        tests=("tests/host/test_people.py",),
    ),
    Mutant(
        name="a draining host takes messages",
        of="P12",
        breaks="a host that is about to exit accepts a message",
        file="host/message_sender.py",
        old="""
        if context.lifecycle.draining:
            raise Draining("this host is shutting down and accepts no new messages")
""",
        new="",
        tests=("tests/host/test_stopping.py", "tests/server/test_shutdown.py"),
    ),
    Mutant(
        name="reader that drops the tail",
        of="P7",
        breaks="a reader that connects after a session's streams have ended gets no stored events",
        file="host/log_reader.py",
        old="""
            elif self.cursor < self._stored:
                batch
""",
        new="""
            elif self.cursor < self._stored and not self._ended:
                batch
""",
        tests=("tests/host/test_reading.py", "tests/server/test_streams.py"),
    ),
    Mutant(
        name="pruned events are passed over",
        of="P7",
        breaks="a reader of old events does not learn that some are gone",
        file="host/log_reader.py",
        old="""
        if page and page[0].seq == cursor + 1:
            return shown(page)
""",
        new="""
        if page:
            return shown(page)
""",
        tests=("tests/host/test_reading.py",),
    ),
    Mutant(
        name="a settlement between look and wait is missed",
        of="P5",
        breaks="a caller that waits for a message settled at that moment waits forever",
        file="host/session.py",
        old="""
        if settlement.state in TERMINAL_MESSAGE_STATES and not future.done():
            future.set_result(settlement)
        return future
""",
        new="        return future",
        tests=("tests/host/test_reading.py", "tests/host/test_sessions_explored.py"),
    ),
    Mutant(
        name="a run resumes without its claim's interrupt",
        of="P10",
        breaks="a run whose stop was recorded before a crash is run again",
        file="host/restart_rules.py",
        old="claim.interrupt is not None",
        new="claim.interrupt is claim",
        tests=("tests/host/test_recovery.py",),
    ),
    Mutant(
        name="owner check left out",
        of="P2",
        breaks="any key acts for any user by naming it in a header",
        file="server/auth.py",
        old="""
        if caller.role == "user":
            raise Forbidden(
""",
        new="""
        if not caller.role:
            raise Forbidden(
""",
        tests=("tests/server/test_safety.py",),
    ),
    Mutant(
        name="token compare left out",
        of="P2",
        breaks="any token opens a server whose agents run programs",
        file="server/auth.py",
        old="        if authorization is None or not hmac.compare_digest(token, digest_of(_secret(authorization))):",
        new="        if authorization is None:",
        tests=("tests/server/test_token.py",),
    ),
    Mutant(
        name="any page may call",
        of="P2",
        breaks="a web page of another site drives an agent on this machine",
        file="server/auth.py",
        old="""
        if origin in (b"http://" + host, b"https://" + host):
            return None
""",
        new="""
        if origin:
            return None
""",
        tests=("tests/server/test_safety.py",),
    ),
    Mutant(
        name="pipelined requests are queued without bound",
        of="P9",
        breaks="one connection without a key fills the memory",
        file="server/write_coalescing.py",
        old="        if len(self.pipeline) >= _WAITING_LIMIT:",
        new="        if len(self.pipeline) >= 1_000_000_000:",
        tests=("tests/server/test_connections.py",),
    ),
    Mutant(
        name="a principal has no share of connections",
        of="P9",
        breaks="one user takes every connection of the server",
        file="server/context.py",
        old="            connection.own(caller.principal)",
        new="            pass",
        tests=("tests/server/test_connections.py",),
    ),
    Mutant(
        name="the token goes to whoever listens",
        of="P14",
        breaks="another user of the machine gets the local token",
        file="cli/listener_owner.py",
        old="    trusted = {0, os.geteuid()}",
        new="    return\n    trusted = {0, os.geteuid()}",
        tests=("tests/server/test_token.py",),
    ),
    Mutant(
        name="an interrupted request looks like a new one",
        of="P1",
        breaks="a model carries out what its user stopped",
        file="protocol/model.py",
        old="        if entry.ended_by is not None:\n            note",
        new="        if entry.ended_by is not None and answered_run:\n            note",
        tests=("tests/host/test_interrupted_requests.py::test_a_failure_is_told",),
    ),
    Mutant(
        name="a deleted session can be read",
        of="P2",
        breaks="what a user deleted is still shown",
        file="host/session_directory.py",
        old='        if found[1].state == "deleted":\n            raise',
        new="        if not found:\n            raise",
        tests=("tests/host/test_deleted_sessions.py::test_nothing_of_a_deleted_session_can_be_read",),
    ),
    Mutant(
        name="a failure is told twice",
        of="P11",
        breaks="a log tells of two failures where there is one",
        file="logs.py",
        old="    if isinstance(error, Interrupted) or is_logged(error):",
        new="    if isinstance(error, Interrupted):",
        tests=("tests/host/test_failures_told.py::test_an_agents_exception_is_told_once",),
    ),
    Mutant(
        name="a failure is not told",
        of="P11",
        breaks="an agent fails and its operator finds nothing",
        file="logs.py",
        old="    logger.handle(record)",
        new="    del record",
        tests=("tests/host/test_failures_told.py::test_the_run_of_a_schedule_that_fails_is_told",),
    ),
    Mutant(
        name="a traceback with its secrets",
        of="P2",
        breaks="a secret in an error's text is in the log",
        file="logs.py",
        old="visible(redact(_traceback_of(error)))",
        new="visible(_traceback_of(error))",
        tests=("tests/host/test_failures_told.py::test_secrets_and_forged_lines_reach_neither_log_nor_clients",),
    ),
    Mutant(
        name="a message wakes nobody who waits for the session",
        of="P7",
        breaks="a reader that came first sees nothing",
        file="host/dispatcher.py",
        old="        self._directory.awaited.made(principal, request.key)",
        new="        self._directory.awaited.closed",
        tests=("tests/host/test_awaited_sessions.py::test_what_makes_a_session_wakes_its_readers[memory-sent]",),
    ),
    Mutant(
        name="an interrupted run leaves no mark",
        of="F7 P1",
        breaks="what was interrupted before its first word is joined to the next message and carried out",
        file="protocol/transcript.py",
        old='        if entries and status != "completed":',
        new='        if self._entries and status != "completed":',
        tests=("tests/host/test_interrupted_requests.py",),
    ),
    Mutant(
        name="the next message's interrupt reads like the user's",
        of="F7 P1",
        breaks="a model does not know which of two messages counts",
        file="protocol/model.py",
        old='    if ended_by == "message":',
        new="    if not ended_by:",
        tests=("tests/host/test_interrupted_requests.py",),
    ),
    Mutant(
        name="a deleted session's stream goes on",
        of="F8 P2",
        breaks="a reader who is behind gets what its owner deleted",
        file="host/log_reader.py",
        old="            if self.cursor < self._actor.deleted_seq - 1 and self.cursor < self._stored:",
        new="            if self.cursor < self._actor.deleted_seq - 1 and self.cursor < 0:",
        tests=("tests/host/test_deleted_sessions.py",),
    ),
    Mutant(
        name="a deleted session's events can be opened",
        of="F8 P2",
        breaks="what a user deleted is still streamed",
        file="host/log_reader.py",
        old="    session, view = await directory.find(principal, key)",
        new="    session, view = await context.store.find_session(principal, key)",
        also=(
            (
                "        session, view = await self._directory.find(principal, key)",
                "        session, view = await self._context.store.find_session(principal, key)",
            ),
        ),
        tests=("tests/host/test_deleted_sessions.py",),
    ),
    Mutant(
        name="a deleted session's contents stay",
        of="F8 P2",
        breaks="what a user deleted stays in memory and file for a week",
        file="storage/transactions/stops.py",
        old="    if row.run_id is None:  # otherwise the end of the run does it\n        tables.purge_contents(row)",
        new="    assert tables.purge_contents",
        tests=("tests/host/test_deleted_sessions.py",),
    ),
    Mutant(
        name="a control character in the log",
        of="P2",
        breaks="an error's text forges lines of the log or drives the operator's terminal",
        file="logs.py",
        old="visible(redact(_traceback_of(error)))",
        new="redact(_traceback_of(error))",
        tests=("tests/test_logs.py", "tests/host/test_failures_told.py"),
    ),
    Mutant(
        name="a line of a traceback passes for a record",
        of="P2",
        breaks="an error's text forges a line of the log",
        file="logs.py",
        old='    return "\\n".join(CONTINUED + line for line in text.split("\\n"))',
        new="    return text",
        tests=("tests/test_logs.py", "tests/host/test_failures_told.py"),
    ),
    Mutant(
        name="a run's error reaches the client as it is",
        of="P2",
        breaks="a secret in an error's text reaches the client",
        file="logs.py",
        old='    text = " ".join(visible(redact(format_error(error)[:_READ_CHARACTERS])).split())',
        new='    text = " ".join(visible(format_error(error)[:_READ_CHARACTERS]).split())',
        tests=("tests/test_logs.py",),
    ),
    Mutant(
        name="an interrupt is logged as a failure",
        of="P11",
        breaks="each stop leaves a traceback in the operator's log",
        file="logs.py",
        old="    if isinstance(error, Interrupted) or is_logged(error):",
        new="    if is_logged(error):",
        tests=("tests/test_logs.py", "tests/host/test_failures_told.py"),
    ),
    Mutant(
        name="streams do not end with the web application",
        of="F12 P12",
        breaks="a web application with an open event stream never ends",
        file="host/server_exit.py",
        old='        if getattr(server, "should_exit", None) is True:',
        new='        if getattr(server, "should_exit", None) is server:',
        tests=("tests/server/test_lifespan.py",),
    ),
    Mutant(
        name="a request that outlasts the shutdown gets a 500",
        of="P12",
        breaks="a client takes the end of a server for a fault of it, and does not come back",
        file="server/asgi.py",
        old="            elif self.host.draining and (task",
        new="            elif not self.host and (task",
        tests=("tests/server/test_shutdown.py",),
    ),
    Mutant(
        name="a drain calls a run interrupted that completed",
        of="P12",
        breaks="the report of a shutdown names work as lost that was done",
        file="host/drain.py",
        old='[run for run in self._cut if run.status in ("completed", "failed")]',
        new='[run for run in self._cut if run.status == ""]',
        tests=("tests/host/test_stopping.py::test_a_drain_calls_no_run_interrupted_that_ended_by_itself",),
    ),
    Mutant(
        name="a run commits after it lost its session",
        of="P4 P11",
        breaks="a run that another holder has taken over writes a second end",
        file="protocol/run_phases.py",
        old='    ("lost", "end"): "ended",',
        new='    ("lost", "end"): "ended",\n    ("lost", "commit"): "committing",',
        tests=("tests/protocol/test_run_phases.py",),
    ),
    Mutant(
        name="a lost run retries its commit",
        of="P4 P11",
        breaks="a run that another holder has taken over keeps writing to the store",
        file="host/run_execution.py",
        old="        self._writer.retry(self._go_on, error, what)",
        new="        self._writer.retry(self._submit, error, what)",
        tests=("tests/host/test_run_phases.py",),
    ),
    Mutant(
        name="an unloaded run is called ended",
        of="P12",
        breaks="a drain reports a run as interrupted although the next start resumes it",
        file="protocol/run_phases.py",
        old='    ("releasing", "end"): "unloaded",',
        new='    ("releasing", "end"): "ended",',
        tests=("tests/host/test_run_phases.py", "tests/protocol/test_run_phases.py"),
    ),
    Mutant(
        name="a WebSocket is answered as a request",
        of="H6 P9",
        breaks="a client that asks for a WebSocket waits for frames that never come",
        file="server/asgi.py",
        old='            if headers.get(b"upgrade", b"").lower() == b"websocket":',
        new='            if headers.get(b"upgrade", b"").lower() == b"ws":',
        tests=("tests/server/test_streams.py",),
    ),
)
