"""Rules of the promises about stopping: P1 broadcast, P2 isolation, P3 stopped means stopped, P8 no leaks."""

from __future__ import annotations

from bisect import bisect_left

from holdfast.proof.checker.facts import Attempt, Facts, LogRun, Where, root_cause
from holdfast.proof.checker.ledger import Ledger
from holdfast.proof.history import (
    Stamp,
    StatisticsRead,
    StopAnswered,
    StopRequested,
    WithdrawAnswered,
    WithdrawRequested,
)
from holdfast.protocol.events import RunFinished, RunStopping
from holdfast.protocol.stopping import LEASE_LOST, Cause, StopReceipt

__all__ = ["broadcast", "isolation", "no_leaks", "stopped_means_stopped"]

_ASKED = frozenset(("user", "stop", "message", "rollback"))
"""Kinds of causes that require a request."""


def _branches(attempt: Attempt) -> dict[str, list[Stamp]]:
    branches: dict[str, list[Stamp]] = {}
    for stamp in attempt.stamps:
        branches.setdefault(stamp.branch, []).append(stamp)
    return branches


def broadcast(facts: Facts, ledger: Ledger) -> None:
    """P1: one interrupt reaches every waiter of its scope.

    The rule judges the last attempt of each run that the log shows as ``interrupted``, unless the cause was a crash or
    a lost lease, or the attempt's host ended, or was stopped, before a client knew of the run's end.

    *Observations*: each task, thread and child of the attempt that watches its interrupt, and each process if the
    process list was read after the run's end was known.

    *Violations*:

    - the number of such tasks, threads and children that had neither seen the interrupt nor ended when the run's end
      was known is higher than the number that the receipts name as abandoned;
    - a task, thread or child saw the interrupt, or ended, more than ``wake_s`` after the run's end was known, even if a
      receipt names it;
    - branches of the run saw different root causes;
    - a branch saw a root cause that the log does not contain, and the run did not end with an error;
    - a process outlived the run, and no receipt names the process.
    """
    for run in facts.run_logs.values():
        attempts = facts.attempts.get(run.run_id)
        if not attempts or not run.finished or run.finished[0].status != "interrupted":
            continue
        cause = root_cause(run.finished[0].cause)
        if cause is not None and cause.kind in ("crash", "lease_lost"):
            continue
        last = attempts[-1]
        known_end = facts.known_end.get(run.run_id)
        host_pid = last.stamps[0].host_pid
        host_end = facts.ended_at.get(host_pid)
        if known_end is None or (host_end is not None and host_end <= known_end):
            continue
        if facts.stale_until(host_pid, known_end):
            continue
        abandoned, survivors = facts.named_survivors(run.run_id)
        log_reasons = {
            first.reason
            for first in (cause, *(root_cause(event.cause) for event in run.stopping))
            if first is not None and first.reason
        }
        untold: list[Stamp] = []
        told: dict[str, Stamp] = {}
        for stamps in _branches(last).values():
            first_stamp = stamps[0]
            if first_stamp.member == "process":
                if facts.listed_after(known_end):
                    ledger.saw()
                    for listing, seen in facts.alive_after(run.run_id, known_end):
                        if seen.pid not in survivors:
                            ledger.broken("a process of an interrupted run lives on", seen, listing)
                            break
                continue
            if not first_stamp.cooperative:
                continue
            ledger.saw()
            telling = next((s for s in stamps if s.what == "told"), None)
            over = next((s for s in stamps if s.what in ("end", "finish")), None)
            last_word = telling or over
            if last_word is None:
                untold.append(first_stamp)
                continue
            if last_word.at > known_end + facts.limits.wake_s:
                ledger.broken("a branch saw the interrupt only long after its run's end", last_word, run.finished[0])
            elif last_word.at > known_end:
                untold.append(last_word)
            if telling is not None and telling.cause:
                told.setdefault(telling.cause, telling)
        if len(untold) > abandoned:
            ledger.broken("a branch of an interrupted run did not see the interrupt", *untold, run.finished[0])
        if len(told) > 1:
            ledger.broken("branches of one run saw different first causes", *told.values())
        for reason, telling in told.items():
            # A host that is cut off stops its run without knowing of an interrupt that another one has recorded.
            knows = reason != LEASE_LOST or not facts.is_cut_off(host_pid, telling.at)
            if knows and log_reasons and reason not in log_reasons and run.finished[0].error is None:
                ledger.broken("a branch saw a cause that the log does not have", telling, run.finished[0])


def isolation(facts: Facts, ledger: Ledger) -> None:
    """P2: an interrupt of one scope is never seen in another.

    *Observations*: every run that was active while another session was being stopped, every run that the log shows
    stopping or interrupted, and every branch that saw an interrupt.

    *Violations*:

    - a run was stopped, or a branch saw an interrupt, although no stop was requested in the run's session, its host was
      not drained, stopped or killed, and its agent did not fail;
    - the cause of a stop is a request or a message of another session;
    - a stop withdrew a message of another session, or a request to withdraw such a message was answered;
    - the ambient context named a session other than the one for which the code was started.
    """
    asked: dict[Where, float] = {}
    reasons: dict[str, StopRequested] = {}
    for request, _ in facts.stops():
        asked.setdefault((request.principal, request.session), request.at)
        reasons[request.reason] = request
    for sent, _ in facts.sends():
        if sent.policy == "interrupt":
            home = (sent.principal, sent.session)
            asked[home] = min(sent.at, asked.get(home, sent.at))
    first_break = min((r.at for r in (*facts.drain_requests, *facts.kills, *facts.exits)), default=float("inf"))
    may_fail = {(sent.principal, sent.session, sent.content) for sent, _ in facts.sends() if sent.may_fail}
    failed = {
        run.run_id
        for run in facts.run_logs.values()
        if any(event.status == "failed" for event in run.finished)
        or any((*run.where, content) in may_fail for content in facts.contents_of(run))
    }
    leaving = dict(facts.ended_at)
    leaving.update(facts.drained_at)
    for pid, absences in facts.absences_of.items():
        leaving[pid] = min(absences[0].began_at, leaving.get(pid, absences[0].began_at))
    stop_times: list[tuple[float, Where]] = sorted(
        (request.at, (request.principal, request.session)) for request, _ in facts.stops()
    )

    def unjustified(where: Where, cause: Cause | None, until: float, attempts: list[Attempt]) -> str | None:
        first = root_cause(cause)
        if first is None:
            return "it has no cause"
        if first.kind in _ASKED:
            if asked.get(where, until) >= until:
                return f"no stop was requested in this session (cause {first.kind})"
            elsewhere = reasons.get(first.reason)
            if elsewhere is not None and (elsewhere.principal, elsewhere.session) != where:
                return "the cause is a stop of another session"
            log = facts.logs.get(where)
            if first.message_id is not None and log is not None and first.message_id not in log.accepted:
                return "the cause is a message of another session"
            return None
        if first.kind in ("crash", "lease_lost", "shutdown"):
            hosts = {attempt.stamps[0].host_pid for attempt in attempts}
            gone = [at for pid, at in leaving.items() if pid in hosts] if hosts else [first_break]
            return None if any(at < until for at in gone) else f"its host was not killed or drained ({first.kind})"
        return f"nothing in this storm makes the cause {first.kind}"

    for run in facts.run_logs.values():
        attempts = facts.attempts.get(run.run_id, [])
        if run.stopping or any(event.status == "interrupted" for event in run.finished):
            ledger.saw()
        until = facts.known_end.get(run.run_id, float("inf"))
        ends = [event for event in run.finished if event.status == "interrupted"]
        stops: list[RunStopping | RunFinished] = [*run.stopping, *ends]
        for event in stops:
            why = unjustified(run.where, event.cause, until, attempts)
            if why is not None:
                ledger.broken(f"a run was stopped, but {why}", run.where, event)
        for attempt in attempts:
            begin, end = attempt.stamps[0].at, attempt.stamps[-1].at
            near = stop_times[bisect_left(stop_times, (begin,)) : bisect_left(stop_times, (end,))]
            if any(where != attempt.where for _, where in near):
                ledger.saw()
    for stamp in facts.stamps:
        home = (stamp.principal, stamp.session)
        if stamp.seen_session is not None and stamp.seen_session != f"{stamp.principal}/{stamp.session}":
            ledger.broken("the ambient context names another session", stamp)
        if stamp.what != "told":
            continue
        ledger.saw()
        elsewhere = reasons.get(stamp.cause) if stamp.cause else None
        if elsewhere is not None and (elsewhere.principal, elsewhere.session) != home:
            ledger.broken("a branch saw a stop of another session", stamp, elsewhere)
        elif (
            asked.get(home, stamp.at) >= stamp.at
            and leaving.get(stamp.host_pid, stamp.at) >= stamp.at
            and stamp.run_id not in failed
        ):
            ledger.broken("a branch saw an interrupt, but no stop was requested in this session", stamp)
    for call in facts.calls.values():
        if isinstance(call.request, StopRequested) and isinstance(call.answer, StopAnswered):
            log = facts.logs.get(call.where)
            if log is not None:
                for message_id in call.answer.withdrawn:
                    if message_id not in log.accepted:
                        ledger.broken("a stop withdrew a message of another session", call.request, call.answer)
        elif isinstance(call.request, WithdrawRequested) and isinstance(call.answer, WithdrawAnswered):
            log = facts.logs.get(call.where)
            if log is not None and call.request.message_id not in log.accepted:
                ledger.broken("a withdrawal was answered for a message of another session", call.request, call.answer)


def _consistent(receipt: StopReceipt) -> bool:
    if receipt.outcome == "gone":
        return not receipt.abandoned and not receipt.survivors
    if receipt.outcome == "quarantined":
        return bool(receipt.abandoned) and not receipt.survivors
    return True


def stopped_means_stopped(facts: Facts, ledger: Ledger) -> None:
    """P3: the receipt of a stop is accurate, and the slot is free only when the run is gone or abandoned.

    *Observations*: each receipt of an interrupt or stop, and each terminal event that carries a receipt.

    *Violations*:

    - a run that had begun before the request has more tasks, threads and children that are active after the receipt
      than its receipts name as abandoned;
    - a process of such a run writes a stamp after the receipt, or is in a later process list, and no receipt names the
      process's pid;
    - a receipt contradicts itself (``gone`` with abandoned work or survivors, ``quarantined`` with survivors or without
      abandoned work);
    - a run whose stop was answered has no terminal event in the log;
    - an ended run still writes to the log.
    """
    for run in facts.run_logs.values():
        if run.receipt is not None:
            ledger.saw()
            if not _consistent(run.receipt):
                ledger.broken("the receipt of a run contradicts itself", run.finished[0])
        if run.finished:
            end = run.finished[0].seq
            for event in run.events:
                if event.seq > end:
                    ledger.broken("an ended run still writes to the log", run.finished[0], event)
                    break
    by_session: dict[Where, list[Attempt]] = {}
    for attempts in facts.attempts.values():
        for attempt in attempts:
            by_session.setdefault(attempt.where, []).append(attempt)
    for request, answer in facts.stops():
        if not isinstance(answer, StopAnswered):
            continue
        ledger.saw()
        receipt = answer.receipt
        if not _consistent(receipt):
            ledger.broken("the receipt of a stop contradicts itself", request, answer)
        log = facts.logs.get((request.principal, request.session))
        for run_id in facts.stop_reasons.get(request.reason, ()):
            if log is not None and run_id in log.runs and not log.runs[run_id].finished:
                ledger.broken("a stop was answered, but its run has no terminal event", request, answer)
        for attempt in by_session.get((request.principal, request.session), ()):
            start = attempt.start
            if start is None or start.at >= request.at:
                continue
            if attempt.stamps[-1].at <= answer.at and not any(facts.alive_after(attempt.run_id, answer.at)):
                continue
            if request.run_id is not None and request.run_id != attempt.run_id:
                continue
            if facts.broke_between(request.at, answer.at):
                continue
            _judge_rest(facts, ledger, attempt, request, answer)


def _judge_rest(facts: Facts, ledger: Ledger, attempt: Attempt, request: StopRequested, answer: StopAnswered) -> None:
    late = [s for s in attempt.stamps if s.at > max(answer.at, facts.stale_until(s.host_pid, s.at))]
    late_processes = {stamp.pid: stamp for stamp in late if stamp.member == "process"}
    late_branches = {stamp.branch: stamp for stamp in late if stamp.member != "process"}
    if late_branches or late_processes:
        abandoned, survivors = facts.named_survivors(attempt.run_id)
        abandoned = max(abandoned, len(answer.receipt.abandoned))
        survivors |= frozenset(answer.receipt.survivors)
        if len(late_branches) > abandoned:
            ledger.broken("work of a stopped run continues after the receipt", request, answer, *late_branches.values())
        for pid, stamp in late_processes.items():
            if pid not in survivors and not _dying(facts, stamp.host_pid, answer.at, stamp.at):
                ledger.broken("a process of a stopped run continues after the receipt", request, answer, stamp)
                return
    for listing, seen in facts.alive_after(attempt.run_id, answer.at):
        named = seen.pid in answer.receipt.survivors or seen.pid in facts.named_survivors(attempt.run_id)[1]
        if not named and not _dying(facts, seen.host_pid, answer.at, listing.began_at):
            ledger.broken("a process of a stopped run is alive after the receipt", request, answer, listing)
            return


def no_leaks(facts: Facts, ledger: Ledger) -> None:
    """P8: after a run ends, nothing of it remains except what its receipt names.

    *Observations*: each ended run that has stamps, or after which the process list was read; each killed or exited host
    after which the process list was read; and each quiet reading of a host's statistics, which is compared with the
    last baseline.

    *Violations*:

    - after a run's end was known, more of its branches are active than its receipts name as abandoned;
    - after a run's end was known, one of its processes writes a stamp or is in the process list, and no receipt names
      the process;
    - a process or other code outlives its host by more than ``death_s``;
    - a quiet host reports an active run or a non-empty task tree, or more processes, tasks, threads or descriptors than
      at its baseline (plus the declared slack for threads and descriptors).
    """
    for run in facts.run_logs.values():
        known_end = facts.known_end.get(run.run_id)
        if known_end is None:
            continue
        attempts = facts.attempts.get(run.run_id, [])
        if attempts or facts.listed_after(known_end):
            ledger.saw()
        _judge_leaks(facts, ledger, run, attempts, known_end)
    last_signs = {stamp.host_pid: stamp for stamp in facts.stamps}
    for pid, ended_at in facts.ended_at.items():
        limit = ended_at + facts.limits.death_s
        if facts.listed_after(limit):
            ledger.saw()
        outlived = next(
            (
                (listing, seen)
                for listing in facts.listings
                if listing.began_at > limit
                for seen in listing.alive
                if seen.host_pid == pid
            ),
            None,
        )
        if outlived is not None:
            ledger.broken("a process outlives its host", {"host_pid": pid, "ended_at": ended_at}, *outlived)
        late = last_signs.get(pid)
        if late is not None and late.at > limit:
            ledger.broken("code outlives its host", {"host_pid": pid, "ended_at": ended_at}, late)
    _judge_statistics(facts, ledger)


def _judge_leaks(facts: Facts, ledger: Ledger, run: LogRun, attempts: list[Attempt], known_end: float) -> None:
    late = [
        stamp
        for attempt in attempts
        for stamp in attempt.stamps
        if stamp.at > max(known_end, facts.stale_until(stamp.host_pid, stamp.at))
    ]
    left = next(facts.alive_after(run.run_id, known_end), None)
    if not late and left is None:
        return
    abandoned, survivors = facts.named_survivors(run.run_id)
    branches = {stamp.branch: stamp for stamp in late if stamp.member != "process"}
    if len(branches) > abandoned:
        ledger.broken("code of an ended run still runs", {"known_end": known_end}, *branches.values())
    for stamp in late:
        if (
            stamp.member == "process"
            and stamp.pid not in survivors
            and not _dying(facts, stamp.host_pid, known_end, stamp.at)
        ):
            ledger.broken("a process of an ended run still works", {"known_end": known_end}, stamp)
            break
    for listing, seen in facts.alive_after(run.run_id, known_end):
        if seen.pid not in survivors and not _dying(facts, seen.host_pid, known_end, listing.began_at):
            ledger.broken("a process of an ended run is alive", {"known_end": known_end}, run.finished, listing)
            break


def _dying(facts: Facts, host_pid: int, since: float, at: float) -> bool:
    """Whether a process may still be alive at `at`.

    Its host was killed before `since`, and ``death_s`` have not yet passed; or its host is stopped, or just was.
    """
    if facts.stale_until(host_pid, at):
        return True
    killed_at = facts.killed_at.get(host_pid)
    return killed_at is not None and killed_at <= since and at <= killed_at + facts.limits.death_s


def _judge_statistics(facts: Facts, ledger: Ledger) -> None:
    baseline: StatisticsRead | None = None
    for read in facts.statistics:
        if read.moment == "baseline":
            baseline = read
        if read.moment != "quiet" or baseline is None:
            continue
        ledger.saw()
        if read.running:
            ledger.broken("a quiet host counts runs", read)
        if read.in_tree:
            ledger.broken("the task tree of a quiet host is not empty", read)
        for what, now, then, slack in (
            ("processes", read.processes, baseline.processes, 0),
            ("tasks", read.tasks, baseline.tasks, 0),
            ("threads", read.threads, baseline.threads, facts.limits.thread_slack),
            ("descriptors", read.descriptors, baseline.descriptors, facts.limits.descriptor_slack),
        ):
            if now > then + slack:
                ledger.broken(
                    f"a quiet host holds more {what} than before the load: {now} instead of {then}", baseline, read
                )
