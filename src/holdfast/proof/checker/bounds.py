"""Rules of the promises about bounds and other principals: P9 bounded, P13 fair, P14 private, P16 walled."""

from __future__ import annotations

from holdfast.proof.checker.facts import Facts, SessionLog
from holdfast.proof.checker.ledger import Ledger
from holdfast.proof.history import HoldingRead, Lost, Refused, SendAttempted, StopAnswered, StopRequested
from holdfast.protocol.events import MessageAccepted, MessageSettled, RunRestarted, RunStarted, ToolFinished
from holdfast.protocol.stopping import NOT_ENDED

__all__ = ["bounded", "fair", "private", "walled"]

_HIDDEN = frozenset(("not_found", "unknown_session", "unknown_message", "unknown_run", "forbidden", "unauthenticated"))
_WORKSPACE_OF = "the workspace of"
"""How `holdfast.proof.storm.wall_probe` begins the report of another workspace; the session follows."""
_AT_A_LIMIT = frozenset(("rate_limited", "host_busy", "budget_exceeded", "quota_exceeded", "limit_exceeded"))


def bounded(facts: Facts, ledger: Ledger) -> None:
    """P9: every wait has a deadline, every queue a bound, every retry a limit.

    *Observations*: each call, each session's mailbox over its whole log, and each restart of a run.

    *Violations*:

    - a call was never answered, or was answered later than its bound allows (``stop_s`` for stops, ``answer_s`` for
      other calls), although no host was killed or exited meanwhile;
    - a stop's receipt reports a longer time than the bound for stops;
    - more messages wait than the mailbox may hold;
    - a message is refused as ``mailbox_full`` although the session's mailbox was never full;
    - a run is restarted more often than allowed without completing a call in between;
    - a call got no answer although the host was ready before the call and survived the call;
    - hosts gave up more than ``given_up`` stops of runs on other hosts that were alive from the request to the answer.

    Calls of a hostile principal need not be answered in time. In a storm with a hostile principal, each reading of the
    server's resources is an observation, too. It is a violation if the server has more than ``descriptors`` open
    descriptors, or if its memory use, once the hostile principal has released everything, has grown by more than
    ``kept_memory`` bytes. Memory use before the release does not count, because on a busy machine any load causes short
    peaks. It is also a violation if the memory use was not read after the release.
    """
    limits = facts.limits
    highest: dict[tuple[str, str], int] = {}
    for log in facts.logs.values():
        ledger.saw()
        highest[log.where] = _judge_mailbox(facts, ledger, log)
        for run in log.runs.values():
            in_vain = 0
            for event in run.events:
                if isinstance(event, RunRestarted):
                    ledger.saw()
                    in_vain += 1
                    if in_vain == limits.attempts:
                        ledger.broken(f"a run was restarted {in_vain} times in vain", log.where, event)
                elif isinstance(event, ToolFinished) and event.status != "interrupted":
                    in_vain = 0
    end = facts.records[-1].at
    _judge_holdings(facts, ledger)
    _judge_given_up(facts, ledger)
    for call in facts.calls.values():
        if call.request.principal == facts.opened.hostile:
            continue
        ledger.saw()
        request, answer = call.request, call.answer
        bound = limits.stop_s if isinstance(request, StopRequested) else limits.answer_s
        if answer is None:
            if not facts.broke_between(request.at, end):
                ledger.broken("a call was never answered", request)
            continue
        if facts.broke_between(request.at, answer.at):
            continue
        if answer.at - request.at > bound:
            ledger.broken(f"a call took {answer.at - request.at:.1f} s, its bound is {bound:g} s", request, answer)
        elif isinstance(answer, Lost) and facts.lived_through(request.at, answer.at + limits.answer_s):
            ledger.broken("a call got no answer from a living host", request, answer)
        if isinstance(answer, StopAnswered) and answer.receipt.elapsed_s > bound:
            ledger.broken(f"a stop took {answer.receipt.elapsed_s:.1f} s by its own receipt", request, answer)
        if isinstance(request, SendAttempted) and isinstance(answer, Refused) and answer.code == "mailbox_full":
            most = highest.get(call.where, 0)
            if most < limits.mailbox:
                ledger.broken(
                    f"refused as full, but at most {most} of {limits.mailbox} places were ever used", request, answer
                )


def _judge_holdings(facts: Facts, ledger: Ledger) -> None:
    before: dict[int, HoldingRead] = {}
    compared = False
    for read in facts.holdings:
        ledger.saw()
        if read.moment == "before":
            before[read.incarnation] = read
        elif read.moment == "after" and read.incarnation in before:
            compared = True
            kept = read.memory - before[read.incarnation].memory
            if kept > facts.limits.kept_memory:
                ledger.broken(
                    f"the server holds {kept:,} bytes more than before a hostile principal, which has let go",
                    before[read.incarnation],
                    read,
                )
        if read.descriptors > facts.limits.descriptors:
            ledger.broken(f"the server holds {read.descriptors} descriptors beside a hostile principal", read)
    if before and not compared:
        ledger.broken("the server's memory was not read after a hostile principal", *before.values())


def _judge_given_up(facts: Facts, ledger: Ledger) -> None:
    given_up = [
        (request, answer)
        for request, answer in facts.stops()
        if isinstance(answer, StopAnswered)
        and any(NOT_ENDED in left for left in answer.receipt.unattributed)
        and (hosts := facts.hosts_of(request, answer.at))
        and all(facts.was_alive(pid, request.at, answer.at) for pid in hosts)
    ]
    if len(given_up) > facts.limits.given_up:
        ledger.broken(
            f"{len(given_up)} stops were given up although the hosts that had the runs were alive, the bound is "
            f"{facts.limits.given_up}",
            *given_up,
        )


def _judge_mailbox(facts: Facts, ledger: Ledger, log: SessionLog) -> int:
    waiting: set[str] = set()
    most = 0
    for event in log.events:
        if isinstance(event, MessageAccepted):
            waiting.add(event.message_id)
            most = max(most, len(waiting))
            if len(waiting) == facts.limits.mailbox + 1 and facts.limits.mailbox:
                ledger.broken(f"more than {facts.limits.mailbox} messages waited", log.where, event)
        elif isinstance(event, RunStarted):
            waiting.difference_update(event.messages)
        elif isinstance(event, MessageSettled):
            waiting.discard(event.message_id)
    return most


def fair(facts: Facts, ledger: Ledger) -> None:
    """P13: competing consumers each get their share.

    *Observations*: each count of a resource (`SharesCounted`) with at least two consumers that were backlogged
    throughout; and in a storm with a hostile principal, each bomb, and each program of another principal that only
    waited.

    *Violations*:

    - the shares do not add up to the total;
    - a backlogged consumer got nothing;
    - a backlogged consumer got less than its even share divided by ``share_factor``, or more than its even share times
      ``share_factor``;
    - a backlogged consumer waited longer than ``answer_s`` for its next turn;
    - a bomb used more than its quota and ``bomb_slack`` times the overshoot that its host states;
    - a bomb used more than its quota, and the tool's result does not name it;
    - a process of a bomb was alive after the tool's result;
    - the host ended a program of a principal that threw no bomb;
    - no bomb was thrown, although the storm could see what becomes of bombs.
    """
    _judge_bombs(facts, ledger)
    factor, longest = facts.limits.share_factor, facts.limits.answer_s
    for counted in facts.shares:
        backlogged = [share for share in counted.shares if share.backlogged]
        if sum(share.got for share in counted.shares) != counted.given:
            ledger.broken("the shares do not add up to what was given", counted)
        if len(backlogged) < 2:
            continue
        ledger.saw()
        even = sum(share.got for share in backlogged) / len(backlogged)
        for share in backlogged:
            if share.got == 0:
                ledger.broken(f"{share.consumer} got nothing of {counted.resource}", counted)
            elif share.got < even / factor:
                ledger.broken(
                    f"{share.consumer} got {share.got} of {counted.resource}, even would be {even:.1f}", counted
                )
            elif share.got > even * factor:
                ledger.broken(
                    f"{share.consumer} took {share.got} of {counted.resource}, even would be {even:.1f}", counted
                )
            if share.longest_wait_s > longest:
                ledger.broken(f"{share.consumer} waited {share.longest_wait_s:.1f} s for its turn", counted)


def _judge_bombs(facts: Facts, ledger: Ledger) -> None:
    if "bombs" in facts.opened.sees and not facts.bombs:
        ledger.broken("no bomb was thrown", facts.opened)
    for bomb in facts.bombs:
        ledger.saw()
        if bomb.peak > bomb.quota + facts.limits.bomb_slack * bomb.overshoot:
            ledger.broken(
                f"one of the {bomb.name} used {bomb.peak:,}, its quota is {bomb.quota:,} and the stated overshoot "
                f"{bomb.overshoot:,}",
                bomb,
            )
        elif bomb.peak > bomb.quota and not bomb.reported:
            ledger.broken(f"one of the {bomb.name} was above its quota, and its result does not name it", bomb)
        outlived = next(facts.alive_after(bomb.run_id, bomb.at), None)
        if outlived is not None:
            ledger.broken(f"one of the {bomb.name} outlived its run", bomb, *outlived)
    for stamp in facts.stamps:
        if stamp.what == "program" and stamp.principal != facts.opened.hostile:
            ledger.saw(1 if facts.opened.hostile else 0)
            if stamp.ended:
                ledger.broken("the host ended a program of a principal that threw no bomb", stamp)


def private(facts: Facts, ledger: Ledger) -> None:
    """P14: a principal sees and stops only its own sessions, and slows others only within its caps.

    *Observations*: each attempt to access another principal's session, each list of sessions, each program that tried
    to leave its wall, and each reading of a principal's number of runs if runs are capped.

    *Violations*:

    - such an attempt is not refused as ``not found``, ``forbidden`` or ``unauthenticated``;
    - an owner is refused access to its own session in one of these ways;
    - a list names another principal's session;
    - a session's log contains a message that another principal sent;
    - a session's run is stopped for a reason that another principal gave;
    - a program of a tool reached the workspace of another principal;
    - a principal has more runs than its cap.

    In a storm with a hostile principal, it is also a violation if another principal's send or stop is refused because
    the host or that principal is at a limit, or if a stream still receives data more than ``revoked_s`` after its key
    was revoked, or is not closed by the server.
    """
    senders: dict[str, set[str]] = {}
    for attempt, _ in facts.sends():
        senders.setdefault(attempt.content, set()).add(attempt.principal)
    for tried in facts.accesses:
        if tried.principal == tried.owner:
            if tried.answer in _HIDDEN:
                ledger.broken("an owner is refused its own session", tried)
            continue
        ledger.saw()
        if tried.answer not in _HIDDEN:
            ledger.broken("a principal reached a session of another one", tried)
    for listed in facts.lists:
        ledger.saw()
        foreign = [item for item in listed.seen if item[0] != listed.principal]
        if foreign:
            ledger.broken("a list of sessions names another principal's", listed.principal, foreign)
    stoppers = {request.reason: request for request, _ in facts.stops()}
    for log in facts.logs.values():
        for accepted in log.accepted.values():
            by = senders.get(accepted[0].content)
            if by and log.where[0] not in by:
                ledger.broken("a message of another principal stands in this log", log.where, accepted[0])
        for run in log.runs.values():
            for event in run.stopping:
                request = stoppers.get(event.cause.reason) if event.cause.reason else None
                if request is not None and request.principal != log.where[0]:
                    ledger.broken("another principal stopped this run", log.where, event, request)
    for stamp in facts.stamps:
        if stamp.what == "probe":
            ledger.saw()
            own = f"{_WORKSPACE_OF} {stamp.principal}/"
            if any(what.startswith(_WORKSPACE_OF) and not what.startswith(own) for what in stamp.reached):
                ledger.broken("a program reached the workspace of another principal", stamp)
    if facts.opened.hostile:
        _judge_hostile(facts, ledger)
    cap = facts.limits.principal_runs
    if cap:
        for read in facts.statistics:
            for principal, running in read.running_of:
                ledger.saw()
                if running > cap:
                    ledger.broken(f"{principal} has {running} runs, its cap is {cap}", read)


def walled(facts: Facts, ledger: Ledger) -> None:
    """P16: what an agent's tools run sees its session's workspace and nothing of the server or of other sessions.

    *Observations*: each program that tried to leave its wall.

    *Violations*: such a program reached a file of the host or of another session, the host's memory or environment, or
    the host's port.
    """
    for stamp in facts.stamps:
        if stamp.what == "probe":
            ledger.saw()
            if stamp.reached:
                ledger.broken(f"a program left its wall: it reached {', '.join(stamp.reached)}", stamp)


def _judge_hostile(facts: Facts, ledger: Ledger) -> None:
    for call in facts.calls.values():
        if call.request.principal == facts.opened.hostile or not isinstance(
            call.request, SendAttempted | StopRequested
        ):
            continue
        ledger.saw()
        if isinstance(call.answer, Refused) and call.answer.code in _AT_A_LIMIT:
            ledger.broken("a hostile principal kept another one out", call.request, call.answer)
    for stream in facts.revoked:
        ledger.saw()
        if stream.late_s > facts.limits.revoked_s:
            ledger.broken(f"a stream got bytes {stream.late_s:.1f} s after its key was revoked", stream)
        elif not stream.ended:
            ledger.broken("a stream was not ended after its key was revoked", stream)
