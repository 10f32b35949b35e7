"""Rules of the promises about a session's state: P4 one run, P5 no message lost, P6 valid transcript, P10 atomic
state."""

from __future__ import annotations

import itertools
import re

from holdfast.errors import IllegalTransition
from holdfast.proof.checker.facts import Attempt, Facts, LogRun, SessionLog, Where, root_cause, run_of
from holdfast.proof.checker.ledger import Ledger
from holdfast.proof.history import (
    Refused,
    SendAcknowledged,
    SendAttempted,
    SettlementRead,
    TranscriptRead,
    WithdrawAnswered,
    WithdrawRequested,
)
from holdfast.protocol.events import (
    ChildFinished,
    ChildStarted,
    Event,
    MessageAccepted,
    MessageSettled,
    RunFinished,
    RunRestarted,
    RunResumed,
    RunStarted,
    RunStopping,
    RunSuspended,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from holdfast.protocol.messages import Entry, MessageState, RunState, Settlement
from holdfast.protocol.states import (
    TERMINAL_MESSAGE_STATES,
    TERMINAL_RUN_STATES,
    MessageInput,
    RunInput,
    next_message_state,
    next_run_state,
)

__all__ = ["atomic_state", "no_message_lost", "one_run", "valid_transcript"]


_WORD = re.compile(r"\S+-emit:\d")
"""A word that the piece ``emit`` of a plan emits, which is unique within a run."""


def one_run(facts: Facts, ledger: Ledger) -> None:
    """P4: never two effective runs of one session.

    *Observations*: each run in a log, and each attempt that wrote stamps.

    *Violations*:

    - a run starts or writes to the log while another run of its session holds the slot (from ``run.started`` to
      ``run.finished``);
    - a run starts twice without a restart;
    - according to the agents' own stamps, an agent function starts before the previous run of its session has ended, or
      the previous run is still active after that start, except for work that a receipt names as abandoned or surviving;
    - one attempt of a run is executed twice, or by two hosts;
    - a run is attempted again before the host of the previous attempt was killed or stopped, or had exited, or had
      handed it over in a drain;
    - a host that was stopped, and lost a run to another one, still works on the run ``fence_s`` after it continued;
    - an agent ran, but the session's log does not contain the run;
    - an agent of the storm emits each word once, but the log has a word twice since the run's last restart;
    - the transcript mixes the entries of two runs.
    """
    for log in facts.logs.values():
        holder: str | None = None
        for event in log.events:
            run_id = run_of(event)
            if run_id is None:
                continue
            if isinstance(event, RunStarted):
                ledger.saw()
                if holder is not None:
                    ledger.broken(
                        "a run started while another one held the slot", log.where, log.runs[holder].started, event
                    )
                if len(log.runs[run_id].started) > 1 and event is log.runs[run_id].started[1]:
                    ledger.broken("a run started twice", log.where, log.runs[run_id].started)
                holder = run_id
            elif holder is None:
                if log.runs[run_id].finished and event.seq > log.runs[run_id].finished[0].seq:
                    ledger.broken("a run wrote after it had freed the slot", log.where, event)
                else:
                    ledger.broken("a run wrote without holding the slot", log.where, event)
            elif run_id != holder:
                ledger.broken("a run wrote while another one held the slot", log.where, log.runs[holder].started, event)
            elif isinstance(event, RunFinished):
                holder = None
        if "stamps" in facts.opened.sees:
            for run in log.runs.values():
                _judge_words(ledger, run)
    _judge_stamped_runs(facts, ledger)
    for read in facts.transcripts:
        seen: list[str] = []
        for entry in read.entries:
            if entry.run_id is None or (seen and seen[-1] == entry.run_id):
                continue
            if entry.run_id in seen:
                ledger.broken("the transcript mixes the entries of two runs", entry)
                break
            seen.append(entry.run_id)


def _judge_words(ledger: Ledger, run: LogRun) -> None:
    first: dict[str, Event] = {}
    for event in run.events:
        if isinstance(event, RunRestarted):
            first = {word: said for word, said in first.items() if said.seq < event.discard_from}
        elif isinstance(event, TextDelta):
            for word in filter(_WORD.fullmatch, event.text.split()):
                if first.setdefault(word, event) is not event:
                    ledger.broken(
                        f"two attempts of a run wrote at the same time: {word} is there twice", first[word], event
                    )
                    return


def _judge_stamped_runs(facts: Facts, ledger: Ledger) -> None:
    by_session: dict[Where, list[Attempt]] = {}
    for run_id, attempts in facts.attempts.items():
        where = attempts[0].where
        if where in facts.logs and run_id not in facts.logs[where].runs:
            ledger.broken("an agent ran without a claim in the log", attempts[0].stamps[0])
        for attempt in attempts:
            ledger.saw()
            by_session.setdefault(attempt.where, []).append(attempt)
            starts = [stamp for stamp in attempt.stamps if stamp.what == "start"]
            if len(starts) > 1:
                ledger.broken("one attempt of a run was executed twice", *starts)
            if len({stamp.host_pid for stamp in attempt.stamps}) > 1:
                ledger.broken("one attempt of a run was executed by two hosts", attempt.stamps[0], attempt.stamps[-1])
        for earlier, later in itertools.pairwise(attempts):
            first = later.stamps[0]
            host_pid, finish = earlier.stamps[0].host_pid, earlier.finish
            # A host that drains, or that cannot renew its lease, ends what it does before others begin it again.
            let_go = finish is not None and facts.lets_go_at.get(host_pid, first.at) < finish.at <= first.at
            if let_go or facts.stale_until(host_pid, first.at):
                continue
            killed_at = facts.killed_at.get(earlier.stamps[0].host_pid)
            if killed_at is None:
                left_at = facts.ended_at.get(earlier.stamps[0].host_pid)
                if left_at is None or left_at > first.at:
                    ledger.broken("a run was attempted again though its host lived on", earlier.stamps[0], first)
            elif killed_at > first.at:
                ledger.broken("a run was attempted again before its host was killed", earlier.stamps[0], first)
    for attempts in by_session.values():
        ordered = sorted((a for a in attempts if a.start is not None), key=lambda a: a.start.at if a.start else 0.0)
        for earlier, later in itertools.pairwise(ordered):
            start = later.start
            assert start is not None
            finish = earlier.finish
            host_end = facts.ended_at.get(earlier.stamps[0].host_pid, float("inf"))
            abandoned, survivors = facts.named_survivors(earlier.run_id)
            stale = facts.stale_until(earlier.stamps[0].host_pid, start.at)
            free_at = max(start.at, stale)
            if (finish is None or finish.at > free_at) and host_end > free_at and not abandoned:
                ledger.broken("two agents of one session ran at the same time", earlier.start, finish, start)
                continue
            killed_at = facts.killed_at.get(earlier.stamps[0].host_pid)
            dying = killed_at + facts.limits.death_s if killed_at is not None and killed_at <= start.at else 0.0
            late = {
                stamp.branch: stamp
                for stamp in earlier.stamps
                if stamp.at > free_at
                and not (stamp.member == "process" and (stamp.pid in survivors or stamp.at <= dying))
            }
            if len(late) > abandoned:
                ledger.broken("a run was at work after its successor had begun", start, *late.values())


def no_message_lost(facts: Facts, ledger: Ledger) -> None:
    """P5: each accepted message is settled exactly once, with the run that took it, in order; the same key runs once.

    *Observations*: each acknowledged or refused attempt to send, each answered withdrawal, each reading of a
    settlement, and each check that `PeopleSettled` reports.

    *Violations*:

    - any problem that `PeopleSettled` reports;
    - an acknowledged message is not in the log, or has another seq, content or policy there;
    - a message in the log is never settled, is settled twice or is taken twice;
    - a message is settled with a run that did not take it, or with an outcome other than that of the run that took it,
      or, if no run took it, with an outcome other than ``withdrawn``;
    - runs take messages out of order;
    - a message that was sent after another one had been acknowledged does not have a higher seq than the other one;
    - two attempts with one idempotency key created two messages, or one content is in the log twice;
    - the first attempt with an idempotency key is reported as a duplicate;
    - a message is in the log although every attempt to send it was refused, or although it was never sent;
    - an answered withdrawal, or a settlement that was read, contradicts the log.
    """
    for look in facts.people:
        ledger.saw(look.checked)
        for wrong in look.wrong:
            ledger.broken(wrong, look)
    by_key: dict[tuple[str, str, str], list[tuple[SendAttempted, object]]] = {}
    by_content: dict[tuple[str, str, str], list[object]] = {}
    for attempt, answer in facts.sends():
        where = (attempt.principal, attempt.session)
        by_key.setdefault((*where, attempt.idempotency_key), []).append((attempt, answer))
        by_content.setdefault((*where, attempt.content), []).append(answer)
        if isinstance(answer, SendAcknowledged | Refused):
            ledger.saw()
        if not isinstance(answer, SendAcknowledged):
            continue
        log = facts.logs.get(where)
        accepted = log.accepted.get(answer.message_id) if log is not None else None
        if log is None:
            ledger.broken("a message was acknowledged, but its session has no log", attempt, answer)
        elif accepted is None:
            ledger.broken("an acknowledged message is not in the log", attempt, answer)
        elif accepted[0].seq != answer.seq:
            ledger.broken("an acknowledged message has another seq in the log", answer, accepted[0])
        elif accepted[0].content != attempt.content or accepted[0].policy != attempt.policy:
            ledger.broken("an acknowledged message has another content or policy in the log", attempt, accepted[0])
    for attempts in by_key.values():
        ids = {answer.message_id for _, answer in attempts if isinstance(answer, SendAcknowledged)}
        if len(ids) > 1:
            ledger.broken("two attempts with one idempotency key got two messages", *attempts)
        first_attempt, first_answer = attempts[0]
        if isinstance(first_answer, SendAcknowledged) and first_answer.disposition == "duplicate":
            answered_earlier = any(other.at < first_answer.at for other, _ in attempts[1:])
            if not answered_earlier:
                ledger.broken("the first attempt of a key was called a duplicate", first_attempt, first_answer)
    _judge_send_order(facts, ledger)
    for log in facts.logs.values():
        _judge_mail(facts, ledger, log, by_content)
    for read in facts.settlements:
        _judge_settlement(facts, ledger, read)
    for call in facts.calls.values():
        if isinstance(call.request, WithdrawRequested) and isinstance(call.answer, WithdrawAnswered):
            ledger.saw()
            log = facts.logs.get(call.where)
            settled = log.settled.get(call.request.message_id) if log is not None else None
            if call.answer.state == "withdrawn" and (not settled or settled[0].state != "withdrawn"):
                ledger.broken("a withdrawn message was not settled as withdrawn", call.request, call.answer, settled)


def _judge_send_order(facts: Facts, ledger: Ledger) -> None:
    moments: list[tuple[float, int, str]] = []
    for attempt, answer in facts.sends():
        if isinstance(answer, SendAcknowledged) and answer.disposition != "duplicate":
            moments.append((attempt.at, 1, attempt.token))
            moments.append((answer.at, 0, attempt.token))
    moments.sort()
    newest: dict[Where, SendAcknowledged] = {}
    floor: dict[str, SendAcknowledged | None] = {}
    for _, begins, token in moments:
        call = facts.calls[token]
        answer = call.answer
        assert isinstance(answer, SendAcknowledged)
        if begins:
            floor[token] = newest.get(call.where)
            continue
        before = floor.get(token)
        if before is not None and before.seq >= answer.seq:
            ledger.broken("a message that was sent later stands earlier", before, answer)
        known = newest.get(call.where)
        if known is None or answer.seq > known.seq:
            newest[call.where] = answer


def _judge_mail(
    facts: Facts, ledger: Ledger, log: SessionLog, by_content: dict[tuple[str, str, str], list[object]]
) -> None:
    contents: dict[str, MessageAccepted] = {}
    for events in log.accepted.values():
        first = events[0]
        if len(events) > 1:
            ledger.broken("a message was accepted twice", *events)
        twin = contents.setdefault(first.content, first)
        if twin is not first:
            ledger.broken("one content was accepted as two messages", twin, first)
        answers = by_content.get((*log.where, first.content))
        if answers is None:
            ledger.broken("the log has a message that was never sent to this session", log.where, first)
        elif all(isinstance(answer, Refused) for answer in answers):
            ledger.broken("a refused message was accepted", first, *answers)
        _judge_message(ledger, log, first)
    for message_id, settled in log.settled.items():
        if message_id not in log.accepted:
            ledger.broken("a message was settled that was never accepted", *settled)
    highest = 0
    for event in log.events:
        if not isinstance(event, RunStarted):
            continue
        for message_id in event.messages:
            known = log.accepted.get(message_id)
            if known is None:
                ledger.broken("a run took a message that was never accepted", event)
                continue
            if known[0].seq < highest:
                ledger.broken("messages were taken out of order", known[0], event)
            if known[0].seq > event.seq:
                ledger.broken("a message was taken before it was accepted", known[0], event)
            highest = max(highest, known[0].seq)


def _judge_message(ledger: Ledger, log: SessionLog, message: MessageAccepted) -> None:
    settled = log.settled.get(message.message_id, [])
    taken = log.taken.get(message.message_id, [])
    if not settled:
        ledger.broken("an accepted message was never settled", log.where, message)
        return
    if len(settled) > 1:
        ledger.broken("a message was settled twice", *settled)
    if len(taken) > 1:
        ledger.broken("a message was taken by two runs", message, taken)
    end = settled[0]
    if end.state == "withdrawn":
        if taken:
            ledger.broken("a withdrawn message was taken by a run", message, taken)
        return
    if not taken:
        ledger.broken("a message was settled, but no run took it", message, end)
        return
    if end.run_id != taken[0]:
        ledger.broken("a message was settled with a run that did not take it", end, taken)
        return
    finished = log.runs[taken[0]].finished if taken[0] in log.runs else []
    if finished and finished[0].status != end.state:
        ledger.broken("a message was settled otherwise than its run ended", end, finished[0])


def _judge_settlement(facts: Facts, ledger: Ledger, read: SettlementRead) -> None:
    log = facts.logs.get((read.principal, read.session))
    ledger.saw()
    settlement: Settlement = read.settlement
    if log is None:
        return
    if settlement.message_id not in log.accepted:
        ledger.broken("a settlement was read of a message that the log does not have", read)
        return
    if settlement.state not in TERMINAL_MESSAGE_STATES:
        return
    settled = log.settled.get(settlement.message_id)
    if not settled or (settled[0].state, settled[0].run_id) != (settlement.state, settlement.run_id):
        ledger.broken("a settlement contradicts the log", read, settled)
        return
    run = log.runs.get(settlement.run_id or "")
    if run is not None and run.finished and run.finished[0].text != settlement.text:
        ledger.broken("a settlement has another answer than the log", read, run.finished[0])


def valid_transcript(facts: Facts, ledger: Ledger) -> None:
    """P6: appends are atomic, every tool call has exactly one result, and the next run always works.

    *Observations*: each reading of a transcript, and each run that follows a run that did not complete.

    *Violations*:

    - the numbers of a transcript's entries are not consecutive;
    - a tool call has no result, two results, or a result before the call, even in a run that was interrupted or
      crashed;
    - two tool calls of a run share an id;
    - an entry of an earlier reading is missing or different in a later reading of the same transcript;
    - a reading contains only some of a run's entries;
    - a run completed with an answer, but the last reading contains no answer of this run;
    - a message of a completed run is missing, or occurs more than once, in the last reading;
    - a run failed although none of its messages requested an error.
    """
    latest: dict[Where, TranscriptRead] = {}
    for read in facts.transcripts:
        ledger.saw()
        where = (read.principal, read.session)
        _judge_entries(ledger, read)
        before = latest.get(where)
        if before is not None and before.at <= read.began_at:
            known = len(before.entries)
            if read.entries[:known] != before.entries:
                ledger.broken(
                    "a transcript lost or changed entries that were read before", before.entries, read.entries[:known]
                )
            elif known and len(read.entries) > known and read.entries[known].run_id == before.entries[-1].run_id:
                ledger.broken("the entries of one run were visible in part", before.entries[-1], read.entries[known])
        latest[where] = read
    asked_to_fail = {
        (attempt.principal, attempt.session, attempt.content): attempt.may_fail for attempt, _ in facts.sends()
    }
    for where, log in facts.logs.items():
        last = latest.get(where)
        by_run: dict[str | None, list[Entry]] = {}
        for entry in last.entries if last is not None else ():
            by_run.setdefault(entry.run_id, []).append(entry)
        broken_before = False
        for run in log.runs.values():
            if not run.finished:
                continue
            if broken_before:
                ledger.saw()
            end = run.finished[0]
            broken_before = end.status != "completed"
            contents = facts.contents_of(run)
            if end.status == "failed" and not any(asked_to_fail.get((*where, content)) for content in contents):
                ledger.broken("a run failed although nothing asked it to", where, end, run.started)
            if last is not None and end.status == "completed":
                _judge_completed(ledger, by_run.get(run.run_id, []), run, contents)


def _judge_entries(ledger: Ledger, read: TranscriptRead) -> None:
    open_calls: dict[str, Entry] = {}
    closed: set[str] = set()
    for index, entry in enumerate(read.entries, 1):
        if entry.n != index:
            ledger.broken(f"the transcript has entry {entry.n} in place {index}", entry)
            return
        if entry.role not in ("tool_call", "tool_result"):
            continue
        call_id = f"{entry.run_id}/{entry.call_id}"
        if entry.role == "tool_call":
            if call_id in open_calls or call_id in closed:
                ledger.broken("two tool calls have one id", entry)
            open_calls[call_id] = entry
        elif call_id in closed:
            ledger.broken("a tool call has two results", entry)
        elif open_calls.pop(call_id, None) is None:
            ledger.broken("a tool result stands before its call, or without one", entry)
        else:
            closed.add(call_id)
    if open_calls:
        ledger.broken("a tool call has no result", *open_calls.values())


def _judge_completed(ledger: Ledger, own: list[Entry], run: LogRun, contents: list[str]) -> None:
    end = run.finished[0]
    if end.text and not any(entry.role == "assistant" for entry in own):
        ledger.broken("a completed run left no answer in the transcript", end)
    for content in contents:
        times = sum(1 for entry in own if entry.role == "user" and entry.content == content)
        if times != 1:
            ledger.broken(f"a message of a completed run is {times} times in the transcript", end, content)


_RUN_INPUTS: dict[type[Event], RunInput] = {
    RunSuspended: "suspend",
    RunResumed: "resume",
    RunStopping: "interrupt",
    RunRestarted: "restart",
}
_MESSAGE_INPUTS: dict[str, MessageInput] = {
    "completed": "complete",
    "failed": "fail",
    "interrupted": "interrupt",
    "superseded": "supersede",
    "withdrawn": "withdraw",
}
_RANK: dict[MessageState, int] = {"accepted": 0, "taken": 1}
_STATE_ERRORS = frozenset(("illegal_transition", "error", "internal_error", "stale_fence"))


def atomic_state(facts: Facts, ledger: Ledger) -> None:
    """P10: every change of state follows the table of `holdfast.protocol.states`.

    *Observations*: each run and each message in a log, and each message whose state was read twice.

    *Violations*:

    - the events of a run or a message are not a path through the table (a run begins with ``run.started``, is
      interrupted by a request only after ``run.stopping``, ends in one terminal state and stays in that state);
    - a tool call or a child run finishes twice, or without having started;
    - a later reading of a message shows an earlier state, or a different terminal state;
    - a session is read as idle although it names a run, or as active although it does not name a run;
    - a run is read as ended although it has no end time, or as active although it has an end time;
    - a client gets an internal error: an illegal state transition, a stale lease, or an error without a specific code.
    """
    for log in facts.logs.values():
        for run in log.runs.values():
            ledger.saw()
            _judge_run_path(ledger, log.where, run)
            _judge_call_path(ledger, log.where, run)
        _judge_message_paths(ledger, log)
    newest: dict[tuple[str, str, str], SettlementRead] = {}
    for read in sorted(facts.settlements, key=lambda item: item.at):
        key = (read.principal, read.session, read.settlement.message_id)
        before = newest.get(key)
        if before is not None and before.at <= read.began_at:
            ledger.saw()
            was, now = before.settlement.state, read.settlement.state
            if _RANK.get(now, 2) < _RANK.get(was, 2):
                ledger.broken("a message went back to an earlier state", before, read)
            elif was in TERMINAL_MESSAGE_STATES and was != now:
                ledger.broken("a settled message has another end later", before, read)
        newest[key] = read
    for session in facts.session_reads:
        view = session.view
        if (view.state == "idle") != (view.run_id is None) and view.state != "deleted":
            ledger.broken("a session's state does not fit its run", view)
        for seen in session.runs:
            if (seen.state in TERMINAL_RUN_STATES) != (seen.ended_at is not None):
                ledger.broken("a run's state does not fit its end", seen)
    for call in facts.calls.values():
        if isinstance(call.answer, Refused) and call.answer.code in _STATE_ERRORS:
            ledger.broken("an error of the runtime's own state reached a client", call.request, call.answer)


def _judge_run_path(ledger: Ledger, where: Where, run: LogRun) -> None:
    first = run.events[0]
    if not isinstance(first, RunStarted):
        ledger.broken("the first event of a run is not run.started", where, first)
        return
    state: RunState = "running"
    for event in run.events[1:]:
        if isinstance(event, RunStarted):
            ledger.broken("a run was started again", where, event)
            return
        if isinstance(event, RunFinished):
            cause = root_cause(event.cause)
            asked = cause is not None and cause.kind in ("user", "stop", "message", "rollback")
            step: RunInput
            if event.status == "completed":
                step = "complete"
            elif event.status == "failed":
                step = "fail"
            else:
                step = "stopped" if state == "stopping" or asked else "crash"
        else:
            known = _RUN_INPUTS.get(type(event))
            if known is None:
                if state in TERMINAL_RUN_STATES:
                    ledger.broken("a run acts after its terminal state", where, event)
                    return
                continue
            step = known
        try:
            after = next_run_state(state, step)
        except IllegalTransition as error:
            ledger.broken(f"illegal: {error.message}", where, event)
            return
        if isinstance(event, RunFinished) and after != event.status:
            ledger.broken(f"a run that was {state} ended as {event.status} instead of {after}", where, event)
            return
        state = after


def _judge_call_path(ledger: Ledger, where: Where, run: LogRun) -> None:
    open_calls: set[str] = set()
    children: set[str] = set()
    done: set[str] = set()
    for event in run.events:
        match event:
            case RunRestarted():
                children.clear()
            case ChildStarted(child_id=name):
                children.add(name)
            case ToolStarted(call_id=name):
                open_calls.add(name)
            case ChildFinished(child_id=name):
                if name not in children:
                    ledger.broken("a child finished that had not started, or twice", where, event)
                children.discard(name)
            case ToolFinished(call_id=name, status=status):
                if name in done:
                    ledger.broken("a call finished twice", where, event)
                elif name not in open_calls:
                    ledger.broken("a call finished that had not started", where, event)
                open_calls.discard(name)
                if status != "interrupted":
                    done.add(name)
            case _:
                pass


def _judge_message_paths(ledger: Ledger, log: SessionLog) -> None:
    states: dict[str, MessageState] = {}
    for event in log.events:
        steps: list[tuple[str, MessageInput]] = []
        if isinstance(event, MessageAccepted):
            ledger.saw()
            states.setdefault(event.message_id, "accepted")
        elif isinstance(event, RunStarted):
            steps = [(message_id, "take") for message_id in event.messages]
        elif isinstance(event, MessageSettled):
            steps = [(event.message_id, _MESSAGE_INPUTS[event.state])]
        for message_id, step in steps:
            state = states.get(message_id)
            if state is None:
                ledger.broken("a message changes its state before it was accepted", log.where, event)
                continue
            try:
                states[message_id] = next_message_state(state, step)
            except IllegalTransition as error:
                ledger.broken(f"illegal: {error.message}", log.where, event)
