"""Rules of the promises about crashes and shutdowns of a host: P11 crash-safe, P12 clean shutdown."""

from __future__ import annotations

from holdfast.proof.checker.facts import Facts, LogRun
from holdfast.proof.checker.ledger import Ledger
from holdfast.proof.checker.takeovers import takeovers
from holdfast.proof.history import Drained, HostKilled, ReaderReceived, SendAcknowledged, Stamp
from holdfast.protocol.events import RunFinished, RunRestarted, RunStopping, ToolFinished, ToolStarted
from holdfast.protocol.states import TERMINAL_RUN_STATES

__all__ = ["clean_shutdown", "crash_safe"]


def crash_safe(facts: Facts, ledger: Ledger) -> None:
    """P11: ``kill -9`` at any instant loses nothing that was accepted, leaves nothing running, and wedges no session.

    *Observations*: each kill after which a host became ready, and each run that was cut short by a kill.

    *Violations*:

    - no host became ready after a kill, or a host took longer than ``ready_s`` to become ready;
    - a message that was acknowledged, or an event that a reader received, before the last kill is not in the log;
    - in the last reading, a session is not quiescent or a run has not ended;
    - if ``takeover_s`` is given, a run of a host that was killed or stopped was taken over later than that;
    - a run that was cut short by a kill never ended, or it completed or failed without a restart;
    - a run was restarted although its stop was recorded, although its messages went to an agent that cannot be
      replayed, or although a call that is not idempotent had no result;
    - a call whose result was in the log ran again;
    - a call that is not idempotent ran twice.
    """
    for kill in facts.kills:
        later = [ready for ready in facts.ready if ready.incarnation > kill.incarnation and ready.at > kill.at]
        started = next((start for start in facts.started if start.incarnation > kill.incarnation), None)
        if not later or started is None:
            ledger.broken("no host became ready after a kill", kill)
            continue
        ledger.saw()
    for start in facts.started:
        ready = next((item for item in facts.ready if item.incarnation == start.incarnation), None)
        ended = facts.ended_at.get(start.pid)
        if ready is None:
            if ended is None or ended - start.at > facts.limits.ready_s:
                ledger.broken("a host never became ready", start)
        elif ready.at - start.at > facts.limits.ready_s:
            ledger.broken(f"a host needed {ready.at - start.at:.1f} s to become ready", start, ready)
    for takeover in takeovers(facts):
        ledger.saw()
        if facts.limits.takeover_s and takeover.took_s > facts.limits.takeover_s:
            bound = f"the bound is {facts.limits.takeover_s:g} s"
            ledger.broken(f"a run was taken over after {takeover.took_s:.2f} s, {bound}", takeover)
    if not facts.kills:
        return
    last_kill = facts.kills[-1].at
    for attempt, answer in facts.sends():
        if isinstance(answer, SendAcknowledged) and answer.at < last_kill:
            log = facts.logs.get((attempt.principal, attempt.session))
            if log is None or answer.message_id not in log.accepted:
                ledger.broken("a message was acknowledged before a kill and is gone", attempt, answer)
    for connection in facts.connections.values():
        log = facts.logs.get((connection.opened.principal, connection.opened.session))
        if log is None:
            continue
        for received in connection.received:
            if isinstance(received, ReaderReceived) and received.at < last_kill:
                missing = next((seq for seq, _ in received.frames if seq not in log.by_seq), None)
                if missing is not None:
                    ledger.broken("an event was seen before a kill and is gone", connection.opened, {"seq": missing})
                    break
    for read in facts.session_reads:
        if not read.final:
            continue
        if read.view.state not in ("idle", "deleted") or read.view.waiting:
            ledger.broken("a session is not at rest after everything has ended", read.view)
        for run in read.runs:
            if run.state not in TERMINAL_RUN_STATES:
                ledger.broken("a run is still on after everything has ended", run)
    replayable = {
        (attempt.principal, attempt.session, attempt.content): attempt.replayable for attempt, _ in facts.sends()
    }
    for run_log in facts.run_logs.values():
        _judge_cut_run(facts, ledger, run_log, replayable)


def _judge_cut_run(facts: Facts, ledger: Ledger, run: LogRun, replayable: dict[tuple[str, str, str], bool]) -> None:
    attempts = facts.attempts.get(run.run_id, [])
    restarts = [event for event in run.events if isinstance(event, RunRestarted)]
    for attempt in attempts:
        if attempt.stamps[0].host_pid in facts.killed_at and attempt.start is not None and attempt.finish is None:
            ledger.saw()
            if not run.finished:
                ledger.broken("a run that a kill cut never ended", run.where, attempt.start, run.started)
            elif run.finished[0].status != "interrupted" and not any(r.attempt > attempt.attempt for r in restarts):
                ledger.broken("a run that a kill cut ended by itself without a restart", attempt.start, run.finished[0])
    effects = [stamp for attempt in attempts for stamp in attempt.stamps if stamp.what == "effect"]
    if restarts:
        contents = facts.contents_of(run)
        if not all(replayable.get((*run.where, content), True) for content in contents):
            ledger.broken("a run was restarted that cannot be replayed", run.where, restarts[0], contents)
    stopping = next((event for event in run.events if isinstance(event, RunStopping)), None)
    for restart in restarts:
        if stopping is not None and stopping.seq < restart.seq:
            ledger.broken("a run was restarted although its stop was recorded", run.where, stopping, restart)
        open_calls: dict[str, ToolStarted] = {}
        results: set[str] = set()
        names: dict[str, str] = {}
        for event in run.events:
            if event.seq >= restart.seq:
                break
            if isinstance(event, ToolStarted):
                open_calls[event.call_id] = event
                names[event.call_id] = event.name
            elif isinstance(event, ToolFinished):
                open_calls.pop(event.call_id, None)
                if event.status == "ok" and event.call_id in names:
                    results.add(names[event.call_id])
        for call in open_calls.values():
            if not call.idempotent:
                ledger.broken("a run was restarted with an open call that is not idempotent", call, restart)
        for stamp in effects:
            if stamp.attempt >= restart.attempt and stamp.effect in results:
                ledger.broken("a call whose result was in the log took place again", restart, stamp)
    once: dict[str, Stamp] = {}
    for stamp in effects:
        if stamp.effect is not None and not stamp.idempotent:
            first = once.setdefault(stamp.effect, stamp)
            if first is not stamp:
                ledger.broken("a call that is not idempotent took place twice", first, stamp)


def clean_shutdown(facts: Facts, ledger: Ledger) -> None:
    """P12: a drain finishes or suspends work by its deadline, notifies readers, and names every orphan.

    *Observations*: each requested drain, unless the host was killed before the drain was answered.

    *Violations*:

    - the drain was not answered;
    - the drain took longer than its deadline plus ``drain_slack_s``;
    - the host's exit code is not 0 (or 1 if the report names orphans);
    - a message was accepted after the report and before the next start;
    - the log contradicts the report about an interrupted or suspended run;
    - after the report, a run's code is still active or a process of the host is in the process list, although the
      report does not name this work as an orphan;
    - a reader that was connected when the drain began stalled, or lost its connection without a final frame.
    """
    for request in facts.drain_requests:
        pid = facts.pid_of.get(request.incarnation)
        killed = next((k for k in facts.kills if k.incarnation == request.incarnation), None)
        report = next((d for d in facts.drains if d.incarnation == request.incarnation), None)
        if report is None:
            if killed is None:
                ledger.saw()
                ledger.broken("a drain was not answered", request)
            continue
        ledger.saw()
        allowed = request.deadline_s + facts.limits.drain_slack_s
        took = max(report.elapsed_s, report.at - request.at)
        if took > allowed:
            ledger.broken(f"a drain took {took:.1f} s, its deadline was {request.deadline_s:g} s", request, report)
        left = next((e for e in facts.exits if e.incarnation == request.incarnation), None)
        if left is not None and left.code not in ((0, 1) if report.orphans else (0,)):
            ledger.broken(f"a drained host left with exit code {left.code}", report, left)
        next_start = next((s.at for s in facts.started if s.incarnation > request.incarnation), float("inf"))
        for attempt, answer in facts.sends():
            if facts.others_at(request.incarnation, report.at):
                break  # they accept messages
            if report.at < attempt.at < next_start and isinstance(answer, SendAcknowledged) and answer.at < next_start:
                ledger.broken("a message was accepted after the drain", report, attempt, answer)
        _judge_report(facts, ledger, report, killed)
        _judge_left_overs(facts, ledger, report, pid)
        for connection in facts.connections.values():
            closed = connection.closed
            if facts.others_at(request.incarnation, request.at):
                break  # which host a reader was connected to is not recorded
            if closed is None or closed.why not in ("lost", "stalled") or killed is not None:
                continue
            if connection.opened.at < request.at <= closed.at < next_start:
                ledger.broken("a reader got no notice of the drain", connection.opened, closed)


def _judge_report(facts: Facts, ledger: Ledger, report: Drained, killed: HostKilled | None) -> None:
    for run_id, expected in [
        *((run_id, "interrupted") for run_id in report.interrupted),
        *((run_id, "parked") for run_id in report.parked),
    ]:
        if run_id in facts.unlogged_runs:
            continue
        run = facts.run_logs.get(run_id)
        if run is None:
            ledger.broken(f"a drain calls a run {expected} that the log does not have", report, run_id)
            continue
        end = run.finished[0] if run.finished else None
        if expected == "interrupted" and (end is None or end.status != "interrupted"):
            ledger.broken("a drain calls a run interrupted that was not", report, run_id, end)
        elif expected == "parked" and killed is None and not _resumed(run, end):
            ledger.broken("a drain calls a run parked, but no host resumed it", report, run_id)


def _resumed(run: LogRun, end: RunFinished | None) -> bool:
    return end is not None and (end.status == "interrupted" or any(isinstance(e, RunRestarted) for e in run.events))


def _judge_left_overs(facts: Facts, ledger: Ledger, report: Drained, pid: int | None) -> None:
    named = " ".join(report.orphans)
    working: dict[tuple[str, str], Stamp] = {}
    for stamp in facts.stamps:
        if stamp.host_pid == pid and stamp.at > report.at:
            working[stamp.run_id, stamp.branch] = stamp
    unnamed = [
        stamp
        for stamp in working.values()
        if stamp.run_id not in named and stamp.branch not in named and not _has_pid(named, stamp)
    ]
    if unnamed:
        ledger.broken("work continues after a drain that did not name it", report, *unnamed)
    for listing in facts.listings:
        if listing.began_at <= report.at:
            continue
        strays = [seen for seen in listing.alive if seen.host_pid == pid and str(seen.pid) not in named]
        if strays:
            ledger.broken("a process is left after a drain that did not name it", report, *strays)
            break


def _has_pid(named: str, stamp: Stamp) -> bool:
    return stamp.member == "process" and str(stamp.pid) in named
